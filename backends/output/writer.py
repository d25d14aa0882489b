"""What parsers write to: events in their legal order, with neighbours of one kind made one."""

from __future__ import annotations

from collections.abc import Callable

from backends.output.reading import NotACall
from backends.output.tool_table import ToolTable
from protocols.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted

CallIds = Callable[[int], str]
"""The id of a call by its index, for models that give their calls none."""


class Writer:
    """`naked` is set while nothing but the name of a tool shows that text is a call (`ToolTable.resolve`).

    `raw` is what was read since the last output of a call: it becomes text if it turns out to be none.
    """

    def __init__(self, tools: ToolTable, call_ids: CallIds, choice: int = 0, parallel: bool = True) -> None:
        self.tools = tools
        self.naked = False
        self.raw: list[str] = []
        self.begun = self.complete = 0  # calls
        self.open = False
        self.was_cut = False
        self._call_ids = call_ids
        self._ids: set[str] = set()  # a model may give the same twice
        self._choice = choice
        self._parallel = parallel
        self._events: list[Event] = []
        self._kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallDelta] = TextDelta
        self._parts: list[str] = []

    @property
    def full(self) -> bool:
        """No further call may follow."""
        return bool(self.complete) and not self._parallel

    def take(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        self._add(TextDelta, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta, text)

    def start(self, name: str, id: str = "") -> str:
        """The call is certain to be one. Returns the name of its tool; raises `NotACall` if that is none."""
        assert not self.open
        if self.full:
            raise NotACall
        name = self.tools.resolve(name, declared=self.naked)
        if not id or id in self._ids:
            id = self._call_ids(self.begun)
        self._ids.add(id)
        self._flush()
        self._events.append(ToolCallStarted(self.begun, id, name, self._choice))
        self.begun += 1
        self.open = True
        self.raw.clear()
        return name

    def write(self, arguments: str) -> None:
        """JSON text."""
        self._add(ToolCallDelta, arguments)
        self.raw.clear()

    def end(self) -> None:
        """The call is complete."""
        self.complete += 1
        self._end()

    def cut(self) -> None:
        """The call stays incomplete: its arguments are what was written."""
        self.was_cut = True
        self._end()

    def _end(self) -> None:
        assert self.open
        self._flush()
        self._events.append(ToolCallEnded(self.begun - 1, self._choice))
        self.open = False
        self.raw.clear()

    def _add(self, kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallDelta], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if not text:
            return
        if self._kind is ToolCallDelta:
            self._events.append(ToolCallDelta(self.begun - 1, text, self._choice))
        elif self._kind is TextDelta:
            self._events.append(TextDelta(text, choice=self._choice))
        else:
            self._events.append(ReasoningDelta(text, self._choice))
