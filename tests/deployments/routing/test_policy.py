"""The decision: cost in seconds, asked where that pays, sensible when nobody answers or what is said is nonsense."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.ask import VERSION, Ask, AskFlag, AskReply, Digest, Intent
from deployments.routing.fleet import SILENT_ASKS, ReplicaFacts
from deployments.routing.key import PrefixKey, bare_key
from deployments.routing.policy import (
    LOSS_WINDOW_S,
    SLOW_START_FADES_S,
    Plan,
    Policy,
    PolicyOptions,
)
from deployments.routing.tracker import Tracker

RATE = 1000.0
FACTS = ReplicaFacts(slots=4, max_ongoing=8, prefill_rate=RATE)


def key(*rungs: int, tokens: int = 500, adapter: int = 0) -> PrefixKey:
    ends = tuple(tokens * (i + 1) for i in range(len(rungs)))
    trunk = tuple(range(min(len(rungs), 3)))
    return PrefixKey(VERSION, rungs, ends, trunk, tokens * len(rungs), in_tokens=True, adapter=adapter)


def policy(names: Iterable[str] = "abcdefgh", now: float = 100.0, **options: Any) -> Policy:
    made = Policy(PolicyOptions(seed=1, **options))
    made.update_replicas(dict.fromkeys(names, FACTS), now)
    return made


def reply(depth: int = 0, queued: int = 0, ongoing: int = 0, generation: int = 1, **fields: Any) -> AskReply:
    return AskReply(VERSION, generation, depth, queued, ongoing, **fields)


def ranked(made: Policy, prompt: PrefixKey, at: float = 100.0, /, **replies: AskReply) -> list[str]:
    """With replies of all that are asked; those not named hold nothing and are idle."""
    plan = made.plan(prompt, at)
    return made.rank(plan, {name: replies.get(name, reply()) for name in plan.ask}, at)


def owner(made: Policy, prompt: PrefixKey, now: float = 100.0) -> str:
    return ranked(made, prompt, now)[0]


# --- the cost ---------------------------------------------------------------------------------------------------------


def test_the_one_that_holds_the_prefix_is_best() -> None:
    made = policy("abcd")
    for name in "abcd":
        assert ranked(made, key(1, 2, 3), 100.0, **{name: reply(depth=2)})[0] == name


def test_a_wait_that_is_worth_less_than_the_prefix_is_waited_for() -> None:
    """1,000 tokens held are 2 s at 1,000 tokens/s and 1+ρ = 2."""
    made = policy("abcd", affinity_weight=2.0)
    assert ranked(made, key(1, 2, 3), a=reply(depth=2, queued=1900))[0] == "a"
    assert ranked(made, key(1, 2, 3), a=reply(depth=2, queued=2100))[0] != "a"


def test_a_slow_replica_costs_more() -> None:
    made = policy("ab")
    assert ranked(made, key(1, 2), a=reply(prefill_rate=500), b=reply(prefill_rate=1000))[0] == "b"


def test_what_a_replica_believes_wrongly_counts_less() -> None:
    made = policy("ab")
    answers = {"a": reply(depth=3, calibration=40), "b": reply(depth=2)}
    assert ranked(made, key(1, 2, 3, 4), 100.0, **answers)[0] == "b"


def test_requests_beyond_the_slots_cost() -> None:
    made = policy("ab")
    assert ranked(made, key(1, 2), a=reply(ongoing=7), b=reply(ongoing=4))[0] == "b"


@pytest.mark.parametrize(
    "word", [reply(3, flags=int(AskFlag.FULL)), reply(3, flags=int(AskFlag.DRAINING)), reply(3, ongoing=8)]
)
def test_a_full_or_draining_replica_comes_last(word: AskReply) -> None:
    made = policy("abcd")
    assert ranked(made, key(1, 2, 3), a=word)[-1] == "a"


def test_an_adapter_that_must_be_loaded_costs_its_time_and_excludes_nobody() -> None:
    made = policy("ab", adapter_load_s=0.7, affinity_weight=2.0)
    cold = int(AskFlag.ADAPTER_COLD)
    assert ranked(made, key(1, 2, adapter=5), a=reply(flags=cold), b=reply())[0] == "b"
    assert ranked(made, key(1, 2, adapter=5), a=reply(depth=1, flags=cold), b=reply())[0] == "a"


def test_a_new_replica_is_not_stormed_and_not_left_out() -> None:
    made = policy("ab")
    made.update_replicas(dict.fromkeys("abc", FACTS), 200.0)
    prompt = key(1, tokens=100)
    assert ranked(made, prompt, 200.1, a=reply(depth=0), b=reply(depth=0))[-1] == "c"
    assert ranked(made, prompt, 200.1, a=reply(queued=600), b=reply(queued=600))[0] == "c"
    firsts = {ranked(made, key(i, tokens=100), 200.0 + SLOW_START_FADES_S + 1)[0] for i in range(1, 60)}
    assert "c" in firsts


def test_the_weight_of_a_prefix_follows_the_fleets_reuse() -> None:
    made = policy()
    assert made.affinity_weight == 2.0
    for _ in range(50):
        made.observe_started(key(1), 100, 90)
    assert made.affinity_weight == 3.0
    assert policy(affinity_weight=1.5).affinity_weight == 1.5


# --- agreement and balance --------------------------------------------------------------------------------------------


def test_gateways_agree_on_a_prefix_nobody_holds() -> None:
    names = [f"r{i}" for i in range(16)]
    here, there = policy(names), policy(reversed(names))
    for _ in range(80):  # both have seen the same traffic
        for made in (here, there):
            ranked(made, key(1, 2))
    keys = [key(1, 1000 + i) for i in range(50)]
    assert sum(owner(here, k) == owner(there, k) for k in keys) >= 47


def test_requests_of_one_moment_do_not_all_go_to_one_replica() -> None:
    made = policy("abcd")
    taken: Counter[str] = Counter()
    for i in range(40):
        plan = made.plan(key(7), 100.0)
        best = made.rank(plan, {}, 100.0, asked=())[0]
        made.charge(f"q{i}", plan, best, 100.0)
        taken[best] += 1
    assert max(taken.values()) - min(taken.values()) <= 2


def test_without_a_key_the_shortest_queue_is_best() -> None:
    made = policy("abc")
    busy = {name: reply(queued=queued) for name, queued in {"a": 500, "b": 100, "c": 900}.items()}
    assert ranked(made, bare_key(50_000), 100.0, **busy) == ["b", "a", "c"]


def test_idle_replicas_are_taken_in_no_fixed_order() -> None:
    made = policy("abcd")
    assert {ranked(made, bare_key(0))[0] for _ in range(60)} == set("abcd")


# --- asking -----------------------------------------------------------------------------------------------------------


def test_two_owners_and_four_others_are_asked() -> None:
    made = policy([f"r{i}" for i in range(40)])
    plan = made.plan(key(1, 2, 3), 100.0)
    assert len(plan.ask) == len(set(plan.ask)) == 6
    assert plan.ask[:2] == tuple(made._fleet.ids[slot] for slot in plan.owners[:2])


@pytest.mark.parametrize(("tokens", "patience_s"), [(100, 0.003), (1000, 0.01), (4000, 0.04), (50_000, 0.05)])
def test_answers_are_waited_for_as_long_as_the_prompt_is_worth(tokens: int, patience_s: float) -> None:
    plan = policy().plan(key(1, tokens=tokens), 100.0)  # at 1,000 tokens per second
    assert plan.ask
    assert plan.patience_s == pytest.approx(patience_s)


@pytest.mark.parametrize(
    ("names", "prompt", "options"),
    [("a", key(1, 2), {}), ("ab", key(1, tokens=3), {}), ("ab", key(1), {"asks": False})],
)
def test_nobody_is_asked_where_it_cannot_pay(names: str, prompt: PrefixKey, options: dict[str, Any]) -> None:
    assert policy(names, **options).plan(prompt, 100.0).ask == ()


def test_a_conversation_that_just_went_somewhere_is_not_asked_about_again() -> None:
    made = policy()
    plan = made.plan(key(1, 2), 100.0)
    best = made.rank(plan, {name: reply() for name in plan.ask}, 100.0)[0]
    made.charge("q", plan, best, 100.0)
    again = made.plan(key(1, 2, 3), 100.01)
    assert again.ask == ()
    assert made.rank(again, {}, 100.01)[0] == best
    assert made.plan(key(1, 2, 3), 101.0).ask


def test_own_evidence_finds_a_conversation_off_its_owner() -> None:
    made = policy([f"r{i}" for i in range(40)])
    away = made._fleet.ids[made.plan(key(1, 2), 100.0).owners[-1]]
    made.charge("q", made.plan(key(1, 2), 100.0), away, 100.0)
    later = made.plan(key(1, 2, 3), 130.0)
    assert away in later.ask


def test_a_digest_tells_what_other_gateways_did() -> None:
    made = policy([f"r{i}" for i in range(40)])
    made.observe_digest("r7", Digest(VERSION, 1, 1, ((1, 2),)), 100.0)
    made.observe_digest("r8", Digest(VERSION + 1, 1, 1, ((1, 2),)), 100.0)
    assert made._fleet.ids[made.plan(key(1, 2, 3), 101.0).evidence[0]] == "r7"


def test_evidence_ends_with_the_replicas_memory() -> None:
    made = policy("ab")
    made.observe_stats("a", {"v": VERSION, "g": 1, "a": 50}, 100.0)
    made.charge("q", made.plan(key(1, 2), 100.0), "a", 100.0)
    assert made.plan(key(1, 2), 140.0).evidence
    assert not made.plan(key(1, 2), 146.0).evidence
    made.charge("q", made.plan(key(1, 2), 150.0), "a", 150.0)
    made.observe_stats("a", {"v": VERSION, "g": 2, "a": 50}, 151.0)
    assert not made.plan(key(1, 2), 152.0).evidence


def test_an_intent_says_what_the_replica_needs_to_know() -> None:
    made = policy("abcd")
    plan = made.plan(key(1, 2), 100.0)
    first, second = (made._fleet.ids[slot] for slot in plan.owners[:2])
    assert made.charge("q1", plan, first, 100.0) == Intent(VERSION, 2, 1, 1000, False)
    assert made.charge("q2", plan, second, 100.0) == Intent(VERSION, 2, 1, 1000, True)
    assert made.charge("q3", plan, "gone", 100.0) is None


# --- when things fail -------------------------------------------------------------------------------------------------


def lose_asks(made: Policy, now: float, times: int = 4) -> None:
    for i in range(times):
        plan = made.plan(key(5000 + i), now)
        made.rank(plan, {}, now)


def test_when_most_asks_are_lost_requests_stay_with_their_owners() -> None:
    made = policy()
    prompt = key(1, 2, 3, 4)
    lose_asks(made, 100.0)
    plan = made.plan(prompt, 100.0)
    assert plan.safe and not plan.ask
    assert [made._fleet.slot_of[name] for name in made.rank(plan, {}, 100.0)[:2]] == plan.owners[:2]
    later = made.plan(prompt, 100.0 + 3 * LOSS_WINDOW_S)
    assert later.ask, "they are tried again"


def test_without_asks_an_owner_is_left_when_a_whole_prompt_is_cheaper() -> None:
    made = policy(asks=False)
    prompt = key(1, 2, 3, 4)  # 2 s to compute
    plan = made.plan(prompt, 100.0)
    owners = [made._fleet.ids[slot] for slot in plan.owners[:2]]
    for name in owners:
        made.observe_stats(name, {"v": VERSION, "g": 1, "q": 2000}, 100.0)
    assert made.rank(made.plan(prompt, 100.0), {}, 100.0)[0] in owners
    for name in owners:
        made.observe_stats(name, {"v": VERSION, "g": 1, "q": 9000}, 102.0)
    assert made.rank(made.plan(prompt, 102.0), {}, 102.0)[0] not in owners


def test_without_asks_own_evidence_beats_the_owners() -> None:
    made = policy(asks=False)
    away = made._fleet.ids[made.plan(key(1, 2), 100.0).owners[5]]
    made.charge("q", made.plan(key(1, 2), 100.0), away, 100.0)
    made.complete("q", 103.0)
    assert made.rank(made.plan(key(1, 2, 3), 110.0), {}, 110.0)[0] == away


def test_what_arrived_is_used() -> None:
    made = policy()
    plan = made.plan(key(1, 2, 3), 100.0)
    holder = plan.ask[-1]
    assert made.rank(plan, {holder: reply(depth=3)}, 100.0)[0] == holder


def test_a_replica_that_never_answers_costs_more_and_is_no_less_a_replica() -> None:
    made = policy("ab")
    for i in range(SILENT_ASKS):
        plan = made.plan(key(100 + i), 100.0)
        made.rank(plan, {"b": reply()}, 100.0)
    plan = made.plan(key(1, tokens=300), 100.0)
    assert made.rank(plan, {"b": reply(queued=500)}, 100.0) == ["b", "a"]
    assert made.rank(plan, {"b": reply(queued=5000)}, 100.0) == ["a", "b"]


def test_a_dead_replica_is_last_until_it_is_listed_again() -> None:
    made = policy("abc")
    made.lost("a")
    made.lost("never there")
    plan = made.plan(key(1, 2), 100.0)
    assert "a" not in plan.ask
    assert made.rank(plan, {}, 100.0)[-1] == "a"
    made.update_replicas(dict.fromkeys("abc", FACTS), 101.0)
    assert "a" in made.plan(key(1, 2), 101.0).ask


def test_replicas_that_come_and_go_between_plan_and_rank() -> None:
    made = policy("ab")
    plan = made.plan(key(1, 2), 100.0)
    made.update_replicas(dict.fromkeys([f"n{i}" for i in range(20)], FACTS), 100.0)
    order = made.rank(plan, {"a": reply(2)}, 100.0)
    assert len(set(order)) == len(order) == 16 and set(order) < {f"n{i}" for i in range(20)}
    made.check_integrity()


def test_without_replicas_there_is_no_order() -> None:
    made = policy("")
    plan = made.plan(key(1, 2), 100.0)
    assert (plan.ask, made.rank(plan, {}, 100.0)) == ((), [])


@pytest.mark.parametrize("facts", [None, ReplicaFacts(4, 8, RATE, version=VERSION + 1)])
def test_a_replica_of_another_version_is_routed_to_but_not_asked(facts: ReplicaFacts | None) -> None:
    made = policy("")
    made.update_replicas({"a": FACTS, "b": FACTS, "other": facts}, 100.0)
    plan = made.plan(key(1, 2), 100.0)
    assert sorted(plan.ask) == ["a", "b"]
    answers = {"a": reply(queued=90_000), "b": reply(queued=90_000)}
    assert made.rank(plan, answers, 100.0)[0] == "other"
    assert made.charge("q", plan, "other", 100.0) is None
    made.check_integrity()


def test_a_reply_of_another_version_is_none() -> None:
    made = policy("ab")
    plan = made.plan(key(1, 2), 100.0)
    foreign = AskReply(VERSION + 1, 1, 2, 0, 0)
    assert made.rank(plan, {"a": foreign, "b": reply()}, 100.0)[0] in "ab"
    assert made._fleet.slot_of["a"] not in plan.held


# --- poisoned words ---------------------------------------------------------------------------------------------------

POISON = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.text(max_size=3),
    st.sampled_from([math.nan, math.inf, -math.inf, -1, 10**400, 2**64, [], {}]),
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["g", "q", "n", "r", "k", "a", "x"]), POISON).map(lambda d: {"v": VERSION, **d})
        | POISON
        | st.dictionaries(st.text(max_size=2), POISON),
        max_size=6,
    )
)
@settings(deadline=None, max_examples=60)
def test_poisoned_stats_break_nothing(words: list[object]) -> None:
    made = policy("abc")
    for i, word in enumerate(words):
        made.observe_stats("a", word, 100.0 + i)
        made.check_integrity()
    plan = made.plan(key(1, 2), 110.0)
    order = made.rank(plan, {name: reply() for name in plan.ask}, 110.0)
    assert sorted(order) == ["a", "b", "c"]
    assert not np.isnan(plan.costs[list(made._fleet.slot_of.values())]).any()


NUMBERS = st.integers(-(2**63), 2**64 - 1)


@given(st.builds(AskReply, st.just(VERSION), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
@settings(deadline=None, max_examples=60)
def test_poisoned_replies_break_nothing(word: AskReply) -> None:
    made = policy("abc")
    for now in (100.0, 101.0):
        plan = made.plan(key(1, 2), now)
        order = made.rank(plan, dict.fromkeys(plan.ask, word), now)
        assert sorted(order) == ["a", "b", "c"]
        made.charge("q", plan, order[0], now)
        made.check_integrity()


def test_stats_that_did_not_change_are_heard_once() -> None:
    made = policy("ab")
    for _ in range(3):
        made.observe_stats("a", {"v": VERSION, "g": 1, "q": 5000}, 100.0)
    made.observe_stats("a", {"v": VERSION, "g": 1, "q": 5000}, 104.0)
    assert made._load.waits(104.0)[made._fleet.slot_of["a"]] < 1.0


def test_stats_do_not_replace_what_was_asked_a_moment_ago() -> None:
    made = policy("ab")
    ranked(made, key(1, 2), a=reply(queued=3000))
    made.observe_stats("a", {"v": VERSION, "g": 1, "q": 0}, 100.1)
    assert made._load.waits(100.1)[made._fleet.slot_of["a"]] > 2.5


# --- together with the replica's book ---------------------------------------------------------------------------------


def serve(
    made: Policy, trackers: dict[str, Tracker], name: str, prompt: PrefixKey, now: float
) -> tuple[str, int, Plan]:
    plan = made.plan(prompt, now)
    replies = {id_: trackers[id_].answer(Ask(VERSION, prompt.rungs), now) for id_ in plan.ask}
    best = made.rank(plan, replies, now)[0]
    intent = made.charge(name, plan, best, now)
    if intent is not None:
        trackers[best].intend(intent, now)
    cached = trackers[best].admit(name, prompt, now)
    made.accepted(name, best, now)
    trackers[best].started(name, prompt.size, cached, now)
    trackers[best].first_token(name, now)
    trackers[best].finish(name, 10, now)
    made.complete(name, now)
    return best, cached, plan


def test_conversations_stay_where_they_are_through_any_gateway() -> None:
    names = [f"r{i}" for i in range(12)]
    gateways = [policy(names) for _ in range(4)]
    trackers = {name: Tracker(10**6, RATE, 4, 8) for name in names}
    positions = {(gateway, name): 0 for gateway in range(4) for name in names}
    cached = total = 0
    for turn in range(2, 8):
        for gateway, name in positions:
            digest = trackers[name].digest(positions[gateway, name])
            gateways[gateway].observe_digest(name, digest, 95.0 + 10 * turn)
            positions[gateway, name] = digest.position
        for session in range(1, 40):
            prompt = key(1, *(1000 * session + i for i in range(turn)), tokens=400)
            now = 100.0 + 10 * turn + session / 10
            _, found, _ = serve(gateways[(session + turn) % 4], trackers, f"{session}-{turn}", prompt, now)
            if turn > 2:
                cached, total = cached + found, total + prompt.size - 400
    assert cached >= 0.95 * total
    for made in gateways:
        made.check_integrity()
    for book in trackers.values():
        book.check_integrity()


def test_a_plans_words_survive_the_wire() -> None:
    for word in (Ask(VERSION, (1, 2**64 - 1), 3), reply(5), Intent(VERSION, 1, 2, 3, True), Digest(1, 2, 3, ((4, 5),))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(word), type=type(word)) == word
