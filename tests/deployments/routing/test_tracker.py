"""The replica's book: what it believes to hold, and how the engine's counts correct it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.routing.ask import VERSION, Ask, AskFlag, AskReply, Digest, Intent
from deployments.routing.key import UNITS_PER_TOKEN, PrefixKey
from deployments.routing.tracker import DIGEST_ENTRIES, INTENT_S, Tracker


def key(*rungs: int, tokens: int = 100, adapter: int = 0, version: int = VERSION) -> PrefixKey:
    """A prompt with a rung every `tokens` tokens."""
    ends = tuple(tokens * (i + 1) for i in range(len(rungs)))
    return PrefixKey(version, rungs, ends, (), tokens * len(rungs), in_tokens=True, adapter=adapter)


def tracker(kv_tokens: int = 10_000, **options: Any) -> Tracker:
    return Tracker(kv_tokens, 1000.0, slots=4, max_ongoing=6, **options)


def ask(made: Tracker, *rungs: int, now: float = 0.0, **fields: Any) -> AskReply:
    return made.answer(Ask(VERSION, rungs, **fields), now)


def run(made: Tracker, name: str, prompt: PrefixKey, now: float, cached: int | None = None, output: int = 0) -> int:
    predicted = made.admit(name, prompt, now)
    made.started(name, prompt.size, predicted if cached is None else cached, now)
    made.first_token(name, now)
    made.finish(name, output, now)
    return predicted


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker(3000, 1000.0, 4, 6, adapter_slots=2)
        self.now = 0.0

    names = st.sampled_from("abcdef")
    keys = st.builds(
        lambda rungs, tokens, adapter: key(*itertools.accumulate(rungs), tokens=tokens, adapter=adapter),
        st.lists(st.integers(1, 3), max_size=8),
        st.integers(1, 900),
        st.integers(0, 4),
    )

    @rule(name=names, prompt=keys)
    def admit(self, name: str, prompt: PrefixKey) -> None:
        assert 0 <= self.tracker.admit(name, prompt, self.now) <= prompt.size

    @rule(name=names, tokens=st.integers(0, 5000), part=st.floats(0, 1))
    def started(self, name: str, tokens: int, part: float) -> None:
        self.tracker.started(name, tokens, int(tokens * part), self.now)

    @rule(name=names)
    def first_token(self, name: str) -> None:
        self.tracker.first_token(name, self.now)

    @rule(name=names, tokens=st.integers(0, 500))
    def finish(self, name: str, tokens: int) -> None:
        self.tracker.finish(name, tokens, self.now)

    @rule(leaf=st.integers(0, 9), tokens=st.integers(-5, 500), off=st.booleans())
    def intend(self, leaf: int, tokens: int, off: bool) -> None:
        self.tracker.intend(Intent(VERSION, leaf, 1, tokens, off), self.now)

    @rule()
    def reset(self) -> None:
        self.tracker.reset()

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def the_book_is_right(self) -> None:
        self.tracker.check_integrity()
        reply = ask(self.tracker, *range(1, 25), now=self.now)
        assert reply.queued_tokens >= 0
        assert len(msgspec.msgpack.encode(self.tracker.stats(self.now))) <= 256

    def teardown(self) -> None:
        for name in "abcdef":
            self.tracker.finish(name, 0, self.now)
        reply = ask(self.tracker, now=self.now + 1)
        assert (reply.queued_tokens, reply.ongoing) == (0, 0)


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_request_is_found_from_its_admission_on() -> None:
    made = tracker()
    assert ask(made, 1, 2, 3).depth == 0
    made.admit("q", key(1, 2), 0.0)
    assert ask(made, 1, 2, 3).depth == 2
    assert ask(made, 1, 9).depth == 1
    assert made.admit("q2", key(1, 2, 3), 0.0) == 200


def test_the_queue_is_what_is_not_computed_yet() -> None:
    made = tracker()
    run(made, "before", key(1), 0.0)
    made.admit("q", key(1, 2, 3), 0.0)
    assert (ask(made).queued_tokens, ask(made).ongoing) == (200, 1)
    made.started("q", 310, 100, 0.0)
    assert ask(made).queued_tokens == 210
    made.first_token("q", 0.0)
    assert (ask(made).queued_tokens, ask(made).ongoing) == (0, 1)
    made.finish("q", 5, 0.0)
    assert ask(made).ongoing == 0


def test_an_engine_that_counts_its_queue_is_believed() -> None:
    made = tracker()
    made.admit("q", key(1), 0.0)
    assert made.answer(Ask(VERSION, ()), 0.0, queued_tokens=77).queued_tokens == 77
    assert made.stats(0.0, queued_tokens=0)["q"] == 0


def test_a_request_that_ends_in_the_queue_leaves_it() -> None:
    made = tracker()
    made.admit("q", key(1, 2), 0.0)
    made.finish("q", 0, 0.0)
    made.finish("q", 0, 0.0)
    assert ask(made).queued_tokens == 0


def test_a_name_that_comes_twice_counts_once() -> None:
    made = tracker()
    made.admit("q", key(1), 0.0)
    made.admit("q", key(5), 0.0)
    assert (ask(made).queued_tokens, ask(made).ongoing) == (100, 1)


def test_the_ends_of_old_prompts_are_forgotten_first() -> None:
    made = tracker(kv_tokens=500)
    run(made, "old", key(1, 2, 3), 0.0)
    run(made, "new", key(1, 8, 9), 10.0)
    assert ask(made, 1, 2, 3).depth == 3
    run(made, "newest", key(1, 20), 20.0)
    assert ask(made, 1, 2, 3).depth == 2
    assert ask(made, 1, 8, 9).depth == 3
    assert made.stats(20.0)["a"] > 0


def test_an_answer_takes_room_too() -> None:
    made = tracker(kv_tokens=500)
    run(made, "old", key(1, 2), 0.0)
    run(made, "new", key(5, 6), 1.0, output=150)
    assert ask(made, 1, 2).depth == 1
    assert ask(made, 5, 6).depth == 2


def test_a_prompt_larger_than_the_cache_is_held_as_far_as_there_is_room() -> None:
    made = tracker(kv_tokens=250)
    run(made, "q", key(1, 2, 3, 4), 0.0)
    assert ask(made, 1, 2, 3, 4).depth == 2
    made.check_integrity()


def test_what_the_engine_does_not_find_is_forgotten_until_it_is_computed() -> None:
    made = tracker()
    run(made, "q1", key(1, 2, 3), 0.0)
    made.admit("q2", key(1, 2, 3, 4), 1.0)
    made.started("q2", 400, 100, 1.0)
    assert ask(made, 1, 2, 3).depth == 1
    assert ask(made).calibration < 100
    made.first_token("q2", 2.0)
    assert ask(made, 1, 2, 3, 4).depth == 4


def test_an_engine_that_finds_all_keeps_the_calibration_full() -> None:
    made = tracker()
    run(made, "q1", key(1, 2), 0.0)
    run(made, "q2", key(1, 2, 3), 0.0)
    assert ask(made).calibration == 100


def test_a_calibration_below_one_makes_the_queue_longer() -> None:
    made = tracker()
    run(made, "q", key(1, 2, 3), 0.0)
    for i in range(60):
        run(made, f"q{i}", key(1, 2, 3), 0.0, cached=150)
    assert 45 <= ask(made).calibration <= 60
    made.admit("next", key(1, 2, 3), 0.0)
    assert 120 < ask(made).queued_tokens < 180


def test_bytes_per_token_are_learnt() -> None:
    made = tracker()
    text = PrefixKey(VERSION, (1,), (6000,), (), 6000)
    made.admit("first", text, 0.0)
    assert ask(made).queued_tokens == int(6000 / UNITS_PER_TOKEN)
    for i in range(100):
        run(made, f"q{i}", PrefixKey(VERSION, (i + 10,), (6000,), (), 6000), 0.0)
        made.admit("x", text, 0.0)
        made.started("x", 3000, 0, 0.0)
        made.finish("x", 0, 0.0)
    made.finish("first", 0, 0.0)
    made.admit("last", PrefixKey(VERSION, (999,), (6000,), (), 6000), 0.0)
    assert ask(made).queued_tokens > 6000 / UNITS_PER_TOKEN


@pytest.mark.parametrize(
    ("measured", "kept"), [(1100.0, 1100), (1e9, 5000), (1.0, 200), (0.0, 1000), (-5.0, 1000), (float("nan"), 1000)]
)
def test_a_measured_rate_is_kept_within_reason(measured: float, kept: int) -> None:
    made = tracker()
    made.observe_rate(measured)
    assert made.rate == kept
    assert ask(made).prefill_rate == pytest.approx(kept, rel=0.13), "in steps, so that equals are equal"


def test_the_rate_is_the_median() -> None:
    made = tracker()
    for rate in (1000.0, 2000.0, 2000.0, 5000.0, 300.0):
        made.observe_rate(rate)
    assert made.rate == 2000


# --- intents and digests ----------------------------------------------------------------------------------------------


def intent(leaf: int, tokens: int = 50, anchor: int = 7, off_primary: bool = False, version: int = VERSION) -> Intent:
    return Intent(version, leaf, anchor, tokens, off_primary)


def test_a_request_on_its_way_counts_until_it_comes_or_is_late() -> None:
    made = tracker()
    made.intend(intent(2), 0.0)
    made.intend(intent(9), 0.01)
    assert (ask(made).queued_tokens, ask(made).ongoing) == (100, 2)
    made.admit("q", key(1, 2), 0.02)
    assert (ask(made, now=0.02).queued_tokens, ask(made, now=0.02).ongoing) == (250, 2)
    # The late one is gone, and 1,000 tokens per second have made 50 of the prompt's 200.
    assert ask(made, now=0.02 + INTENT_S).queued_tokens == 150


def test_a_prompt_at_hand_shrinks_and_those_behind_it_do_not() -> None:
    made = tracker()
    made.admit("at hand", key(1), 0.0)
    made.admit("behind", key(2), 0.0)
    assert [ask(made, now=now).queued_tokens for now in (0.0, 0.05, 5.0)] == [200, 150, 100]
    made.first_token("at hand", 5.0)
    assert [ask(made, now=now).queued_tokens for now in (5.0, 5.05)] == [100, 50]
    made.finish("behind", 0, 5.05)
    assert ask(made, now=5.05).queued_tokens == 0


def test_what_landed_off_its_first_owner_is_told_once() -> None:
    made = tracker(generation=5)
    made.intend(intent(1, off_primary=True), 0.0)
    made.intend(intent(2), 0.0)
    first = made.digest(0)
    assert first == Digest(VERSION, 5, 1, ((7, 1),))
    made.intend(intent(3, off_primary=True), 0.0)
    assert made.digest(first.position).landed == ((7, 3),)
    assert made.digest(2).landed == ()


@pytest.mark.parametrize("since", [-1, 10**9])
def test_a_position_of_another_life_gets_everything(since: int) -> None:
    made = tracker()
    made.intend(intent(1, off_primary=True), 0.0)
    assert made.digest(since).landed == ((7, 1),)


def test_a_digest_is_bounded_and_the_newest_win() -> None:
    made = tracker()
    for i in range(1, 3 * DIGEST_ENTRIES):
        made.intend(intent(i, off_primary=True), 0.0)
    landed = made.digest(0).landed
    assert len(landed) == DIGEST_ENTRIES
    assert landed[-1] == (7, 3 * DIGEST_ENTRIES - 1)


# --- flags, versions, stats ------------------------------------------------------------------------------------------


def test_it_says_when_it_drains_is_full_or_lacks_the_adapter() -> None:
    made = tracker(adapter_slots=2)
    assert ask(made).flags == 0
    assert ask(made, adapter=5).flags == AskFlag.ADAPTER_COLD
    made.admit("q0", key(1, adapter=5), 0.0)
    assert ask(made, adapter=5).flags == 0
    for i in range(1, 6):
        made.admit(f"q{i}", key(1, adapter=5 + i), 0.0)
    made.draining = True
    assert ask(made, adapter=5).flags == AskFlag.ADAPTER_COLD | AskFlag.FULL | AskFlag.DRAINING


def test_an_engine_with_all_adapters_is_never_cold() -> None:
    assert ask(tracker(), adapter=5).flags == 0


def test_a_reset_forgets_all_and_says_so() -> None:
    made = tracker(generation=2**32 - 1)
    run(made, "q", key(1, 2), 0.0)
    made.reset()
    assert (ask(made, 1, 2).depth, ask(made).generation) == (0, 0)


def test_other_versions_are_told_and_taken_at_their_load_only() -> None:
    made = tracker()
    made.admit("foreign", key(1, 2, version=VERSION + 1), 0.0)
    assert ask(made, 1, 2).depth == 0
    assert ask(made).queued_tokens == 200
    made.admit("ours", key(1, 2), 0.0)
    assert made.answer(Ask(VERSION + 1, (1, 2)), 0.0).depth == 0
    made.intend(intent(1, version=VERSION + 1), 0.0)
    assert ask(made).ongoing == 2


def test_stats_change_only_when_something_has() -> None:
    made = tracker()
    made.admit("q", key(1, tokens=1000), 0.0)
    before = made.stats(0.0)
    made.started("q", 1010, 0, 0.0)
    assert made.stats(0.0) == before
    made.admit("q2", key(2, tokens=1000), 0.0)
    assert made.stats(0.0) != before


def test_stats_are_small_and_plain() -> None:
    made = tracker(generation=2**32 - 1)
    made.admit("q", key(1, tokens=10**8), 0.0)
    plain = made.stats(0.0)
    assert all(type(value) is int for value in plain.values())
    assert len(str(plain)) <= 256


def test_frames_of_a_request_nobody_admitted_are_ignored() -> None:
    made = tracker()
    made.started("q", 10, 5, 0.0)
    made.first_token("q", 0.0)
    made.finish("q", 5, 0.0)
    made.check_integrity()
    assert ask(made).calibration == 100
