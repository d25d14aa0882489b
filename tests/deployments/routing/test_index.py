"""Local evidence: the deepest claim that is still believed, in a table of bounded size."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.routing.index import HOLDERS, LOOKED_AT, ROWS, Index

RUNGS = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=24, unique=True)


def deepest(index: Index, rungs: list[int], *since: float, above: int = 0) -> dict[int, int]:
    """`since`: by slot; without it all claims are believed."""
    return index.deepest(rungs, above, lambda slot: since[slot] if since else -1e9)


def test_nothing_is_known_at_first() -> None:
    assert deepest(Index(), [1, 2]) == {}


@given(RUNGS, st.data())
@settings(deadline=None)
def test_the_deepest_claim_of_each_replica_counts(rungs: list[int], data: st.DataObject) -> None:
    index = Index()
    expected: dict[int, int] = {}
    for slot in range(data.draw(st.integers(0, HOLDERS))):
        expected[slot] = data.draw(st.integers(1, len(rungs)))
        index.claim(rungs[: expected[slot]], slot, 1.0)
    above = data.draw(st.integers(0, len(rungs)))
    assert deepest(index, rungs, above=above) == {slot: depth for slot, depth in expected.items() if depth > above}
    index.check_integrity()


class ClaimsMachine(RuleBasedStateMachine):
    """As long as nothing has to make room, it is a list of all claims, of each rung the newest few holders."""

    rungs = st.lists(st.integers(1, 12), max_size=6, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(16)
        self.claims: dict[int, dict[int, float]] = {}
        self.now = 0.0

    @rule(rungs=rungs, slot=st.integers(0, 6))
    def claim(self, rungs: list[int], slot: int) -> None:
        self.now += 1.0
        self.index.claim(rungs, slot, self.now)
        for rung in rungs:
            holders = {**self.claims.get(rung, {}), slot: self.now}
            newest = sorted(holders, key=holders.__getitem__, reverse=True)[:HOLDERS]
            self.claims[rung] = {holder: holders[holder] for holder in newest}

    @rule(rungs=rungs, ages=st.lists(st.floats(0, 20), min_size=7, max_size=7))
    def find(self, rungs: list[int], ages: list[float]) -> None:
        since = [self.now - age for age in ages]
        expected: dict[int, int] = {}
        for depth, rung in enumerate(rungs, 1):
            expected.update({slot: depth for slot, at in self.claims.get(rung, {}).items() if at >= since[slot]})
        assert deepest(self.index, rungs, *since) == expected

    @invariant()
    def all_agree(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.claims)


TestClaims = ClaimsMachine.TestCase
TestClaims.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_branch_counts_as_deep_as_it_is_shared() -> None:
    index = Index()
    index.claim([1, 2, 3, 4], 0, 1.0)
    assert deepest(index, [1, 2, 30, 40]) == {0: 2}


def test_a_rung_stands_for_those_above_it() -> None:
    index = Index()
    index.claim([30], 5, 1.0)
    assert deepest(index, [10, 20, 30, 40]) == {5: 3}


def test_old_claims_are_not_believed() -> None:
    index = Index()
    index.claim([1, 2], 0, 100.0)
    index.claim([1], 0, 200.0)
    index.claim([1, 2], 1, 200.0)
    assert deepest(index, [1, 2], 150.0, 150.0) == {0: 1, 1: 2}
    assert deepest(index, [1, 2], 300.0, 150.0) == {1: 2}


def test_the_longest_ago_makes_room_for_a_new_holder() -> None:
    index = Index()
    for slot in range(HOLDERS + 1):
        index.claim([1], slot, float(slot))
    assert set(deepest(index, [1])) == set(range(1, HOLDERS + 1))


def test_the_rung_used_longest_ago_makes_room_and_leaves_no_holders() -> None:
    index = Index(rows=LOOKED_AT)
    index.claim(list(range(1, LOOKED_AT + 1)), 0, 1.0)
    index.claim([1], 0, 2.0)
    index.claim([100], 3, 3.0)
    assert [rung for rung in (1, 2, 3, 100) if deepest(index, [rung])] == [1, 3, 100]
    assert deepest(index, [100]) == {3: 1}
    index.check_integrity()


def test_it_is_bounded_however_much_it_is_told() -> None:
    index = Index(rows=200)
    draw = random.Random(1)
    for i in range(200):
        latest = [draw.getrandbits(64) for _ in range(24)]
        index.claim(latest, i % 30, float(i))
        assert len(index) <= 200
        assert deepest(index, latest) == {i % 30: 24}
    assert len(index) == 200
    index.check_integrity()
    assert ROWS >= 100_000


def test_without_rungs_there_is_nothing_to_claim_or_find() -> None:
    index = Index()
    index.claim([], 0, 1.0)
    index.claim([1], 0, 1.0)
    assert deepest(index, []) == {}
