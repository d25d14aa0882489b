"""Other routers' rules, each from its documentation or source, with its defaults; and oracles that know everything.

They are rules, not products: what a rule needs to know it knows at no cost and at once, except where it says that each
gateway knows only what it sent itself. Where a product has options, the one that serves it best is taken.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping

import numpy as np

from benchmarks.router.fleet import Floats, Ints, PrefixIndex, Served
from benchmarks.router.simulation import Rule, World
from benchmarks.router.workloads import Request

DECODE_TOKENS = 512
"""What a request that is being answered weighs in Dynamo's sum, in prompt tokens."""


class Random(Rule):
    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        return self.world.least(np.zeros(len(self.world.fleet.alive)))


class PowerOfTwo(Rule):
    """Ray Serve's default: of two replicas drawn, the one with fewer requests, which it asks them."""

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        alive = np.flatnonzero(self.world.fleet.alive).tolist()
        two = self.world.random.sample(alive, min(2, len(alive)))
        return int(min(two, key=lambda replica: self.world.fleet.running[replica]))


class ShortestQueue(Rule):
    """Fewest tokens left to compute, exactly known."""

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        return self.world.least(self.world.fleet.queued_tokens)


class OwnShortestQueue(Rule):
    """Fewest tokens left to compute of those this gateway sent."""

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        return self.world.least(self.world.sent_tokens[gateway])


class _History(Rule):
    """Rules that remember which prompts went where: each gateway its own, or all together."""

    shared = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._total = len(world.fleet.alive)
        count = 1 if self.shared else world.scenario.gateways
        self._history = [PrefixIndex(self._total) for _ in range(count)]

    def depths(self, request: Request, gateway: int) -> Ints:
        """Blocks of the prompt that each replica alive was sent before."""
        depths = self._history[0 if self.shared else gateway].depths(request.blocks)
        return np.where(self.world.fleet.alive, depths, 0)

    def routed(self, request: Request, gateway: int, served: Served, now: float) -> None:
        history = self._history[0 if self.shared else gateway]
        for block in request.blocks:
            history.add(block, served.replica)

    def gateway_restarted(self, gateway: int, now: float) -> None:
        self._history[0 if self.shared else gateway] = PrefixIndex(self._total)


class RayPrefix(_History):
    """Ray's PrefixCacheAffinityRouter with its one tree for all gateways: the longest match, if it is a tenth of the
    prompt, else the replica that was sent the least so far. Its limit on imbalance is infinite by default.
    """

    shared = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._sent_blocks = np.zeros(self._total)

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        depths = self.depths(request, gateway)
        running = self.world.fleet.running
        if depths.max() >= 0.1 * len(request.blocks):
            return self.world.least(np.where(depths == depths.max(), running, np.inf))
        alive = self.world.fleet.alive
        least = self._sent_blocks[alive].min()
        return self.world.least(np.where(self._sent_blocks == least, running, np.inf))

    def routed(self, request: Request, gateway: int, served: Served, now: float) -> None:
        super().routed(request, gateway, served, now)
        self._sent_blocks[served.replica] += len(request.blocks)


class CacheAware(_History):
    """SGLang's cache_aware with its command line's defaults: when the gateway's own counts are far apart, the shortest
    queue for every request; else the longest match above 0.3 of the prompt; else the shortest queue.
    """

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        sent = self.world.sent_requests[gateway]
        alive = sent[self.world.fleet.alive]
        most, fewest = int(alive.max()), int(alive.min())
        if most - fewest > 64 and most > 1.5 * fewest:
            return self.world.least(sent)
        depths = self.depths(request, gateway)
        if depths.max() > 0.3 * len(request.blocks):
            return self.world.least(-depths)
        return self.world.least(sent)


class LMetric(_History):
    """Tokens to compute, times requests there and this one; both as the gateway remembers them."""

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        depths = self.depths(request, gateway)
        sent = self.world.sent_requests[gateway]
        cached = np.minimum(depths * self.world.workload.block_tokens, request.tokens - 1)
        return self.world.least((request.tokens - cached) * (sent + 1) + sent * 1e-6)


def _hash(*numbers: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())


class BoundedHashing(Rule):
    """Consistent hashing with bounded loads (1.25) of an ideal session key; counts are the gateway's own."""

    VIRTUAL_NODES = 256

    def __init__(self, world: World) -> None:
        super().__init__(world)
        replicas = range(len(world.fleet.alive))
        self._ring = sorted((_hash(n, v), n) for n in replicas for v in range(self.VIRTUAL_NODES))

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        alive, sent = self.world.fleet.alive, self.world.sent_requests[gateway]
        total = int(sent[alive].sum())
        limit = 1.25 * (total + 1) / int(alive.sum())
        start = bisect.bisect(self._ring, (_hash(request.session), -1))
        first: int | None = None
        for step in range(len(self._ring)):
            replica = self._ring[(start + step) % len(self._ring)][1]
            if not alive[replica]:
                continue
            if total == 0 or sent[replica] <= limit:
                return replica
            first = replica if first is None else first
        assert first is not None
        return first


class LlmD(Rule):
    """llm-d's default: exact caches; of the replicas with 0.8 of the prompt, unless their queue is 18 s of prefill
    longer than the others', the one with the least to compute. Queues are what this gateway sent.
    """

    AFFINITY = 0.8
    MAX_PENALTY_S = 18.0

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        world = self.world
        resident, sent = world.resident(request), world.sent_tokens[gateway]
        costs: Floats = (sent + request.tokens - resident).astype(float)
        alive = world.fleet.alive
        warm = alive & (resident / request.tokens >= self.AFFINITY)
        cold = alive & ~warm
        if warm.any():
            gap = sent[warm].min() - sent[cold].min() if cold.any() else 0
            if gap <= world.rate * self.MAX_PENALTY_S:
                costs[~warm] = np.inf
        return world.least(costs)


class Dynamo(Rule):
    """Dynamo's cost with exact caches: tokens queued and to be computed, and a weight for each request being answered.
    Queues are those of all gateways, as with its replica sync.
    """

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        queued, running = self.queues(gateway)
        return self.world.least(queued + (request.tokens - self.world.resident(request)) + running * DECODE_TOKENS)

    def queues(self, gateway: int) -> tuple[Ints, Ints]:
        return self.world.fleet.queued_tokens, self.world.fleet.running


class DynamoLocal(Dynamo):
    """The same with what this gateway sent: the default for several routers."""

    def queues(self, gateway: int) -> tuple[Ints, Ints]:
        return self.world.sent_tokens[gateway], self.world.sent_requests[gateway]


class Oracle(Rule):
    """Least time to first token, with exact caches and queues; `rho` weighs what a prefill pushes out of the cache."""

    rho = 0.0

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        prefill = (request.tokens - self.world.resident(request)) / self.world.fleet.rates
        return self.world.least(self.world.fleet.waits(now) + (1 + self.rho) * prefill)


class Oracle1(Oracle):
    rho = 1.0


class Oracle3(Oracle):
    rho = 3.0


PEERS: dict[str, type[Rule]] = {
    "random": Random,
    "power of two": PowerOfTwo,
    "shortest queue": ShortestQueue,
    "shortest queue, own": OwnShortestQueue,
    "SGLang cache_aware": CacheAware,
    "LMetric": LMetric,
    "CHWBL 1.25": BoundedHashing,
    "Ray prefix": RayPrefix,
    "llm-d": LlmD,
    "Dynamo, local load": DynamoLocal,
    "Dynamo, global load": Dynamo,
    "oracle": Oracle,
    "oracle, rho 1": Oracle1,
    "oracle, rho 3": Oracle3,
}
