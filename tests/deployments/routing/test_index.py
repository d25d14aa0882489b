"""Local evidence: the deepest claim that is still believed, in a table that never grows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.index import BUCKETS, HOLDERS, WAYS, Index

LONG_AGO = np.full(8, -1e9)
RUNGS = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=24, unique=True)


def deepest(index: Index, rungs: list[int], since: np.ndarray = LONG_AGO) -> dict[int, int]:
    slots, depths = index.deepest(rungs, since)
    return dict(zip(slots.tolist(), depths.tolist(), strict=True))


def test_nothing_is_known_at_first() -> None:
    assert deepest(Index(), [1, 2]) == {}


@given(RUNGS, st.data())
@settings(deadline=None)
def test_the_deepest_claim_of_each_replica_counts(rungs: list[int], data: st.DataObject) -> None:
    index = Index(buckets=4096)
    expected: dict[int, int] = {}
    for slot in range(data.draw(st.integers(0, 3))):
        expected[slot] = data.draw(st.integers(1, len(rungs)))
        index.claim(rungs[: expected[slot]], slot, 1.0)
    found = deepest(index, rungs)
    buckets = [rung % 4096 for rung in rungs]
    if len(set(buckets)) == len(buckets):
        assert found == expected
    else:  # two new rungs in one place: the earlier may be forgotten, and no more is claimed than was
        assert all(depth <= expected[slot] for slot, depth in found.items())
    index.check_integrity()


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
    assert deepest(index, [1, 2], np.full(8, 150.0)) == {0: 1, 1: 2}
    assert deepest(index, [1, 2], np.array([300.0, 150.0])) == {1: 2}


def test_the_longest_ago_makes_room_for_a_new_holder() -> None:
    index = Index()
    for slot in range(HOLDERS + 1):
        index.claim([1], slot, float(slot))
    assert set(deepest(index, [1])) == set(range(1, HOLDERS + 1))


def test_the_rung_used_longest_ago_makes_room_in_a_bucket() -> None:
    index = Index(buckets=2)
    same_bucket = [2 * i + 1 for i in range(WAYS + 1)]
    for time, rung in enumerate(same_bucket):
        index.claim([rung], 0, float(time))
    assert [rung for rung in same_bucket if deepest(index, [rung])] == same_bucket[1:]
    index.check_integrity()


def test_a_place_that_changes_hands_forgets_its_holders() -> None:
    index = Index(buckets=1)
    for rung in range(1, 50):
        index.claim([rung], rung % 5, float(rung))
        assert deepest(index, [rung]) == {rung % 5: 1}
    index.check_integrity()


def test_a_slot_beyond_the_fleet_is_nobody() -> None:
    index = Index()
    index.claim([1], 7, 1.0)
    assert deepest(index, [1], np.full(3, -1e9)) == {}


def test_it_is_small_however_much_it_is_told() -> None:
    index = Index()
    before = index.bytes
    draw = np.random.default_rng(1)
    for i in range(500):
        index.claim(draw.integers(1, 2**63, 24).tolist(), i % 30, float(i))
    assert index.bytes == before < 8 * 2**20
    assert BUCKETS * WAYS >= 100_000
    index.check_integrity()


def test_without_rungs_there_is_nothing_to_claim_or_find() -> None:
    index = Index()
    index.claim([], 0, 1.0)
    index.claim([1], 0, 1.0)
    assert deepest(index, []) == {}
