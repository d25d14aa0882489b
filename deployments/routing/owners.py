"""Who should hold a prefix: rendezvous hashing, so that gateways agree with no shared state.

Every gateway ranks the replicas of a prefix by the same hash, and takes the first. A prefix that many requests share
must not pin one replica: it is given as many as its share of the traffic needs, and what branches off it is placed
among those. A replica that comes takes about 1/(N+1) of all prefixes; one that goes loses only its own.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from deployments.routing.key import PrefixKey

U64 = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]

COUNTERS: Final = 4096
HALF_LIFE_S: Final = 600.0
ALPHA: Final = 2.0
"""A hot prefix gets this many times the replicas that its share of the traffic needs."""
RANKED: Final = 8
"""Owners that anybody asks for; of a fleet of a thousand the order of the others is of no use."""
MEMO: Final = 4096
SPARE: Final = 4
"""Times as many replicas are kept in order for a hot prefix as it is spread over."""
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS: Final = tuple(map(np.uint64, (30, 27, 31)))
_FACTORS: Final = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
_STEPS: Final = tuple(1.25**n for n in range(64))
_FIXES: Final = 8
_RESCALE: Final = 2.0**64


def weight_of(replica: str) -> int:
    """A replica's own number, the same in every process."""
    return xxh3_64_intdigest(replica.encode("utf-8", "surrogatepass"))


def splitmix64(values: U64) -> U64:
    """The finaliser of SplitMix64, elementwise: a good hash of a 64-bit number."""
    mixed: U64 = values + _GAMMA
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


class ShareSketch:
    """How often each rung was seen lately, of the most frequent ones (space-saving counters, decaying).

    A new rung takes the place of the rarest; what it inherits from it is known, and not counted as its own. Instead of
    all counters decaying, each new sighting weighs more than the ones before.
    """

    def __init__(self, capacity: int = COUNTERS, half_life_s: float = HALF_LIFE_S) -> None:
        self._capacity = capacity
        self._half_life_s = half_life_s
        self._counts: dict[int, tuple[float, float]] = {}  # rung -> (count, what of it is inherited)
        self._heap: list[tuple[float, int]] = []  # a lower bound of each count, once each
        self._seen = 0.0
        self._epoch: float | None = None
        self._weight = 1.0

    def count(self, rungs: Iterable[int], now: float) -> None:
        """One request with these rungs."""
        self._advance(now)
        weight = self._weight
        self._seen += weight
        counts = self._counts
        for rung in rungs:
            entry = counts.get(rung)
            if entry is not None:
                counts[rung] = (entry[0] + weight, entry[1])
                continue
            inherited = self._evict() if len(counts) >= self._capacity else 0.0
            counts[rung] = (inherited + weight, inherited)
            heapq.heappush(self._heap, (inherited + weight, rung))

    def share(self, rung: int) -> float:
        """The part of all requests, 0 to 1, that surely had this rung."""
        return self.shares((rung,))[0]

    def shares(self, rungs: Iterable[int]) -> list[float]:
        """The same of each."""
        counts, seen = self._counts, self._seen
        return [0.0 if entry is None else min((entry[0] - entry[1]) / seen, 1.0) for entry in map(counts.get, rungs)]

    @property
    def seen(self) -> float:
        """Requests counted, the older ones less."""
        return self._seen / self._weight

    def _advance(self, now: float) -> None:
        if self._epoch is None:
            self._epoch = now
        self._weight = 2.0 ** min(max(now - self._epoch, 0.0) / self._half_life_s, 1000.0)
        if self._weight > _RESCALE:
            scale = 1.0 / self._weight
            self._counts = {rung: (count * scale, part * scale) for rung, (count, part) in self._counts.items()}
            self._heap = [(bound * scale, rung) for bound, rung in self._heap]
            self._seen *= scale
            self._epoch, self._weight = now, 1.0

    def _evict(self) -> float:
        """Makes room for one, and says what it had. Bounded: after a few stale bounds it takes what it has found."""
        for attempt in range(_FIXES):
            bound, rung = self._heap[0]
            count = self._counts[rung][0]
            if count <= bound or attempt == _FIXES - 1:
                break
            heapq.heapreplace(self._heap, (count, rung))
        heapq.heappop(self._heap)
        return self._counts.pop(rung)[0]

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the counters and the heap disagree, or there are too many."""
        assert len(self._counts) == len(self._heap) <= self._capacity
        assert {rung for _, rung in self._heap} == self._counts.keys()
        assert all(bound <= self._counts[rung][0] for bound, rung in self._heap)
        assert all(0.0 <= inherited < count for count, inherited in self._counts.values())


class Place(msgspec.Struct, frozen=True):
    """Where a key's owners are drawn: `hot` are (rung, replicas it is spread over), root first, ever fewer.

    `anchor` is the rung they are ranked by; `depth` how many of the key's rungs are so common that any replica may be
    thought to hold them.
    """

    hot: tuple[tuple[int, int], ...]
    anchor: int
    depth: int


def place(key: PrefixKey, sketch: ShareSketch, replicas: int) -> Place | None:
    """None for a key that shares nothing. Call it behind `sketch.count`.

    From the root on, rungs with a share above max(1/2N, 3/seen) are hot: each takes 2·N·share replicas and one more.
    The first rung below is the anchor. It is shallow, so it stays while a conversation grows. A session the client
    names takes its place, unless that one is hot too.
    """
    if not key.trunk or replicas < 1:
        return None
    threshold = max(0.5 / replicas, 3.0 / max(sketch.seen, 1e-9))
    hot: list[tuple[int, int]] = []
    size = replicas
    depth = 0
    anchor = key.rungs[-1]
    trunk = [key.rungs[index] for index in key.trunk]
    before = math.inf
    for index, rung, share in zip(key.trunk, trunk, sketch.shares(trunk), strict=True):
        if share <= threshold:
            anchor = rung
            break
        depth = index + 1
        if share < before and (wanted := spread(share, replicas)) < size:
            hot.append((rung, wanted))
            size = wanted
        before = share
    if key.affinity:
        share = sketch.share(key.affinity)
        if share <= threshold:
            anchor = key.affinity
        elif (wanted := spread(share, replicas)) < size:
            hot.append((key.affinity, wanted))
    return Place(tuple(hot), anchor, depth)


def spread(share: float, replicas: int) -> int:
    """Replicas for a prefix of this share, rounded up to a coarse step: shares waver, and sets should not."""
    needed = math.ceil(ALPHA * replicas * share) + 1
    return min(math.ceil(_STEPS[bisect_left(_STEPS, needed)]), replicas)


class Owners:
    """The rendezvous order of the replicas of one model, by slot."""

    def __init__(self) -> None:
        self._slots: Slots = np.empty(0, np.intp)
        self._weights: U64 = np.empty(0, np.uint64)
        self._all: Slots = np.empty(0, np.intp)  # indices into the two
        self._memo: OrderedDict[Place, tuple[int, ...]] = OrderedDict()
        # Of the replicas that a hot prefix's outer ones leave, the best by its rung: more than its set takes, so that
        # a set grows and shrinks with its share at no cost.
        self._sets: OrderedDict[tuple[tuple[tuple[int, int], ...], int], Slots] = OrderedDict()

    def set_members(self, weights: dict[int, int]) -> None:
        """`weights`: slot -> `weight_of` the replica in it. The order of slots does not matter."""
        self._slots = np.fromiter(weights.keys(), np.intp, len(weights))
        self._weights = np.fromiter(weights.values(), np.uint64, len(weights))
        self._all = np.arange(len(weights))
        self._memo.clear()
        self._sets.clear()

    def rank(self, place: Place) -> tuple[int, ...]:
        """The slots of the first `RANKED` owners, best first."""
        found = self._memo.get(place)
        if found is not None:
            self._memo.move_to_end(place)
            return found
        members, others = self._set(place.hot)
        ranked = self._best(members, place.anchor, RANKED)
        if len(ranked) < RANKED and len(others):
            # A small set: those it would grow to follow, for when all inside are full.
            ranked = np.concatenate((ranked, others[: RANKED - len(ranked)]))
        ranked = self._slots[ranked]
        found = self._memo[place] = tuple(ranked.tolist())
        if len(self._memo) > MEMO:
            self._memo.popitem(last=False)
        return found

    def _set(self, hot: tuple[tuple[int, int], ...]) -> tuple[Slots, Slots]:
        """Indices into `_slots`: of the replicas that `hot` narrows the choice to, and of those it would take next."""
        if not hot:
            return self._all, self._all[:0]
        outer, (rung, size) = hot[:-1], hot[-1]
        best = self._sets.get((outer, rung))
        if best is None or len(best) < size:
            members, others = self._set(outer)
            best = self._best(members, rung, max(SPARE * size, RANKED))
            if len(best) < RANKED:
                best = np.concatenate((best, others[: RANKED - len(best)]))
            self._sets[outer, rung] = best
            if len(self._sets) > MEMO // 4:
                self._sets.popitem(last=False)
        else:
            self._sets.move_to_end((outer, rung))
        return best[:size], best[size:]

    def _best(self, members: Slots, rung: int, count: int) -> Slots:
        """The `count` best of `members` by the hash with `rung`, best first."""
        weights = self._weights if members is self._all else self._weights[members]
        scores = splitmix64(weights ^ np.uint64(rung))
        if count < len(scores):
            top: Slots = np.argpartition(scores, len(scores) - count)[len(scores) - count :]
        else:
            top = np.arange(len(scores))
        return members[top[scores[top].argsort()[::-1]]]

    def check_integrity(self) -> None:
        """Raises `AssertionError` when a memo holds a replica that is no member."""
        members = set(self._slots.tolist())
        assert len(self._memo) <= MEMO
        assert len(members) == len(self._slots)
        for ranked in self._memo.values():
            assert len(set(ranked)) == len(ranked) == min(RANKED, len(members))
            assert members.issuperset(ranked)


def rank_in(ranked: Sequence[int], slot: int) -> int:
    """The place of `slot` among ranked owners; behind all of them if it is none."""
    return ranked.index(slot) if slot in ranked else RANKED
