"""The order of events, and their wire form between processes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
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
