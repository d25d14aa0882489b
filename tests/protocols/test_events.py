"""The order of events, and their wire form between processes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.collect import BatchCollector
from protocols.errors import ErrorInfo
from protocols.events import (
    LEGAL,
    Event,
    EventOrder,
    Failed,
    Finished,
    Frame,
    IllegalEvent,
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
    merged,
)
from tests.protocols.scripts import SCRIPTS, START, legal_scripts

USAGE = Usage(1, 1)
EXAMPLES: dict[type, Event] = {
    Started: START,
    Progress: Progress(1, 0, 2, 1.0),
    ReasoningDelta: ReasoningDelta("r"),
    TextDelta: TextDelta("t"),
    ToolCallStarted: ToolCallStarted(0, "call_0", "f"),
    ToolCallDelta: ToolCallDelta(0, "{}"),
    ToolCallEnded: ToolCallEnded(0),
    Finished: Finished("stop", USAGE),
    Failed: Failed(ErrorInfo("internal", "broken")),
}

# The shortest way into each state.
INTO: dict[State, tuple[Event, ...]] = {
    State.NEW: (),
    State.PREFILL: (START,),
    State.REASONING: (START, ReasoningDelta("r")),
    State.TEXT: (START, TextDelta("t")),
    State.TOOL_CALL: (START, ToolCallStarted(0, "call_0", "f")),
    State.BETWEEN: (START, ToolCallStarted(0, "call_0", "f"), ToolCallEnded(0)),
    State.DONE: (START, Finished("stop", USAGE)),
}


def feed(events: tuple[Event, ...], n: int = 1) -> EventOrder:
    order = EventOrder(n)
    for event in events:
        order.feed(event)
    return order


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_every_event_in_every_state(state: State, kind: type) -> None:
    order = feed(INTO[state])
    event = EXAMPLES[kind]
    if isinstance(event, ToolCallStarted) and state is State.BETWEEN:
        event = ToolCallStarted(1, "call_1", "f")
    if kind in LEGAL[state]:
        order.feed(event)
        assert order.done == (LEGAL[state][kind] is State.DONE)
    else:
        with pytest.raises(IllegalEvent, match=kind.__name__):
            order.feed(event)


def test_table_covers_every_event_and_state() -> None:
    assert set(LEGAL) == set(State) == set(INTO)
    assert {kind for row in LEGAL.values() for kind in row} == set(EXAMPLES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_named_scripts_are_legal(name: str) -> None:
    assert feed(SCRIPTS[name]).done


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), legal_scripts(n))))
def test_random_walks_are_legal(case: tuple[int, tuple[Event, ...]]) -> None:
    n, script = case
    assert feed(script, n).done


def test_tool_call_indices_have_no_gaps() -> None:
    with pytest.raises(IllegalEvent, match="tool call 1, expected 0"):
        feed((START, ToolCallStarted(1, "call_1", "f")))
    with pytest.raises(IllegalEvent, match="call 1, open is 0"):
        feed((START, ToolCallStarted(0, "call_0", "f"), ToolCallDelta(1, "{}")))


@pytest.mark.parametrize("event", [Started(1, 0, choice=1), TextDelta("t", choice=1), TextDelta("t", choice=-1)])
def test_unknown_choices_are_illegal(event: Event) -> None:
    order = EventOrder(1)
    if not isinstance(event, Started):
        order.feed(START)
    with pytest.raises(IllegalEvent, match="choice"):
        order.feed(event)


def test_failed_ends_all_choices_and_finished_only_one() -> None:
    order = feed((START, Finished("stop", USAGE, choice=1)), n=2)
    assert not order.done
    order.feed(TextDelta("t", choice=0))
    order.feed(EXAMPLES[Failed])
    assert order.done
    with pytest.raises(IllegalEvent):
        order.feed(EXAMPLES[Failed])


@given(legal_scripts(n=2), st.lists(st.integers(0, 2**31), max_size=3))
def test_frames_survive_the_wire(script: tuple[Event, ...], tokens: list[int]) -> None:
    frame = Frame(script, tuple(tokens), choice=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame) == frame


def test_logprobs_survive_the_wire() -> None:
    top = (TokenLogprob(5, b"\xf0\x9f", -0.5), TokenLogprob(6, b"a", -1.0))
    frame = Frame((TextDelta("", (TokenLogprob(5, b"\xf0\x9f", -0.5, top),)),), (5,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame) == frame


def pieces(*texts: str) -> list[Frame]:
    return [Frame((TextDelta(text),), (number,)) for number, text in enumerate(texts)]


def test_pieces_of_one_text_become_one() -> None:
    assert merged(pieces("a", "b", "c")) == Frame((TextDelta("abc"),), (0, 1, 2))


@pytest.mark.parametrize(
    "apart",
    [
        TextDelta("b", logprobs=(TokenLogprob(1, b"b", -0.1),)),
        TextDelta("b", timings=Timings(0, 1, 1.0, 1, 1.0)),
        ReasoningDelta("b"),
        ToolCallDelta(0, "b"),
        Progress(1, 0, 2, 1.0),
    ],
)
def test_what_is_no_piece_of_the_text_before_it_stays_as_it_is(apart: Event) -> None:
    frames = [Frame((TextDelta("a"),)), Frame((apart,)), Frame((TextDelta("c"),))]
    assert merged(frames).events == (TextDelta("a"), apart, TextDelta("c"))


def test_arguments_of_one_call_become_one_and_of_two_stay_apart() -> None:
    deltas = [ToolCallDelta(0, "{"), ToolCallDelta(0, "}"), ToolCallDelta(1, "{"), ToolCallDelta(1, "}")]
    assert merged([Frame((delta,)) for delta in deltas]).events == (ToolCallDelta(0, "{}"), ToolCallDelta(1, "{}"))


@given(legal_scripts(logprobs=True))
def test_a_merged_stream_says_the_same(script: tuple[Event, ...]) -> None:
    """Collected, as an answer that is not streamed is; that also holds its order against `LEGAL`."""
    frames = [Frame((event,), (number,)) for number, event in enumerate(script)]
    apart, together = BatchCollector([1]), BatchCollector([1])
    for frame in frames:
        apart.feed_frame(frame)
    whole = merged(frames)
    together.feed_frame(whole)
    assert together.result() == apart.result()
    assert len(whole.events) <= len(script)
