"""What Serve is offered for one request, and how it changes while no replica has taken it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.decision import BEST, REMEMBERED, Decision, Decisions
from deployments.routing.key import bare_key
from deployments.routing.policy import Plan

NAMES = st.sets(st.sampled_from("abcdefgh"))


def decision(order: str) -> Decision:
    return Decision(Plan(bare_key(1), 1.0, 0.0), list(order))


def ranks(made: Decision, candidates: Iterable[str], shunned: Collection[str] = ()) -> list[str]:
    """Replicas are their ids in capitals."""
    return ["".join(rank) for rank in made.ranks({id_: id_.upper() for id_ in candidates}, shunned)]


def test_the_best_come_one_by_one_then_everybody() -> None:
    assert ranks(decision("cabde"), "abcde") == ["C", "A", "B", "ABCDE"]


def test_those_to_be_shunned_come_after_all_others() -> None:
    assert ranks(decision("abcde"), "abcde", "ab") == ["C", "D", "E", "CDE", "ABCDE"]


def test_one_that_refused_comes_last() -> None:
    made = decision("abcd")
    made.refused_by("a")
    assert ranks(made, "abcd") == ["B", "C", "D", "ABCD"]


def test_who_came_after_the_decision_is_better_than_who_may_be_dead() -> None:
    found = ranks(decision("ab"), "abxy", "ab")
    assert sorted(found[:2]) == ["X", "Y"] and found[2:] == ["XY", "ABXY"]


@given(st.permutations("abcdefgh"), NAMES, NAMES)
def test_every_candidate_is_in_the_last_rank_and_none_else_in_any(
    order: list[str], candidates: set[str], shunned: set[str]
) -> None:
    found = ranks(decision("".join(order[:5])), sorted(candidates), shunned)
    good = {id_.upper() for id_ in candidates - shunned}
    assert found[-1] == "".join(sorted(candidates)).upper()
    assert all(rank and set(rank) <= good for rank in found[:-1])
    singles = min(BEST, len(good))
    assert [len(rank) for rank in found[:singles]] == [1] * singles


def test_decisions_are_kept_until_they_are_done_and_not_for_ever() -> None:
    decisions = Decisions()
    kept = decision("ab")
    decisions.keep("q", kept)
    decisions.refused("q", "a")
    decisions.refused("unknown", "a")
    assert decisions.get("q") is kept and list(kept.order) == ["b", "a"]
    decisions.done("q")
    decisions.done("q")
    assert decisions.get("q") is None
    for i in range(REMEMBERED + 5):
        decisions.keep(str(i), kept)
    assert len(decisions) == REMEMBERED and decisions.get("4") is None and decisions.get("5") is kept
