"""Event scripts that the tests of every dialect share: named ones for goldens, and random legal ones for properties."""

from __future__ import annotations

from hypothesis import strategies as st

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
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

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

FAILING = frozenset(name for name, script in SCRIPTS.items() if isinstance(script[-1], Failed))
COMPLETE = tuple(name for name in SCRIPTS if name not in FAILING)


@st.composite
def legal_scripts(draw: st.DrawFn, n: int = 1, complete: bool = True, max_size: int = 12) -> tuple[Event, ...]:
    """A random walk through `LEGAL`, choices interleaved. Never fails; `complete` finishes every choice."""
    events: list[Event] = [Started(draw(st.integers(1, 1000)), 0)]
    states = [State.PREFILL] * n
    calls = [0] * n
    for _ in range(draw(st.integers(0, max_size))):
        choice = draw(st.integers(0, n - 1))
        legal = [kind for kind in LEGAL[states[choice]] if kind not in (Finished, Failed)]
        if not legal:
            continue
        event = draw(_event(draw(st.sampled_from(legal)), choice, calls))
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
    reason: FinishReason = "tool_calls" if calls[choice] else draw(st.sampled_from(("stop", "length")))
    start = events[0]
    assert isinstance(start, Started)
    cached = draw(st.integers(0, start.prompt_tokens))
    completion = draw(st.integers(0, 100))
    usage = Usage(start.prompt_tokens, completion, cached, draw(st.integers(0, completion)))
    return Finished(reason, usage, None, draw(st.none() | st.just(TIMINGS)), choice)
