"""What is decided is what the documented formula says, computed here for every replica in plain numbers."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.ask import VERSION, AskFlag, AskReply
from deployments.routing.fleet import FULL_S, SILENT_ASKS, SILENT_S, ReplicaFacts
from deployments.routing.index import HOLDERS
from deployments.routing.key import PrefixKey
from deployments.routing.policy import EVIDENCE_AGE, SLOW_START_FADES_S, SLOW_START_S, Plan, Policy, PolicyOptions

EQUAL_S = 1e-6
"""Less than this apart, replicas are equals: which of them is taken is up to owners and chance."""


def held_tokens(made: Policy, plan: Plan, slot: int, units: float) -> float:
    """By the claims, gone through one by one; with a safe plan, by what is guessed of the owners."""
    fleet, key = made._fleet, plan.key
    if not fleet.keyed[slot]:
        return 0.0
    since = max(fleet.reset_at[slot], plan.made_at - EVIDENCE_AGE * fleet.horizon[slot])
    hot = plan.place.depth if plan.place else 0
    depth = hot
    index = made._index
    for position, rung in enumerate(key.rungs, 1):
        claims = [
            index._when[HOLDERS * row + n]
            for row in range(len(index))
            for n in range(HOLDERS)
            if index._rungs[row] == rung and index._who[HOLDERS * row + n] == slot
        ]
        if any(when >= since for when in claims):
            depth = max(depth, position)
    return key.ends[depth - 1] / units if depth else 0.0


def cost(made: Policy, plan: Plan, slot: int, held: float, now: float) -> float:
    fleet, load = made._fleet, made._load
    full = fleet.ongoing[slot] >= fleet.max_ongoing[slot] and fleet.told_at[slot] > now - FULL_S
    if not fleet.alive[slot] or full or fleet.draining_until[slot] > now:
        return math.inf
    compute = max(plan.prompt_tokens - fleet.calibration[slot] * held, 1.0) / fleet.rate[slot]
    said = fleet.ongoing[slot] * 2 ** ((fleet.told_at[slot] - now) / load.request_s)
    ongoing = max(said, load.counts()[slot])
    beyond = max(ongoing - fleet.sat[slot], 0.0) / fleet.sat[slot] * load.request_s
    slow = SLOW_START_S * (1 - (now - fleet.joined[slot]) / SLOW_START_FADES_S)
    new = slow if slow > 0 and compute < slow else 0.0
    silent = SILENT_S if fleet.silent[slot] >= SILENT_ASKS else 0.0
    return float(load.waits(now)[slot] + made.affinity_weight * compute + beyond + new + silent)


NAMES = [f"r{n}" for n in range(40)]
ANSWER = st.builds(
    AskReply,
    st.just(VERSION),
    st.integers(1, 2),
    st.integers(0, 5),
    st.integers(0, 4000),
    st.integers(0, 12),
    st.sampled_from([0, 0, 0, int(AskFlag.FULL), int(AskFlag.DRAINING)]),
    st.sampled_from([0, 1000, 1000, 1500]),
    st.sampled_from([100, 100, 60]),
)
STEP = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["request", "request", "request", "request", "stats", "members", "lost", "keyless"]),
        "wait": st.floats(0.0, 3.0),
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=5),
        "answers": st.lists(st.none() | ANSWER, min_size=6, max_size=6),
        "who": st.integers(0, len(NAMES) - 1),
        "count": st.integers(0, len(NAMES)),
        "stranger": st.booleans(),
    }
)


def prompt(branches: list[int]) -> PrefixKey:
    """Prompts with the same first branches share those rungs."""
    rungs = [int("9" + "".join(map(str, branches[: n + 1]))) for n in range(len(branches))]
    ends = tuple(400 * (n + 1) for n in range(len(rungs)))
    return PrefixKey(VERSION, tuple(rungs), ends, (0, 1)[: len(rungs)], ends[-1], in_tokens=True)


class Walk:
    """Some minutes of a gateway, each of whose decisions is computed twice."""

    def __init__(self, asks: bool) -> None:
        self.made = Policy(PolicyOptions(seed=1, asks=asks))
        self.now = 1000.0
        self.requests = 0

    def step(self, kind: str, wait: float, who: int, count: int, stranger: bool, **other: Any) -> None:
        self.now += wait
        made, name = self.made, NAMES[who]
        match kind:
            case "members":
                odd = {name: None} if stranger else {}
                facts = [ReplicaFacts(4, 10, 1000.0 if n % 7 else 1700.0) for n in range(count)]
                made.update_replicas({**dict(zip(NAMES, facts, strict=False)), **odd}, self.now)
            case "stats":
                made.observe_stats(name, {"v": VERSION, "g": 1, "q": 100 * count, "n": count, "a": who}, self.now)
            case "lost":
                made.lost(name)
            case _:
                self.decide(prompt(other["prompt"]), other["answers"], keyed=kind == "request")
        made.check_integrity()

    def decide(self, key: PrefixKey, answers: list[AskReply | None], *, keyed: bool) -> None:
        made, now = self.made, self.now
        if not keyed:
            key = PrefixKey(VERSION, (), (), (), key.size, in_tokens=True)
        plan = made.plan(key, now)
        slot_of = dict(made._fleet.slot_of)
        held = {slot: held_tokens(made, plan, slot, 1.0) for slot in slot_of.values()}
        if plan.safe:
            held |= {slot: tokens for slot, tokens in plan.held.items() if slot not in plan.evidence}
        costs = {name: cost(made, plan, slot, held[slot], now) for name, slot in slot_of.items()}
        self.check_asked(plan, costs)
        replies = {name: word for name, word in zip(plan.ask, answers, strict=False) if word is not None}
        later = now + 0.001
        order = made.rank(plan, replies, later)
        assert len(set(order)) == len(order) >= min(len(slot_of), 16) and set(order) <= slot_of.keys()
        assert len(slot_of) > 16 or len(order) == len(slot_of), "of a small fleet all"
        if not order:
            return
        for name in plan.ask:
            slot = slot_of[name]
            depth = min(replies[name].depth, len(key.rungs)) if name in replies else None
            tokens = held[slot] if depth is None else (key.ends[depth - 1] if depth else 0.0)
            costs[name] = cost(made, plan, slot, tokens, later)
        self.check_first(plan, costs, order[0], bool(replies))
        if len(order) <= 16 and not plan.safe and not plan.ask:
            ranked = [costs[name] for name in order]
            assert all(a <= b + EQUAL_S for a, b in zip(ranked, ranked[1:], strict=False))
        self.requests += 1
        made.charge(f"q{self.requests}", plan, order[0], later)
        if self.requests % 2:
            made.accepted(f"q{self.requests}", order[0], later)
        if self.requests % 3:
            made.complete(f"q{self.requests - 1}", later)
        self.now = later

    def check_asked(self, plan: Plan, costs: dict[str, float]) -> None:
        """Owners and the deepest evidence may cost what they like; the others are the cheapest there are."""
        fleet = self.made._fleet
        slots = [fleet.slot_of[name] for name in plan.ask]
        assert all(math.isfinite(costs[name]) and fleet.keyed[slot] for name, slot in zip(plan.ask, slots, strict=True))
        others = [
            name for name, slot in zip(plan.ask, slots, strict=True) if slot not in (*plan.owners, *plan.evidence)
        ]
        left = [costs[name] for name, slot in fleet.slot_of.items() if fleet.keyed[slot] and name not in plan.ask]
        assert max((costs[name] for name in others), default=-math.inf) <= min(left, default=math.inf) + EQUAL_S

    def check_first(self, plan: Plan, costs: dict[str, float], first: str, heard: bool) -> None:
        fleet = self.made._fleet
        among = list(costs)
        if heard:
            strangers = [name for name, slot in fleet.slot_of.items() if not fleet.keyed[slot]]
            among = [name for name in (*plan.ask, *strangers) if math.isfinite(costs[name])] or among
        elif plan.safe:
            near = {*plan.owners[:2], *plan.evidence}
            candidates = [name for name, slot in fleet.slot_of.items() if slot in near and math.isfinite(costs[name])]
            saved = [costs[name] - plan.prompt_tokens / fleet.rate[fleet.slot_of[name]] for name in candidates]
            if abs(min(saved, default=math.inf) - min(costs.values())) < EQUAL_S:
                return
            among = candidates if min(saved, default=math.inf) < min(costs.values()) else among
        least = min(costs[name] for name in among)
        assert costs[first] <= least + EQUAL_S or math.isinf(least), (first, costs)


@given(st.lists(STEP, max_size=30), st.integers(1, len(NAMES)), st.sampled_from([True, True, False]))
@settings(deadline=None, max_examples=120)
def test_the_replica_that_costs_least_is_first(steps: list[dict[str, Any]], count: int, asks: bool) -> None:
    walk = Walk(asks)
    walk.step("members", 0.0, 0, count, False)
    for step in steps:
        walk.step(**step)
