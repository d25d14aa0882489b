"""Event scripts that the tests of every dialect share: named ones for goldens, and random legal ones for properties."""

from __future__ import annotations

from hypothesis import strategies as st

from protocols.codec import Encoder, Stamp
from protocols.collect import BatchCollector, Completion
from protocols.errors import ErrorInfo
from protocols.events import (
    LEGAL,
    Event,
    Failed,
    Finished,
    FinishReason,
    Progress,
    ReasoningDelta,
    Started,
    State,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

STAMP = Stamp("0123456789abcdef", 1_700_000_000, lambda: 1_700_000_009)
TIMINGS = Timings(cache_n=2, prompt_n=8, prompt_ms=16.0, predicted_n=5, predicted_ms=40.0)
START = Started(prompt_tokens=10, cached_tokens=2)


def _end(reason: FinishReason = "stop", reasoning_tokens: int = 0, stop_sequence: str | None = None) -> Finished:
    return Finished(reason, Usage(10, 5, 2, reasoning_tokens), stop_sequence, TIMINGS)


SCRIPTS: dict[str, tuple[Event, ...]] = {
    "text": (START, TextDelta("Hello"), TextDelta(", "), TextDelta("world"), TextDelta("!"), _end()),
    "reasoning_then_text": (
        START,
        Progress(2, 2, 10, 0.0),
        Progress(10, 2, 10, 16.0),
        ReasoningDelta("Let me"),
        ReasoningDelta(" think."),
        TextDelta("42"),
        _end(reasoning_tokens=3),
    ),
    "empty": (START, _end()),
    "unicode": (
        START,
        TextDelta('Ünï "quoted" \\ back\n'),
        TextDelta("日本語"),
        TextDelta(""),
        TextDelta("👩‍👩‍👧\u2028\x00\x7f"),
        TextDelta("</script>\r\n\tdata: [DONE]\n\n"),
        _end(),
    ),
    "tool_call": (
        START,
        TextDelta("Let me look."),
        ToolCallStarted(0, "call_a", "get_weather"),
        ToolCallDelta(0, '{"city":'),
        ToolCallDelta(0, '"Zürich"}'),
        ToolCallEnded(0),
        _end("tool_calls"),
    ),
    "two_tool_calls": (
        START,
        ToolCallStarted(0, "call_a", "get_weather"),
        ToolCallDelta(0, '{"city":"Bern"}'),
        ToolCallEnded(0),
        ToolCallStarted(1, "call_b", "get_time"),  # a call without arguments
        ToolCallEnded(1),
        _end("tool_calls"),
    ),
    "failed_mid_stream": (
        START,
        TextDelta("Hello"),
        Failed(ErrorInfo("backend_lost", "The replica was lost")),
    ),
    "failed_first": (Failed(ErrorInfo("context_overflow", "Prompt has 9 tokens", None, None, {"n_ctx": 8})),),
    "length": (START, TextDelta("One two"), TextDelta(" three"), _end("length")),
    "stop_sequence": (START, TextDelta("One"), _end("stop", stop_sequence=" two")),
}


def _so_far(tokens: int) -> Timings:
    return Timings(2, 8, 16.0, tokens, 8.0 * tokens)


TIMED: tuple[Event, ...] = (
    START,
    ReasoningDelta("Hm.", timings=_so_far(1)),
    TextDelta("Let me look.", (TokenLogprob(1, b"Let me look.", -0.5),), timings=_so_far(2)),
    ToolCallStarted(0, "call_a", "get_weather"),
    ToolCallDelta(0, "{}", timings=_so_far(3)),
    ToolCallEnded(0),
    _end("tool_calls"),
)
"""Every delta tells how long it took so far."""

FAILING = frozenset(name for name, script in SCRIPTS.items() if isinstance(script[-1], Failed))
COMPLETE = tuple(name for name in SCRIPTS if name not in FAILING)


def encoded(encoder: Encoder, script: tuple[Event, ...]) -> bytes:
    return b"".join(encoder.feed(event) for event in script)


def collected(script: tuple[Event, ...], *counts: int) -> Completion:
    """`counts`: the choices of each request, of which there is one with one choice where nothing is said."""
    collector = BatchCollector(counts or (1,))
    for event in script:
        collector.feed(event)
    return collector.result()


def _token(data: bytes, logprob: float, *top: tuple[bytes, float]) -> TokenLogprob:
    return TokenLogprob(1, data, logprob, tuple(TokenLogprob(2, other, value) for other, value in top))


LOGPROBS: tuple[Event, ...] = (
    START,
    TextDelta("Zü", (_token(b"Z", -0.25, (b"Z", -0.25), (b"B", -1.5)), _token(b"\xc3", -0.5), _token(b"\xbc", -1e-3))),
    TextDelta("rich", (_token(b"rich", -2.0, (b"ri", -0.125), (b"\xff", -3.0)),)),
    TextDelta("!"),
    TextDelta("", (_token(b"", -0.75),)),
    _end(),
)
"""A character of two tokens, text without a probability, and an end that has one but no text."""

TWO_CHOICES: tuple[Event, ...] = (
    START,
    TextDelta("B", choice=1),
    TextDelta("A", choice=0),
    Finished("length", Usage(10, 1, 2), choice=1),
    ToolCallStarted(0, "", "f"),
    ToolCallDelta(0, '{"a":1}'),
    ToolCallEnded(0),
    ToolCallStarted(1, "", "g"),
    ToolCallEnded(1),
    Finished("tool_calls", Usage(10, 5, 2), None, TIMINGS),
)
"""Interleaved; the calls of the first have no ids."""


@st.composite
def legal_scripts(
    draw: st.DrawFn, n: int = 1, complete: bool = True, max_size: int = 12, logprobs: bool = False
) -> tuple[Event, ...]:
    """A random walk through `LEGAL`, choices interleaved. Never fails; `complete` finishes every choice.

    With `logprobs`, deltas of text have some; of tokens that need not be whole characters.
    """
    events: list[Event] = [Started(draw(st.integers(1, 1000)), 0)]
    states = [State.PREFILL] * n
    calls = [0] * n
    for _ in range(draw(st.integers(0, max_size))):
        choice = draw(st.integers(0, n - 1))
        legal = [kind for kind in LEGAL[states[choice]] if kind not in (Finished, Failed)]
        if not legal:
            continue
        event = draw(_event(draw(st.sampled_from(legal)), choice, calls))
        if logprobs and isinstance(event, TextDelta):
            event = TextDelta(event.text, draw(_LOGPROBS), choice)
        events.append(event)
        states[choice] = LEGAL[states[choice]][type(event)]
        if draw(st.integers(0, 9)) == 0 and Finished in LEGAL[states[choice]]:
            events.append(draw(_finished(choice, events, calls)))
            states[choice] = State.DONE
    if complete:
        for choice, state in enumerate(states):
            if state is State.TOOL_CALL:
                events.append(ToolCallEnded(calls[choice] - 1, choice))
            if state is not State.DONE:
                events.append(draw(_finished(choice, events, calls)))
    return tuple(events)


_TEXT = st.text(alphabet='aB é日\U0001f469\u200d\u2028\n\r\t\0"\\{}<', max_size=8)


_VALUES = st.floats(-100, 0)
_PIECES = st.sampled_from((b"a", b" b", b"\xc3", b"\xbc", b"\xf0\x9f", "日".encode(), b"")) | st.binary(max_size=3)
_ALTERNATIVES = st.lists(st.builds(TokenLogprob, st.integers(0, 9), _PIECES, _VALUES), max_size=2).map(tuple)
_LOGPROBS = st.lists(st.builds(TokenLogprob, st.integers(0, 9), _PIECES, _VALUES, _ALTERNATIVES), max_size=3).map(tuple)


@st.composite
def _event(draw: st.DrawFn, kind: type, choice: int, calls: list[int]) -> Event:
    if kind is Progress:
        return Progress(draw(st.integers(0, 10)), 0, 10, 1.0, choice)
    if kind is ReasoningDelta:
        return ReasoningDelta(draw(_TEXT), choice)
    if kind is TextDelta:
        return TextDelta(draw(_TEXT), choice=choice)
    if kind is ToolCallStarted:
        calls[choice] += 1
        index = calls[choice] - 1
        return ToolCallStarted(
            index, f"call_{choice}_{index}", draw(st.sampled_from(("f", "get_weather", "ü"))), choice
        )
    if kind is ToolCallDelta:
        return ToolCallDelta(calls[choice] - 1, draw(_TEXT), choice)
    assert kind is ToolCallEnded, kind
    return ToolCallEnded(calls[choice] - 1, choice)


@st.composite
def _finished(draw: st.DrawFn, choice: int, events: list[Event], calls: list[int]) -> Finished:
    complete: FinishReason = "tool_calls" if calls[choice] else "stop"
    reason = draw(st.sampled_from((complete, complete, "length")))
    start = events[0]
    assert isinstance(start, Started)
    cached = draw(st.integers(0, start.prompt_tokens))
    completion = draw(st.integers(0, 100))
    usage = Usage(start.prompt_tokens, completion, cached, draw(st.integers(0, completion)))
    stop_sequence = None if reason == "length" else draw(st.sampled_from((None, None, "STOP", "\n\n", 'ü"')))
    return Finished(reason, usage, stop_sequence, draw(st.none() | st.just(TIMINGS)), choice)
