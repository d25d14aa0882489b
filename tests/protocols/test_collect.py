"""`Collector`: what it folds, and that it refuses what is not legal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.collect import BatchCollector, Collector, Completion, total_usage
from protocols.errors import BackendLost, ContextOverflow
from protocols.events import (
    Event,
    EventOrder,
    Failed,
    Finished,
    IllegalEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from protocols.request import ToolCall
from tests.protocols.scripts import COMPLETE, SCRIPTS, START, TIMINGS, legal_scripts
from tests.protocols.test_events import EXAMPLES


def collect(script: tuple[Event, ...], n: int = 1) -> Completion:
    collector = Collector(n)
    for event in script:
        assert not collector.done
        collector.feed(event)
    assert collector.done
    return collector.result()


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), legal_scripts(n))))
def test_fold_is_the_concatenation_per_choice(case: tuple[int, tuple[Event, ...]]) -> None:
    n, script = case
    completion = collect(script, n)
    assert [choice.index for choice in completion.choices] == list(range(n))
    for choice in completion.choices:
        mine = [event for event in script if event.choice == choice.index]
        assert choice.text == "".join(e.text for e in mine if isinstance(e, TextDelta))
        assert choice.reasoning == "".join(e.text for e in mine if isinstance(e, ReasoningDelta))
        assert [(c.id, c.name) for c in choice.tool_calls] == [
            (e.id, e.name) for e in mine if isinstance(e, ToolCallStarted)
        ]
        for index, call in enumerate(choice.tool_calls):
            pieces = [e.arguments for e in mine if isinstance(e, ToolCallDelta) and e.index == index]
            assert call.arguments == "".join(pieces)
        (end,) = [e for e in mine if isinstance(e, Finished)]
        assert (choice.reason, choice.stop_sequence) == (end.reason, end.stop_sequence)
    ends = [e.usage for e in script if isinstance(e, Finished)]
    assert completion.usage == total_usage(ends)
    assert completion.usage.completion_tokens == sum(u.completion_tokens for u in ends)


@given(legal_scripts(complete=False), st.data())
def test_an_illegal_event_is_rejected_wherever_it_comes(script: tuple[Event, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(script)))
    collector = Collector()
    for event in script[:cut]:
        collector.feed(event)
    legal: list[type] = []
    for kind in EXAMPLES:
        order = EventOrder()
        for event in script[:cut]:
            order.feed(event)
        try:
            order.feed(EXAMPLES[kind])
        except IllegalEvent:
            continue
        legal.append(kind)
    illegal = [kind for kind in EXAMPLES if kind not in legal]
    if illegal:
        with pytest.raises(IllegalEvent):
            collector.feed(EXAMPLES[data.draw(st.sampled_from(illegal))])


@pytest.mark.parametrize("name", COMPLETE)
def test_named_scripts_fold(name: str) -> None:
    completion = collect(SCRIPTS[name])
    assert completion.timings == TIMINGS
    assert completion.usage.prompt_tokens == 10


def test_tool_calls_fold_in_order() -> None:
    (choice,) = collect(SCRIPTS["two_tool_calls"]).choices
    assert choice.tool_calls == (
        ToolCall("call_a", "get_weather", '{"city":"Bern"}'),
        ToolCall("call_b", "get_time", ""),
    )


def test_logprobs_fold() -> None:
    one, two = TokenLogprob(1, b"a", -0.1), TokenLogprob(2, b"b", -0.2)
    script = (START, TextDelta("a", (one,)), TextDelta("b", (two,)), Finished("stop", Usage(1, 2)))
    assert collect(script).choices[0].logprobs == (one, two)


def test_failed_raises_the_error_it_carries() -> None:
    with pytest.raises(BackendLost, match="replica was lost"):
        collect(SCRIPTS["failed_mid_stream"])
    with pytest.raises(ContextOverflow) as caught:
        collect(SCRIPTS["failed_first"])
    assert caught.value.details == {"n_ctx": 8}


@given(legal_scripts())
def test_nothing_follows_the_end(script: tuple[Event, ...]) -> None:
    for event in (TextDelta("late"), script[-1], Failed(EXAMPLES[Failed].error)):  # type: ignore[union-attr]
        collector = Collector()
        for fed in script:
            collector.feed(fed)
        with pytest.raises(IllegalEvent):
            collector.feed(event)


def test_a_cut_stream_has_no_result() -> None:
    collector = Collector()
    for event in SCRIPTS["text"][:-1]:
        collector.feed(event)
    assert not collector.done
    with pytest.raises(IllegalEvent, match="before choice 0 finished"):
        collector.result()


def test_a_start_for_an_unknown_choice_is_illegal() -> None:
    with pytest.raises(IllegalEvent):
        Collector(1).feed(Started(1, 0, choice=3))


def test_total_usage_counts_the_prompt_once() -> None:
    assert total_usage([Usage(10, 3, 2, 1), Usage(10, 4, 10, 0)]) == Usage(10, 7, 10, 1)


def test_a_batch_is_folded_request_by_request() -> None:
    collector = BatchCollector([1, 2])
    for event in (
        Started(3, 1),
        Started(5, 0, 1),
        TextDelta("b1", choice=2),
        TextDelta("a"),
        Finished("stop", Usage(3, 1, 1), None, TIMINGS),
        TextDelta("b0", choice=1),
        Finished("length", Usage(5, 2), choice=2),
        Finished("stop", Usage(5, 4), choice=1),
    ):
        collector.feed(event)
    completion = collector.result()
    assert [(c.index, c.text, c.reason) for c in completion.choices] == [
        (0, "a", "stop"),
        (1, "b0", "stop"),
        (2, "b1", "length"),
    ]
    assert completion.usage == Usage(8, 7, 1)
    assert completion.timings is None


def test_a_batch_of_one_is_that_one() -> None:
    script = SCRIPTS["reasoning_then_text"]
    batch, alone = BatchCollector([1]), Collector()
    for event in script:
        batch.feed(event)
        alone.feed(event)
    assert batch.result() == alone.result()
