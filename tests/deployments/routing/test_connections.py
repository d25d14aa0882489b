"""Which replicas keep a connection, where there are more of them than connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.connections import INCUMBENT, most_used

NAMES = st.sets(st.sampled_from("abcdefgh"))


def test_all_of_few() -> None:
    assert most_used(["a", "b"], [], {}, 2) == {"a", "b"}


def test_the_most_used_of_many() -> None:
    assert most_used("abcd", [], {"b": 2.0, "d": 5.0, "a": 1.0}, 2) == {"b", "d"}


def test_a_draw_is_won_by_those_that_are_connected() -> None:
    assert most_used("abcd", "cd", {}, 2) == {"c", "d"}
    assert most_used("abcd", "cd", {"a": 1.0, "c": 1.0, "d": 1.0}, 2) == {"c", "d"}


def test_a_place_is_taken_only_by_one_that_is_used_much_more() -> None:
    assert most_used("ab", "b", {"a": INCUMBENT - 0.1, "b": 1.0}, 1) == {"b"}
    assert most_used("ab", "b", {"a": INCUMBENT + 0.1, "b": 1.0}, 1) == {"a"}


@given(NAMES, NAMES, st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 100)), st.integers(1, 8))
def test_it_is_a_choice_of_the_wanted_ones_within_the_limit(
    wanted: set[str], connected: set[str], uses: dict[str, float], limit: int
) -> None:
    chosen = most_used(wanted, connected, uses, limit)
    assert chosen <= wanted
    assert len(chosen) == min(limit, len(wanted))
