"""How long replicas are busy: whatever order Serve reports things in, clocks and leases agree and nothing leaks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.routing.load import LEASE_S, RESERVATION_S, TYPICAL_REQUEST_S, Load

REQUESTS = st.sampled_from([f"q{i}" for i in range(5)])
SLOTS = st.integers(0, 3)


class ClockMachine(RuleBasedStateMachine):
    """Whatever happens, the parts agree; and no clock is further ahead than all that was ever put on it."""

    def __init__(self) -> None:
        super().__init__()
        self.load = Load(4)
        self.now = 1000.0
        self.given = 0.0

    @rule(request=REQUESTS, slot=SLOTS, seconds=st.floats(0, 50))
    def reserve(self, request: str, slot: int, seconds: float) -> None:
        self.load.reserve(request, slot, seconds, self.now)
        self.given += seconds

    @rule(request=REQUESTS, slot=SLOTS)
    def accept(self, request: str, slot: int) -> None:
        self.load.accept(request, slot, self.now)

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.load.release(request, self.now)

    @rule(slot=SLOTS, seconds=st.floats(0, 50), ago=st.floats(0, 5))
    def observe(self, slot: int, seconds: float, ago: float) -> None:
        self.load.observe(slot, seconds, self.now - ago)
        self.given += seconds

    @rule(slot=SLOTS)
    def forget(self, slot: int) -> None:
        self.load.forget([slot])
        assert self.load.waits(self.now)[slot] == 0

    @rule(seconds=st.floats(0, 1.5 * RESERVATION_S))
    def wait(self, seconds: float) -> None:
        before = self.load.waits(self.now)
        self.now += seconds
        assert (self.load.waits(self.now) <= np.maximum(before - seconds, 0.0) + 1e-6).all(), "time catches up"

    @invariant()
    def all_agree(self) -> None:
        self.load.check_integrity()
        waits = self.load.waits(self.now)
        assert (waits >= 0).all()
        assert (waits <= self.given + 1e-6).all()

    def teardown(self) -> None:
        self.load.waits(self.now + 2 * LEASE_S)
        assert not self.load.counts().any()
        self.load.check_integrity()


TestClocks = ClockMachine.TestCase
TestClocks.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def waits(load: Load, now: float) -> list[float]:
    return [round(float(wait), 6) for wait in load.waits(now)]


def test_a_choice_counts_at_once_and_drains_by_itself() -> None:
    load = Load(2)
    load.reserve("q", 1, 3.0, 10.0)
    assert waits(load, 10.0) == [0, 3]
    assert waits(load, 12.0) == [0, 1]
    assert waits(load, 20.0) == [0, 0]


def test_work_queues_up_behind_work() -> None:
    load = Load(1)
    load.reserve("q1", 0, 3.0, 0.0)
    load.reserve("q2", 0, 2.0, 1.0)
    assert waits(load, 1.0) == [4]


def test_a_second_choice_of_a_request_replaces_the_first() -> None:
    load = Load(2)
    load.reserve("q", 0, 3.0, 0.0)
    load.reserve("q", 1, 4.0, 0.0)
    assert waits(load, 0.0) == [0, 4]


def test_it_counts_where_it_was_taken() -> None:
    load = Load(2)
    load.reserve("q", 0, 3.0, 0.0)
    load.accept("q", 1, 1.0)
    assert waits(load, 1.0) == [0, 3]
    assert load.counts().tolist() == [0, 1]


def test_a_choice_nobody_takes_is_undone() -> None:
    load = Load(1)
    load.reserve("lost", 0, 100.0, 0.0)
    load.reserve("taken", 0, 5.0, 0.0)
    load.accept("taken", 0, 0.0)
    assert waits(load, RESERVATION_S) == [95]
    assert waits(load, RESERVATION_S + 1) == [5], "those behind it move up to now"


def test_what_an_early_end_leaves_is_given_back() -> None:
    load = Load(1)
    load.reserve("q1", 0, 10.0, 0.0)
    load.reserve("q2", 0, 10.0, 0.0)
    load.reserve("q3", 0, 10.0, 0.0)
    load.release("q1", 4.0)
    assert waits(load, 4.0) == [20]
    load.release("q2", 9.0)
    assert waits(load, 9.0) == [10], "q2 ran from 4 to 9, and q3 has its ten seconds before it"


def test_the_end_of_a_request_that_has_long_been_computed_changes_nothing() -> None:
    load = Load(1)
    load.reserve("q1", 0, 1.0, 0.0)
    load.reserve("q2", 0, 20.0, 5.0)
    load.release("q1", 6.0)
    assert waits(load, 6.0) == [19]


def test_a_release_is_heard_once() -> None:
    load = Load(1)
    load.reserve("q1", 0, 5.0, 0.0)
    load.reserve("q2", 0, 5.0, 0.0)
    load.release("q1", 0.0)
    load.release("q1", 0.0)
    assert waits(load, 0.0) == [5]


def test_an_acceptance_after_the_end_does_not_revive_it() -> None:
    load = Load(1)
    load.reserve("q", 0, 5.0, 0.0)
    load.release("q", 0.0)
    load.accept("q", 0, 0.0)
    assert waits(load, 0.0) == [0]
    assert not load.counts().any()


def test_the_replicas_own_word_replaces_what_was_sent_before_it() -> None:
    load = Load(1)
    load.reserve("before", 0, 50.0, 0.0)
    load.reserve("after", 0, 3.0, 2.0)
    load.observe(0, 7.0, measured_at=1.0)
    assert waits(load, 2.0) == [9]


@pytest.mark.parametrize("seconds", [-5.0, 0.0])
def test_work_is_never_negative(seconds: float) -> None:
    load = Load(1)
    load.reserve("q", 0, seconds, 0.0)
    load.observe(0, seconds, 0.0)
    assert waits(load, 0.0) == [0]


def test_the_length_of_requests_is_learnt_from_those_that_were_taken() -> None:
    load = Load(1)
    load.reserve("rejected", 0, 1.0, 0.0)
    load.release("rejected", 100.0)
    assert load.request_s == TYPICAL_REQUEST_S
    load.reserve("q", 0, 1.0, 0.0)
    load.accept("q", 0, 0.0)
    load.release("q", 105.0)
    assert TYPICAL_REQUEST_S < load.request_s < 105


def test_it_grows_and_keeps_what_it_has() -> None:
    load = Load(1)
    load.reserve("q", 0, 5.0, 0.0)
    load.grow(3)
    load.reserve("q2", 2, 4.0, 0.0)
    load.grow(2)
    assert waits(load, 0.0) == [5, 0, 4]


def test_a_wrong_clock_is_noticed() -> None:
    load = Load(1)
    load.reserve("q", 0, 5.0, 0.0)
    load._busy_until[0] -= 1
    with pytest.raises(AssertionError):
        load.check_integrity()


def test_threads_lose_nothing() -> None:
    """Serve reports completions from threads of its own."""
    load = Load(3)
    start = threading.Barrier(4)

    def work(name: str) -> None:
        start.wait()
        for i in range(300):
            request = f"{name}-{i}"
            load.reserve(request, i % 3, 1.0, 0.0)
            load.accept(request, (i + 1) % 3, 0.0)
            load.waits(0.0)
            if i % 10:
                load.release(request, 0.0)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.check_integrity()
    assert load.counts().sum() == 4 * 30
    assert load.waits(0.0).sum() == pytest.approx(4 * 30)
