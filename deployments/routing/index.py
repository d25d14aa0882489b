"""What this gateway itself has sent where: rungs -> replicas, of bounded size.

Rungs are looked up by the dozen in each decision, one by one in a dictionary: for so few that is much faster than
arrays are. There are many small dictionaries, so that none takes long to be resized.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

SHARDS: Final = 64
SHARD_RUNGS: Final = 1600
"""In each shard; the one that was used longest ago makes room. About 25 MB when all are full."""
HOLDERS: Final = 4
"""Replicas remembered of a rung: a hot one is everywhere, and nobody needs a list of that."""

Claim = tuple[int, float]
"""(slot, when)."""


class Index:
    """Claims with their time; whether one is still believed is for the reader to say (`believed_since`)."""

    def __init__(self, shards: int = SHARDS, shard_rungs: int = SHARD_RUNGS) -> None:
        assert shards & (shards - 1) == 0, "a power of two"
        self._mask = shards - 1
        self._shard_rungs = shard_rungs
        self._shards: list[OrderedDict[int, tuple[Claim, ...]]] = [OrderedDict() for _ in range(shards)]

    def __len__(self) -> int:
        """Rungs it knows of."""
        return sum(map(len, self._shards))

    def claim(self, rungs: Sequence[int], slot: int, now: float) -> None:
        """`slot` holds `rungs` from now on, as far as anybody knows."""
        shards, mask, limit = self._shards, self._mask, self._shard_rungs
        claim = (slot, now)
        alone = (claim,)
        for rung in rungs:
            shard = shards[rung & mask]
            holders = shard.get(rung)
            if holders is None:
                shard[rung] = alone
                if len(shard) > limit:
                    shard.popitem(last=False)
                continue
            # Newest first. Mostly the holder is the same as before.
            if len(holders) == 1 and holders[0][0] == slot:
                shard[rung] = alone
            else:
                shard[rung] = (claim, *[other for other in holders if other[0] != slot][: HOLDERS - 1])
            shard.move_to_end(rung)

    def deepest(self, rungs: Sequence[int], above: int, believed_since: Callable[[int], float]) -> dict[int, int]:
        """By slot with a claim since its `believed_since`: how many of `rungs` it holds, where more than `above`.

        A claim of a deep rung stands for all above it: engines forget the ends of prompts first.
        """
        shards, mask = self._shards, self._mask
        found: dict[int, int] = {}
        since: dict[int, float] = {}
        for depth in range(len(rungs), above, -1):
            rung = rungs[depth - 1]
            holders = shards[rung & mask].get(rung)
            if holders is None:
                continue
            for slot, when in holders:
                if slot in found:
                    continue
                if slot not in since:
                    since[slot] = believed_since(slot)
                if when >= since[slot]:
                    found[slot] = depth
        return found

    def check_integrity(self) -> None:
        """Raises `AssertionError` when a rung is in a foreign shard, a replica twice at one rung, or a bound broken."""
        for number, shard in enumerate(self._shards):
            assert len(shard) <= self._shard_rungs
            for rung, holders in shard.items():
                assert rung & self._mask == number
                assert 1 <= len({slot for slot, _ in holders}) == len(holders) <= HOLDERS
                assert list(holders) == sorted(holders, key=lambda claim: -claim[1])
