"""The production modules as a rule: one `Policy` per gateway, one `Tracker` per replica, nothing of them changed.

What replicas answer comes from their trackers, which know what they were told, not from the simulated caches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.router.fleet import Served
from benchmarks.router.ladder import key_of
from benchmarks.router.simulation import Rule, World
from benchmarks.router.workloads import Request
from deployments.routing.ask import VERSION, Ask, AskReply
from deployments.routing.fleet import ReplicaFacts
from deployments.routing.policy import Plan, Policy, PolicyOptions
from deployments.routing.tracker import Tracker

RATED_TOKENS = 256
"""Prefills of fewer tokens say nothing about the rate."""


class Ours(Rule):
    """With asks and digests."""

    options = PolicyOptions()
    digests = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        scenario = world.scenario
        errors = random.Random(scenario.seed + 3)
        total = len(world.fleet.alive)
        hints = [world.rate * self._error(errors) for _ in range(total)]
        self._facts = [ReplicaFacts(scenario.max_sequences, 2 * scenario.max_sequences, hint) for hint in hints]
        self._trackers = [
            Tracker(scenario.cache_tokens, facts.prefill_rate, facts.slots, facts.max_ongoing, generation=n + 1)
            for n, facts in enumerate(self._facts)
        ]
        self._ids = [f"replica-{n:04d}" for n in range(total)]
        self._numbers = {name: n for n, name in enumerate(self._ids)}
        self._stats: dict[int, object] = {}
        self._plans: dict[int, Plan] = {}
        self._policies: list[Policy] = []
        self._positions: list[dict[int, int]] = []
        for gateway in range(scenario.gateways):
            self._policies.append(self._new_policy(gateway, 0.0))
            self._positions.append({})
        block_tokens = world.workload.block_tokens
        self._keys = [key_of(request, block_tokens, messages=scenario.messages) for request in world.workload.requests]
        if scenario.misjudged:
            for n, request in enumerate(world.workload.requests):
                factor = self._error(random.Random(request.session))
                self._keys[n] = msgspec.structs.replace(
                    self._keys[n],
                    in_tokens=False,
                    ends=tuple(round(end * factor * 3.6) for end in self._keys[n].ends),
                    size=round(self._keys[n].size * factor * 3.6),
                )

    def _error(self, draw: random.Random) -> float:
        return 1 + draw.choice((-1, 1)) * self.world.scenario.misjudged

    def _new_policy(self, gateway: int, now: float) -> Policy:
        policy = Policy(msgspec.structs.replace(self.options, seed=self.world.scenario.seed * 1000 + gateway))
        policy.update_replicas(self._listed(), now)
        for replica, stats in self._stats.items():
            if self.world.fleet.alive[replica]:
                policy.observe_stats(self._ids[replica], stats, now)
        return policy

    def _listed(self) -> dict[str, ReplicaFacts | None]:
        alive = self.world.fleet.alive
        return {name: facts for name, facts, up in zip(self._ids, self._facts, alive, strict=True) if up}

    def ask(self, request: Request, gateway: int, now: float) -> Sequence[int]:
        plan = self._policies[gateway].plan(self._keys[request.index], now)
        self._plans[request.index] = plan
        return [self._numbers[name] for name in plan.ask]

    def answer(self, request: Request, replica: int, now: float) -> object:
        key = self._keys[request.index]
        return self._trackers[replica].answer(Ask(VERSION, key.rungs, key.adapter), now, self._counted(replica, now))

    def _counted(self, replica: int, now: float) -> int | None:
        world = self.world
        return world.fleet.left_tokens(replica, now) if world.scenario.engine_counts else None

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        plan, policy = self._plans.pop(request.index), self._policies[gateway]
        replies = {self._ids[n]: reply for n, reply in answers.items() if isinstance(reply, AskReply)}
        ranked = (self._numbers[name] for name in policy.rank(plan, replies, now))
        best = next(replica for replica in ranked if self.world.fleet.alive[replica])
        intent = policy.charge(str(request.index), plan, self._ids[best], now)
        if intent is not None:
            self._trackers[best].intend(intent, now)
        return best

    def routed(self, request: Request, gateway: int, served: Served, now: float) -> None:
        name = str(request.index)
        self._policies[gateway].accepted(name, self._ids[served.replica], now)
        self._trackers[served.replica].admit(name, self._keys[request.index], now)

    def first_token(self, request: Request, gateway: int, served: Served, now: float) -> None:
        tracker, name = self._trackers[served.replica], str(request.index)
        tracker.started(name, request.tokens, served.cached_tokens, now)
        tracker.first_token(name, now)
        if served.uncached_tokens >= RATED_TOKENS:
            tracker.observe_rate(served.uncached_tokens / (now - served.began_at))
        self._policies[gateway].observe_started(self._keys[request.index], request.tokens, served.cached_tokens)

    def finished(self, request: Request, gateway: int, served: Served, now: float) -> None:
        name = str(request.index)
        self._trackers[served.replica].finish(name, 0, now)  # the simulated caches keep no answers
        self._policies[gateway].complete(name, now)

    def died(self, request: Request, gateway: int, served: Served, now: float) -> None:
        policy = self._policies[gateway]
        policy.lost(self._ids[served.replica])
        policy.complete(str(request.index), now)

    def published(self, now: float) -> None:
        for replica in self.world.fleet.alive.nonzero()[0].tolist():
            name, tracker = self._ids[replica], self._trackers[replica]
            self._stats[replica] = stats = tracker.stats(now, self._counted(replica, now))
            for policy, positions in zip(self._policies, self._positions, strict=True):
                policy.observe_stats(name, stats, now)
                if self.digests:
                    digest = tracker.digest(positions.get(replica, 0))
                    positions[replica] = digest.position
                    policy.observe_digest(name, digest, now)

    def replicas_changed(self, now: float) -> None:
        for policy in self._policies:
            policy.update_replicas(self._listed(), now)

    def gateway_restarted(self, gateway: int, now: float) -> None:
        self._policies[gateway] = self._new_policy(gateway, now)
        self._positions[gateway] = {}

    def check(self) -> None:
        """Raises `AssertionError` when a module's own sums do not add up."""
        for policy in self._policies:
            policy.check_integrity()
        for tracker in self._trackers:
            tracker.check_integrity()


class WithoutDigests(Ours):
    digests = False


class StatsOnly(Ours):
    """What is left when no replica can be asked."""

    options = PolicyOptions(asks=False)
    digests = False


OURS: dict[str, type[Rule]] = {"ours A": StatsOnly, "ours B": WithoutDigests, "ours C": Ours}
