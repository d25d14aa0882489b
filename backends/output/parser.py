"""Takes apart what a chat model writes: thinking, text and tool calls, each passed on as it comes.

Text and thinking are searched for markup; what may be the beginning of some is held back, and so is white space, which
belongs to the markup it stands next to, unless text goes on behind it. Inside the thinking nothing but its end is
markup, and inside a call nothing but what the call's format knows: so neither can be mistaken for the other.

Characters are taken one by one, so where pieces of text begin makes no difference. At most `MAX_HELD` of them are held.
Whatever turns out not to be a call after all becomes text; what was passed on is never taken back.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

from backends.output.reading import NotACall, Reading
from backends.output.reasoning import ReasoningFormat
from backends.output.stops import StopTable
from backends.output.tools.format import ToolFormat
from backends.output.writer import Writer
from protocols.events import Event, FinishReason

MAX_HELD = 2048
MAX_SPACE = 64


class OutputParser(Protocol):
    """Turns text into events, never into `Started` or `Finished`."""

    @property
    def stop_now(self) -> bool:
        """The answer is complete, and nothing may be fed any more: it may have one call only, and has it."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""

    @property
    def undecided(self) -> int:
        """How many characters may still become text."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self, reason: FinishReason) -> list[Event]:
        """The answer ends for `reason`. Nothing may be fed any more."""

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """`tool_calls` in place of `stop` where there are calls, all complete."""


@lru_cache(maxsize=64)
def _search(markers: tuple[str, ...]) -> tuple[StopTable, re.Pattern[str]]:
    """An automaton that finds `markers`, and a pattern for text that has no beginning of one, nor white space."""
    firsts = re.escape("".join(sorted({marker[0] for marker in markers})))
    return StopTable(markers), re.compile(rf"[^\s{firsts}]+")


class ChatParser:
    def __init__(
        self,
        writer: Writer,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        thinking: bool = False,
    ) -> None:
        """`thinking`: the answer begins with it, the prompt has opened it."""
        self._out = writer
        self._tools = tools
        self._reasoning = reasoning
        self._naked = tools.naked_markers if tools is not None else ()
        begins, dropped = (reasoning.begins, reasoning.dropped) if reasoning is not None else ((), ())
        self._text_markers = (*begins, *dropped, *(tools.markers if tools is not None else ()), *self._naked)
        self._held = ""  # white space, and what may be a marker
        self._state = 0
        self._on_line = False  # the line has text
        self._has_text = False
        self._gap = ""  # white space between the text so far and the markup behind it
        self._call: Reading[str] | None = None
        self._opening = ""  # what the call began with, until that is certain
        self._calls_before = 0
        self._search(thinking, fresh=thinking)

    @property
    def stop_now(self) -> bool:
        return self._out.full

    @property
    def thinking(self) -> bool:
        return self._thinking

    @property
    def undecided(self) -> int:
        if self._call is not None:
            return 0 if self._out.open else len(self._out.raw) + len(self._opening)
        return len(self._held)

    def feed(self, text: str) -> list[Event]:
        self._take(text)
        return self._out.take()

    def finish(self, reason: FinishReason) -> list[Event]:
        while self._call is not None:
            if self._out.open:
                self._out.cut()
            if not self._opening or (reason == "length" and self._opening.strip() not in self._naked):
                self._call = None  # the rest of a call that is cut off, or of the markup behind one
                self._search(thinking=False, fresh=True)
            else:
                self._take(self._refuse())
        if not self._out.full:
            self._pass(self._held)
        self._held = ""
        return self._out.take()

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._out.complete and not self._out.was_cut else reason

    def _take(self, text: str) -> None:
        todo = [(text, 0)]  # texts, and how far they are; what is given back comes before what follows it
        while todo and not self._out.full:
            text, at = todo.pop()
            while at < len(text) and not self._out.full:
                if self._call is not None:
                    back = self._step(self._call, text[at])
                    at += 1
                    if back:
                        todo.append((text, at))
                        text, at = back, 0
                elif not self._held and (plain := self._plain.match(text, at)):
                    self._pass(plain[0])
                    self._state = 0
                    at = plain.end()
                else:
                    self._scan(text[at])
                    at += 1

    # --- text and thinking ---

    def _search(self, thinking: bool, fresh: bool) -> None:
        """Goes on as thinking or as text; `fresh` if it begins behind markup."""
        self._thinking = thinking
        markers = self._reasoning.ends if thinking and self._reasoning is not None else self._text_markers
        self._table, self._plain = _search(markers)
        self._fresh = fresh
        self._state = 0
        self._on_line = False

    def _scan(self, char: str) -> None:
        if self._fresh and not self._held and char.isspace():
            return
        self._held += char
        self._state = self._table.step(self._state, char)
        if (marker := self._table.match[self._state]) is not None:
            self._state = 0
            self._found(marker)
            return
        certain = self._held[: len(self._held) - self._table.depth[self._state]]
        keep = len(certain.rstrip())
        self._release(max(keep, len(certain) - MAX_SPACE))

    def _release(self, count: int) -> None:
        text, self._held = self._held[:count], self._held[count:]
        self._pass(text)

    def _pass(self, text: str) -> None:
        if not text:
            return
        self._fresh = False
        line = text.rpartition("\n")
        self._on_line = bool(line[2].strip()) or (self._on_line and not line[1])
        if self._thinking:
            self._out.reasoning(text)
            return
        self._out.text(self._gap + text)
        self._has_text, self._gap = True, ""

    def _leave_text(self, space: str) -> None:
        """Markup follows the text, behind `space`."""
        if self._has_text and space:
            self._gap = space

    def _found(self, marker: str) -> None:
        before = self._held[: -len(marker)]
        reasoning = self._reasoning
        if reasoning is not None and self._thinking:
            self._release(len(before.rstrip()))
            self._held = ""
            self._search(thinking=False, fresh=True)
            return
        begins = reasoning.begins if reasoning is not None else ()
        begins_line = not before.rpartition("\n")[2].strip() and ("\n" in before or not self._on_line)
        if (marker in begins or marker in self._naked) and not begins_line:
            self._release(len(self._held))  # a mention in the middle of a sentence
            return
        self._release(len(before.rstrip()))
        if reasoning is not None and (marker in begins or marker in reasoning.dropped):
            self._leave_text(self._held[: -len(marker)])
            self._held = ""
            self._search(thinking=marker in begins, fresh=True)
            return
        self._begin_call(marker)

    # --- calls ---

    def _begin_call(self, marker: str) -> None:
        assert self._tools is not None and self._tools.read is not None
        self._opening, self._held = self._held, ""
        self._calls_before = self._out.begun
        self._out.raw.clear()
        self._out.naked = marker in self._naked
        self._call = self._tools.read(self._out, marker)
        next(self._call)

    def _step(self, call: Reading[str], char: str) -> str:
        """Takes a character of a call. Returns what the call gives back."""
        raw = self._out.raw
        raw.append(char)
        try:
            call.send(char)
        except StopIteration as end:
            self._forget_opening()
            self._leave_call()
            return str(end.value)
        except NotACall:
            return self._refuse()
        if self._opening and self._out.begun > self._calls_before:
            self._forget_opening()
        if len(raw) + len(self._opening) >= MAX_HELD:
            return self._refuse()
        return ""

    def _refuse(self) -> str:
        """It is no call, or no longer. Returns what was read and is text, but for the beginning that is sure to be."""
        begun = self._out.begun > self._calls_before
        rest = "".join(self._out.raw)
        if begun:
            self._forget_opening()
        opening = self._opening
        if self._out.open:
            self._out.cut()
        self._leave_call()
        self._pass(opening)
        return rest

    def _forget_opening(self) -> None:
        """A call has begun: what it began with is markup."""
        self._leave_text(self._opening[: len(self._opening) - len(self._opening.lstrip())])
        self._opening = ""

    def _leave_call(self) -> None:
        self._call = None
        self._opening = ""
        self._out.raw.clear()
        self._out.naked = False
        self._search(thinking=False, fresh=True)
