"""The simulated engines: what each replica has in its cache, how long its queue is, when a request would be served.

A replica computes prompts one after the other at `rate` tokens/s, keeps up to `max_sequences` requests while they are
being answered, and holds the blocks of its prompts, the least recently used leaves going first. Numbers of replicas are
never used twice: one that restarts is another replica.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

OVERHEAD_S = 0.02
"""Seconds of every prefill that do not depend on its length."""


class PrefixIndex:
    """Which replicas have which blocks: for each block a bit set of replicas."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._bytes = (replicas + 7) // 8
        self._holders: dict[int, int] = {}

    def add(self, block: int, replica: int) -> None:
        self._holders[block] = self._holders.get(block, 0) | 1 << replica

    def discard(self, block: int, replica: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def depths(self, blocks: Sequence[int]) -> Ints:
        """How many of the first `blocks` each replica has, without a gap."""
        depths = np.zeros(self._replicas, np.int64)
        held: int | None = None
        for depth, block in enumerate(blocks):
            holders = self._holders.get(block, 0)
            still = holders if held is None else holders & held
            if held is not None and still != held:
                depths[self._numbers(held)] = depth
            held = still
            if not held:
                return depths
        if held is not None:
            depths[self._numbers(held)] = len(blocks)
        return depths

    def _numbers(self, bits: int) -> npt.NDArray[np.bool_]:
        raw = np.frombuffer(bits.to_bytes(self._bytes, "little"), np.uint8)
        return np.unpackbits(raw, count=self._replicas, bitorder="little").astype(np.bool_)


class Served(msgspec.Struct, frozen=True):
    """How a replica serves a request it was given: times in seconds since the start of the run."""

    replica: int
    cached_tokens: int
    uncached_tokens: int
    began_at: float
    first_token_at: float
    finished_at: float


class Replica:
    """One engine. `horizon_s`: how long a block lives unused, infinite until one was evicted."""

    def __init__(self, number: int, rate: float, capacity_blocks: int, max_sequences: int) -> None:
        self.number = number
        self.rate = rate
        self.horizon_s = float("inf")
        self._capacity = capacity_blocks
        self._used_at: OrderedDict[int, float] = OrderedDict()
        self._prefill_free_at = 0.0
        self._sequences_free_at = [0.0] * max_sequences

    def free_at(self) -> float:
        """When the prompt of a request that comes now begins to be computed, if that is in the future."""
        return max(self._prefill_free_at, self._sequences_free_at[0])

    def serve(self, cached: int, uncached: int, decode_s: float, now: float) -> Served:
        began = max(now, self.free_at())
        first = began + OVERHEAD_S + uncached / self.rate
        self._prefill_free_at = first
        heapq.heapreplace(self._sequences_free_at, first + decode_s)
        return Served(self.number, cached, uncached, began, first, first + decode_s)

    def touch(self, blocks: Sequence[int], now: float, index: PrefixIndex) -> None:
        """The prompt's blocks are in the cache, its first block most recently used; evicts what no longer fits."""
        used = self._used_at
        for block in reversed(blocks):
            if block not in used:
                index.add(block, self.number)
            used[block] = now
            used.move_to_end(block)
        while len(used) > self._capacity:
            block, at = used.popitem(last=False)
            index.discard(block, self.number)
            age = now - at
            self.horizon_s = age if self.horizon_s == float("inf") else 0.98 * self.horizon_s + 0.02 * age

    def lose_cache(self, index: PrefixIndex) -> None:
        for block in self._used_at:
            index.discard(block, self.number)
        self._used_at.clear()


class Fleet:
    """All replicas there ever are in a run; `alive` says which take requests. Arrays are by replica number."""

    def __init__(self, total: int, rate: float, capacity_blocks: int, max_sequences: int) -> None:
        self.replicas = [Replica(n, rate, capacity_blocks, max_sequences) for n in range(total)]
        self.resident = PrefixIndex(total)
        self.alive = np.zeros(total, np.bool_)
        self.rates: Floats = np.full(total, rate)
        self.free_at: Floats = np.zeros(total)
        self.running: Ints = np.zeros(total, np.int64)
        self.queued_tokens: Ints = np.zeros(total, np.int64)

    def start(self, numbers: Iterable[int]) -> None:
        self.alive[list(numbers)] = True

    def drain(self, number: int) -> None:
        """It takes no more requests and finishes those it has."""
        self.alive[number] = False

    def kill(self, number: int) -> None:
        self.alive[number] = False
        self.replicas[number].lose_cache(self.resident)

    def slow_down(self, number: int, factor: float) -> None:
        self.replicas[number].rate *= factor
        self.rates[number] *= factor

    def left_tokens(self, number: int, now: float) -> int:
        """What the engine itself would say it has yet to compute, the rest of the prompt at hand included."""
        return int(max(float(self.free_at[number]) - now, 0.0) * self.rates[number])

    def waits(self, now: float) -> Floats:
        """Exact seconds until each replica would begin with a prompt."""
        return np.maximum(self.free_at - now, 0.0)

    def serve(
        self, number: int, blocks: Sequence[int], cached: int, uncached: int, decode_s: float, now: float
    ) -> Served:
        replica = self.replicas[number]
        served = replica.serve(cached, uncached, decode_s, now)
        replica.touch(blocks, now, self.resident)
        self.free_at[number] = replica.free_at()
        self.running[number] += 1
        self.queued_tokens[number] += served.uncached_tokens
        return served

    def prefilled(self, served: Served) -> None:
        self.queued_tokens[served.replica] -= served.uncached_tokens

    def finished(self, served: Served) -> None:
        self.running[served.replica] -= 1
