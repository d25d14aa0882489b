"""What a generation produces: a closed union of frozen structs, their legal order, and the `Frame` they travel in.

Consume with `match` and end with `assert_never`, so that a new event is a type error wherever it is not handled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from itertools import groupby
from typing import Literal, cast

import msgspec

from protocols.errors import ErrorInfo
from protocols.request import Sampling

FinishReason = Literal["stop", "length", "tool_calls"]
"""stop: end of generation or a stop string; length: token budget or context; tool_calls: complete calls, then stop."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one choice. `cached_tokens` <= `prompt_tokens`; `reasoning_tokens` <= `completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Where the time went: `prompt_n` tokens computed (without `cache_n` reused) in `prompt_ms`, then `predicted_n`.

    Of those, `draft_n` were guessed before they were computed, and `draft_n_accepted` of the guesses were right.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int = 0
    draft_n_accepted: int = 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log-probability and the alternatives considered. `data` are the raw bytes of the piece."""

    token: int
    data: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


SpeculationKind = Literal["off", "ngram", "draft"]
"""Who guesses the next tokens: nobody, what was said before, or a smaller model."""


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """What the engine made of a request: the text of all its prompt's tokens, and every parameter as it applies.

    `grammar` is the GBNF that its constraint became.
    """

    prompt: str
    sampling: Sampling
    grammar: str = ""
    speculation: SpeculationKind = "off"


class _Event(msgspec.Struct, frozen=True, array_like=True, kw_only=False):
    """Arrays on the wire: [tag, field, …], so a delta costs a few bytes more than its text."""


class Started(_Event, frozen=True, array_like=True, tag="S"):
    """The request holds a slot and its prompt is tokenised. Exactly once per stream, first."""

    prompt_tokens: int
    cached_tokens: int
    choice: int = 0
    echo: Echo | None = None  # where `Extras.echo` asks for it


class Progress(_Event, frozen=True, array_like=True, tag="P"):
    """Prefill so far: `processed` of `total` prompt tokens, `cached` of them reused, after `ms` milliseconds."""

    processed: int
    cached: int
    total: int
    ms: float
    choice: int = 0


class ReasoningDelta(_Event, frozen=True, array_like=True, tag="R"):
    text: str
    choice: int = 0
    timings: Timings | None = None  # so far, where `Extras.timings` asks for it, as with every delta


class TextDelta(_Event, frozen=True, array_like=True, tag="T"):
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    timings: Timings | None = None


class ToolCallStarted(_Event, frozen=True, array_like=True, tag="C"):
    """`index` counts the calls of one choice from 0 without gaps."""

    index: int
    id: str
    name: str
    choice: int = 0


class ToolCallDelta(_Event, frozen=True, array_like=True, tag="D"):
    """The next piece of the call's JSON arguments."""

    index: int
    arguments: str
    choice: int = 0
    timings: Timings | None = None


class ToolCallEnded(_Event, frozen=True, array_like=True, tag="E"):
    index: int
    choice: int = 0


class Finished(_Event, frozen=True, array_like=True, tag="F"):
    """The choice is complete. `stop_sequence` is the stop string that matched, if one did; it is not in the text.

    `slot` computed it and holds `slot_tokens` of it now; -1 is none. `truncated`: the context was too small for it.
    """

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    timings: Timings | None = None
    choice: int = 0
    slot: int = -1
    slot_tokens: int = 0
    truncated: bool = False


class Failed(_Event, frozen=True, array_like=True, tag="X"):
    """The stream ends here, for all its choices. Backends raise; this is the exception where it crosses a process."""

    error: ErrorInfo
    choice: int = 0


Event = (
    Started
    | Progress
    | ReasoningDelta
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallEnded
    | Finished
    | Failed
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The events that were ready together, and the ids of the tokens behind them. All belong to one `choice`.

    A frame may have tokens and no events (text is held back), or events and no tokens (prefill progress).
    Concatenating `tokens` over a stream gives exactly the generated ids: what a `Request.resume` needs.
    """

    events: tuple[Event, ...]
    tokens: tuple[int, ...] = ()
    choice: int = 0


def merged(frames: Sequence[Frame]) -> Frame:
    """Several frames of one choice as one, for a client that takes them more slowly than the engine makes them.

    Pieces of the same text that follow each other become one piece: to the client as much text in fewer events, to the
    server the work of one. Those that say something of their own tokens, probabilities or timings, stay apart.
    """
    tokens = tuple([token for frame in frames for token in frame.tokens])
    if (text := _plain_text(frames)) is not None:
        return Frame((TextDelta(text, choice=frames[0].choice),), tokens, frames[0].choice)
    events: list[Event] = []
    for piece_of, group in groupby((event for frame in frames for event in frame.events), _piece_of):
        pieces = list(group)
        if piece_of is None or len(pieces) == 1:
            events += pieces
        elif type(first := pieces[0]) is ToolCallDelta:
            arguments = "".join(piece.arguments for piece in cast(list[ToolCallDelta], pieces))
            events.append(ToolCallDelta(first.index, arguments, first.choice))
        else:
            of_text = cast(list[TextDelta] | list[ReasoningDelta], pieces)
            text = "".join([piece.text for piece in of_text])
            kind = type(of_text[0])
            events.append(kind(text, choice=first.choice))
    return Frame(tuple(events), tokens, frames[0].choice)


def _plain_text(frames: Sequence[Frame]) -> str | None:
    """What `frames` say, if each is one piece of text and no more: what a fast engine makes, and a slow client gets."""
    texts = []
    for frame in frames:
        events = frame.events
        if len(events) != 1 or type(event := events[0]) is not TextDelta or _piece_of(event) is None:
            return None
        texts.append(event.text)
    return "".join(texts)


def _piece_of(event: Event) -> object:
    """The same for pieces that may become one; None for what may not."""
    # `isinstance` takes five times as long as `type` with these classes.
    if type(event) is TextDelta:
        return TextDelta if not event.logprobs and event.timings is None else None
    if type(event) is ReasoningDelta:
        return ReasoningDelta if event.timings is None else None
    if type(event) is ToolCallDelta:
        return event.index if event.timings is None else None
    return None


class State(Enum):
    """Where one choice of a stream stands; the rows of `LEGAL`."""

    NEW = auto()
    PREFILL = auto()
    REASONING = auto()
    TEXT = auto()
    BETWEEN = auto()
    TOOL_CALL = auto()
    DONE = auto()


_DELTAS: dict[type, State] = {
    ReasoningDelta: State.REASONING,
    TextDelta: State.TEXT,
    ToolCallStarted: State.TOOL_CALL,
    Finished: State.DONE,
    Failed: State.DONE,
}

LEGAL: dict[State, dict[type, State]] = {
    State.NEW: {Started: State.PREFILL, Failed: State.DONE},
    State.PREFILL: {Progress: State.PREFILL, **_DELTAS},
    State.REASONING: _DELTAS,
    State.TEXT: _DELTAS,
    State.BETWEEN: _DELTAS,  # after a tool call
    State.TOOL_CALL: {ToolCallDelta: State.TOOL_CALL, ToolCallEnded: State.BETWEEN, Failed: State.DONE},
    State.DONE: {},
}
"""The order of events, written once: state -> event -> next state. Everything that is not here is a bug.

`Started` comes once for all choices (it opens them together); a tool call is closed before anything else opens;
`Finished` ends one choice, `Failed` ends the stream; nothing follows either.
"""


class IllegalEvent(Exception):
    """A producer broke the order of `LEGAL`: a bug on our side, never the client's fault."""


class EventOrder:
    """Checks a stream against `LEGAL`, and tool-call indices for gaps. `feed` raises `IllegalEvent`."""

    def __init__(self, n: int = 1) -> None:
        self._states = [State.NEW] * n
        self._calls = [0] * n

    @property
    def done(self) -> bool:
        return all(state is State.DONE for state in self._states)

    def feed(self, event: Event) -> None:
        if not 0 <= event.choice < len(self._states):
            raise IllegalEvent(f"choice {event.choice} of a stream with {len(self._states)}: {event}")
        choices: Iterable[int] = (event.choice,)
        if isinstance(event, Started | Failed):
            choices = [c for c, state in enumerate(self._states) if state is not State.DONE] or choices
        for choice in choices:
            before = self._states[choice]
            after = LEGAL[before].get(type(event))
            if after is None:
                raise IllegalEvent(f"{type(event).__name__} in state {before.name} of choice {choice}")
            self._states[choice] = after
        if isinstance(event, ToolCallStarted):
            if event.index != self._calls[event.choice]:
                raise IllegalEvent(f"tool call {event.index}, expected {self._calls[event.choice]}")
            self._calls[event.choice] += 1
        elif isinstance(event, ToolCallDelta | ToolCallEnded) and event.index != self._calls[event.choice] - 1:
            open_call = self._calls[event.choice] - 1
            raise IllegalEvent(f"{type(event).__name__} for call {event.index}, open is {open_call}")
