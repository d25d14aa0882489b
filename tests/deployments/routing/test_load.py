"""Tokens in flight: whatever order Serve reports things in, the sums are the leases and nothing leaks."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.routing.load import RESERVATION_S, TokenLoad

REQUESTS = st.sampled_from([f"q{i}" for i in range(5)])
REPLICAS = st.sampled_from([f"r{i}" for i in range(4)])
TOKENS = st.integers(1, 1000)


class LoadMachine(RuleBasedStateMachine):
    """Against a model that keeps every lease in the open, with the clock under its control."""

    def __init__(self) -> None:
        super().__init__()
        self.load = TokenLoad()
        self.now = 1000.0
        self.leases: dict[str, tuple[str, int, float | None]] = {}

    @rule(request=REQUESTS, replica=REPLICAS, tokens=TOKENS)
    def reserve(self, request: str, replica: str, tokens: int) -> None:
        self.load.reserve(request, replica, tokens, self.now)
        self.leases[request] = (replica, tokens, self.now + RESERVATION_S)

    @rule(request=REQUESTS, replica=REPLICAS)
    def accept(self, request: str, replica: str) -> None:
        self.load.accept(request, replica)
        if request in self.leases:
            self.leases[request] = (replica, self.leases[request][1], None)

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.load.release(request)
        self.leases.pop(request, None)

    @rule(replicas=st.sets(REPLICAS))
    def keep_only(self, replicas: set[str]) -> None:
        self.load.keep_only(replicas)
        self.leases = {request: lease for request, lease in self.leases.items() if lease[0] in replicas}

    @rule(seconds=st.floats(0, 1.5 * RESERVATION_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        self.leases = {
            request: lease for request, lease in self.leases.items() if lease[2] is None or lease[2] >= self.now
        }
        expected: dict[str, int] = {}
        for replica, tokens, _ in self.leases.values():
            expected[replica] = expected.get(replica, 0) + tokens
        assert self.load.snapshot(self.now) == expected

    @invariant()
    def sums_are_the_leases(self) -> None:
        self.load.check_integrity()

    def teardown(self) -> None:
        for request in [f"q{i}" for i in range(5)]:
            self.load.release(request)
        assert self.load.snapshot(self.now) == {}


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_reservation_counts_at_once() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    assert load.snapshot(0.0) == {"r": 30}


def test_a_second_reservation_of_a_request_replaces_the_first() -> None:
    load = TokenLoad()
    load.reserve("q", "r1", 30, now=0.0)
    load.reserve("q", "r2", 40, now=1.0)
    assert load.snapshot(1.0) == {"r2": 40}


def test_an_acceptance_moves_the_tokens_to_the_replica_that_accepted() -> None:
    load = TokenLoad()
    load.reserve("q", "chosen", 30, now=0.0)
    load.accept("q", "took it")
    assert load.snapshot(0.0) == {"took it": 30}


def test_a_reservation_that_is_never_accepted_expires() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    assert load.snapshot(RESERVATION_S) == {"r": 30}
    assert load.snapshot(RESERVATION_S + 0.01) == {}
    load.check_integrity()


def test_an_accepted_request_counts_until_it_is_over() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    load.accept("q", "r")
    assert load.snapshot(1e6) == {"r": 30}
    load.release("q")
    assert load.snapshot(1e6) == {}


def test_an_acceptance_after_the_release_does_not_leak() -> None:
    """A short request may complete before its acceptance is reported."""
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    load.release("q")
    load.accept("q", "r")
    assert load.snapshot(0.0) == {}
    load.check_integrity()


def test_an_acceptance_of_an_expired_reservation_does_not_revive_it() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    load.snapshot(RESERVATION_S + 1)
    load.accept("q", "r")
    assert load.snapshot(RESERVATION_S + 1) == {}


def test_a_release_is_heard_once() -> None:
    load = TokenLoad()
    load.reserve("q1", "r", 30, now=0.0)
    load.reserve("q2", "r", 40, now=0.0)
    load.release("q1")
    load.release("q1")
    assert load.snapshot(0.0) == {"r": 40}


def test_the_leases_of_a_replica_that_is_gone_are_forgotten() -> None:
    load = TokenLoad()
    for request, replica in [("q1", "r1"), ("q2", "r2"), ("q3", "r1")]:
        load.reserve(request, replica, 10, now=0.0)
    load.accept("q3", "r1")
    load.keep_only(replica for replica in ["r2", "r3"])
    assert load.snapshot(0.0) == {"r2": 10}
    load.release("q3")
    load.check_integrity()


@pytest.mark.parametrize("tokens", [0, -5])
def test_every_request_costs_something(tokens: int) -> None:
    """Else requests without a prompt would all pick one replica."""
    load = TokenLoad()
    load.reserve("q", "r", tokens, now=0.0)
    assert load.snapshot(0.0) == {"r": 1}


def test_a_snapshot_is_a_copy() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    load.snapshot(0.0)["r"] = 0
    assert load.snapshot(0.0) == {"r": 30}
    load.check_integrity()


def test_a_wrong_sum_is_noticed() -> None:
    load = TokenLoad()
    load.reserve("q", "r", 30, now=0.0)
    load._tokens["r"] += 1
    with pytest.raises(AssertionError):
        load.check_integrity()


def test_threads_do_not_lose_tokens() -> None:
    """Serve reports completions from threads of its own."""
    load = TokenLoad()
    start = threading.Barrier(4)

    def work(name: str) -> None:
        start.wait()
        for i in range(500):
            request = f"{name}-{i}"
            load.reserve(request, f"r{i % 3}", 7, now=0.0)
            load.accept(request, f"r{(i + 1) % 3}")
            load.snapshot(0.0)
            if i % 10:
                load.release(request)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.check_integrity()
    assert sum(load.snapshot(0.0).values()) == 4 * 50 * 7
