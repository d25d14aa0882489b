"""What Serve is offered for one request, and how it changes while no replica has taken it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.routing.decision import BEST, REMEMBERED, Decision, Decisions
from deployments.routing.key import bare_key
from deployments.routing.policy import Plan

NAMES = st.sets(st.sampled_from("abcdefgh"))


def decision(order: str) -> Decision:
    return Decision(Plan(bare_key(1), 1.0, 0.0), list(order))


def test_the_best_come_one_by_one_then_everybody() -> None:
    assert decision("cabde").ranks("abcde", ()) == [["c"], ["a"], ["b"], [*"cabde"]]


def test_those_to_be_shunned_come_after_all_others() -> None:
    assert decision("abcde").ranks("abcde", "ab") == [["c"], ["d"], ["e"], [*"cde"], [*"abcde"]]


def test_one_that_refused_comes_last() -> None:
    made = decision("abcd")
    made.refused_by("a")
    assert made.ranks("abcd", ())[0] == ["b"]
    assert made.ranks("abcd", ())[-1] == [*"bcda"]


@given(st.permutations("abcdefgh"), NAMES, NAMES)
def test_every_candidate_is_in_the_last_rank_and_none_else_in_any(
    order: list[str], candidates: set[str], shunned: set[str]
) -> None:
    ranks = decision("".join(order[:5])).ranks(candidates, shunned)
    assert sorted(ranks[-1]) == sorted(candidates)
    assert all(rank and set(rank) <= candidates - shunned for rank in ranks[:-1])
    singles = min(BEST, len(candidates - shunned))
    assert [len(rank) for rank in ranks[:singles]] == [1] * singles


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
