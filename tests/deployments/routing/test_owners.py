"""Owners: gateways agree without talking, few prefixes move when replicas do, and a hot prefix pins nobody."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.ask import VERSION
from deployments.routing.key import PrefixKey
from deployments.routing.owners import (
    MEMO,
    RANKED,
    Owners,
    Place,
    ShareSketch,
    place,
    rank_in,
    splitmix64,
    spread,
    weight_of,
)


def owners(names: list[str]) -> Owners:
    made = Owners()
    made.set_members({slot: weight_of(name) for slot, name in enumerate(names)})
    return made


def fleet(count: int) -> list[str]:
    return [f"replica-{i}" for i in range(count)]


def key(*rungs: int, affinity: int = 0) -> PrefixKey:
    ends = tuple(100 * (i + 1) for i in range(len(rungs)))
    return PrefixKey(VERSION, rungs, ends, tuple(range(len(rungs))), 100 * len(rungs), affinity=affinity)


def anchors(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def test_splitmix64_is_the_published_one() -> None:
    """The first outputs of the reference generator, seeded with 1234567."""
    with np.errstate(over="ignore"):
        states = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(states).tolist() == expected


@given(st.permutations(fleet(12)), st.integers(0, 2**64 - 1))
def test_gateways_agree_whatever_order_they_learnt_the_replicas_in(names: list[str], anchor: int) -> None:
    where = Place(((anchor ^ 1, 6),), anchor, 1)
    here, there = owners(fleet(12)), owners(names)
    assert [fleet(12)[i] for i in here.rank(where)] == [names[i] for i in there.rank(where)]


@pytest.mark.parametrize("count", [4, 16, 64])
def test_a_replica_that_comes_takes_its_part_and_no_more(count: int) -> None:
    before, after = owners(fleet(count)), owners(fleet(count + 1))
    moved = [a for a in anchors(4000) if before.rank(Place((), a, 0))[0] != after.rank(Place((), a, 0))[0]]
    assert all(after.rank(Place((), a, 0))[0] == count for a in moved), "only to the new one"
    assert 0.8 < len(moved) / 4000 * (count + 1) < 1.25


def test_a_replica_that_goes_loses_only_its_own() -> None:
    names = fleet(9)
    before, after = owners(names), Owners()
    after.set_members({slot: weight_of(name) for slot, name in enumerate(names) if slot != 4})
    for anchor in anchors(500):
        first, second = before.rank(Place((), anchor, 0))[:2]
        assert after.rank(Place((), anchor, 0))[0] == (second if first == 4 else first)


def test_owners_are_spread_evenly() -> None:
    made = owners(fleet(10))
    counts = Counter(made.rank(Place((), anchor, 0))[0] for anchor in anchors(5000))
    assert max(counts.values()) < 1.3 * min(counts.values())


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_sets_of_a_hot_prefix_are_nested(size: int, other: int, rung: int) -> None:
    made = owners(fleet(40))
    small, large = sorted((size, other))
    inner = set(made._set(((rung, small),))[0].tolist())
    assert len(inner) == small
    assert inner <= set(made._set(((rung, large),))[0].tolist())


def test_gateways_that_disagree_on_a_share_mostly_agree_on_the_owner() -> None:
    made = owners(fleet(64))
    same = [made.rank(Place(((7, 16),), a, 1))[0] == made.rank(Place(((7, 17),), a, 1))[0] for a in anchors(2000)]
    assert sum(same) > 0.9 * len(same)


def test_what_branches_off_a_hot_prefix_stays_among_its_replicas() -> None:
    made = owners(fleet(30))
    inside = set(made._set(((7, 10), (8, 4)))[0].tolist())
    assert inside <= set(made._set(((7, 10),))[0].tolist())
    firsts = {made.rank(Place(((7, 10), (8, 4)), anchor, 2))[0] for anchor in anchors(300)}
    assert firsts == inside


@given(st.integers(0, 20), st.integers(1, 8))
def test_everybody_is_ranked_once(count: int, size: int) -> None:
    made = owners(fleet(count))
    ranked = made.rank(Place(((5, min(size, count)),) if count else (), 9, 0))
    assert len(ranked) == len(set(ranked)) == min(RANKED, count)
    made.check_integrity()


def test_the_memo_is_bounded_and_forgets_when_replicas_change() -> None:
    made = owners(fleet(4))
    for anchor in range(MEMO + 50):
        made.rank(Place((), anchor, 0))
    made.check_integrity()
    made.set_members({0: weight_of("only")})
    assert made.rank(Place((), 5, 0)) == (0,)


def test_one_that_is_no_owner_ranks_behind_all() -> None:
    assert rank_in([4, 2], 2) == 1
    assert rank_in([4, 2], 9) == RANKED


# --- shares -----------------------------------------------------------------------------------------------------------


def test_shares_are_the_parts_of_all_requests() -> None:
    sketch = ShareSketch()
    for i in range(100):
        sketch.count([1, 2 if i % 4 else 3], now=0.0)
    assert (sketch.share(1), sketch.share(2), sketch.share(3), sketch.share(4)) == (1.0, 0.75, 0.25, 0.0)
    assert sketch.seen == 100


def test_old_requests_count_less() -> None:
    sketch = ShareSketch(half_life_s=10.0)
    sketch.count([1], 0.0)
    sketch.count([2], 10.0)
    assert sketch.share(2) == pytest.approx(2 * sketch.share(1))
    assert sketch.seen == pytest.approx(1.5)


def test_a_hot_rung_survives_a_flood_of_others() -> None:
    sketch = ShareSketch(capacity=64)
    draw = random.Random(2)
    for i in range(5000):
        sketch.count([1, draw.getrandbits(64)] if i % 5 == 0 else [draw.getrandbits(64)], float(i) / 100)
    assert 0.1 < sketch.share(1) <= 0.21
    sketch.check_integrity()


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=4, unique=True), st.floats(0, 2000)), max_size=200))
@settings(deadline=None)
def test_counters_stay_bounded_and_never_claim_too_much(requests: list[tuple[list[int], float]]) -> None:
    sketch, now = ShareSketch(capacity=8, half_life_s=20.0), 0.0
    truth: list[tuple[list[int], float]] = []
    for rungs, wait in requests:
        now += wait
        sketch.count(rungs, now)
        truth.append((rungs, now))
        sketch.check_integrity()
    weights = [0.5 ** ((now - at) / 20.0) for _, at in truth]
    for rung in range(31):
        exact = sum(w for w, (rungs, _) in zip(weights, truth, strict=True) if rung in rungs)
        assert sketch.share(rung) * sum(weights) <= exact + 1e-6


# --- places -----------------------------------------------------------------------------------------------------------


def warmed(*traffic: tuple[int, ...], times: int = 200) -> ShareSketch:
    sketch = ShareSketch()
    for _ in range(times):
        for rungs in traffic:
            sketch.count(rungs, 0.0)
    return sketch


def test_a_prefix_that_all_share_narrows_nothing() -> None:
    found = place(key(1, 99), warmed((1, 2), (1, 3)), 16)
    assert found == Place((), 99, 1)


def test_a_hot_prefix_gets_the_replicas_its_share_needs() -> None:
    found = place(key(1, 99), warmed((1,), (2,), (3,), (4,), (5,)), 20)
    assert found is not None
    ((rung, size),) = found.hot
    assert rung == 1
    assert 9 <= size <= 12
    assert found.anchor == 99


def test_hot_prefixes_narrow_step_by_step() -> None:
    found = place(key(1, 2, 99), warmed((1, 2), (1, 3), (1, 4), (5,), (6,), (7,), (8,), (9,)), 64)
    assert found is not None
    assert [rung for rung, _ in found.hot] == [1, 2]
    assert found.hot[0][1] > found.hot[1][1]
    assert found.depth == 2


def test_the_anchor_stays_while_a_conversation_grows() -> None:
    sketch = warmed((1, 2), (1, 3))
    assert place(key(1, 50), sketch, 8) == place(key(1, 50, 51, 52, 53), sketch, 8)


def test_a_session_takes_the_anchors_place_unless_it_is_hot() -> None:
    sketch = warmed((1, 2), (1, 3))
    found = place(key(1, 99, affinity=77), sketch, 8)
    assert found is not None
    assert found.anchor == 77
    for _ in range(400):
        sketch.count([77, 5], 0.0)
    found = place(key(1, 99, affinity=77), sketch, 8)
    assert found is not None
    assert found.anchor == 99


def test_who_shares_nothing_has_no_place() -> None:
    assert place(key(), ShareSketch(), 8) is None
    assert place(key(1), ShareSketch(), 0) is None


@given(st.floats(0, 1), st.integers(1, 2000))
def test_a_spread_is_enough_and_not_more_than_there_are(share: float, count: int) -> None:
    assert 1 <= spread(share, count) <= count
    assert spread(1.0, count) == count
    assert spread(share, count) >= min(2 * count * share, count)
