"""The order of candidates: fewest tokens in flight first, equals as they came."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.policy import TYPICAL_OUTPUT_TOKENS, RoutingHint, estimate_tokens, rank

REPLICAS = st.lists(st.text(max_size=3), unique=True, max_size=8)


def test_the_replica_with_fewer_tokens_in_flight_comes_first() -> None:
    assert rank(["a", "b", "c"], {"a": 30, "b": 10, "c": 20}) == ["b", "c", "a"]


def test_a_replica_nothing_is_known_of_counts_as_idle() -> None:
    assert rank(["a", "new", "b"], {"a": 1, "b": 2}) == ["new", "a", "b"]


def test_load_of_replicas_that_are_no_candidates_is_ignored() -> None:
    assert rank(["a", "b"], {"gone": 0, "a": 5}) == ["b", "a"]


def test_without_candidates_there_is_no_order() -> None:
    assert rank([], {"a": 1}) == []


@given(REPLICAS)
def test_equals_keep_the_callers_order(candidates: list[str]) -> None:
    assert rank(candidates, {}) == candidates
    assert rank(candidates, dict.fromkeys(candidates, 7)) == candidates


@given(REPLICAS, st.data())
def test_all_candidates_are_ranked_by_rising_cost(candidates: list[str], data: st.DataObject) -> None:
    load = {replica: data.draw(st.integers(0, 9)) for replica in candidates if data.draw(st.booleans())}
    ranked = rank(candidates, load)
    assert sorted(ranked) == sorted(candidates)
    costs = [load.get(replica, 0) for replica in ranked]
    assert costs == sorted(costs)


def test_a_longer_prompt_is_estimated_to_cost_more() -> None:
    assert estimate_tokens(4000, 10) == 1010
    assert estimate_tokens(8000, 10) == 2010


def test_a_request_without_a_limit_is_estimated_to_be_typical() -> None:
    assert estimate_tokens(0, None) == estimate_tokens(0, 10**6) == TYPICAL_OUTPUT_TOKENS


def test_a_small_limit_bounds_the_estimate() -> None:
    assert estimate_tokens(0, 1) == 1


def test_a_hint_survives_the_wire() -> None:
    hint = RoutingHint(tokens=1234)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hint), type=RoutingHint) == hint
