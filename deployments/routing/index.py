"""What this gateway itself has sent where: rungs -> replicas, of bounded size.

A set-associative table in flat arrays: a rung lives in one of the 8 places of its bucket, and takes the place of the
one that was not used longest. It is full, never too full, and never swept. About 4 MB, however long it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

BUCKETS: Final = 16384
WAYS: Final = 8
HOLDERS: Final = 4
"""Replicas remembered of a rung: a hot one is everywhere, and nobody needs a list of that."""
_NOBODY: Final = -1


class Index:
    """Claims with their time; whether one is still believed is for the reader to say (`believed_since`).

    Slots up to 32,767. Times are kept as float32 seconds since the first claim: exact to 1 s for half a year.
    """

    def __init__(self, buckets: int = BUCKETS) -> None:
        assert buckets & (buckets - 1) == 0, "a power of two"
        self._mask = np.uint64(buckets - 1)
        self._rungs = np.zeros((buckets, WAYS), np.uint64)  # 0: free
        self._used = np.full((buckets, WAYS), -np.inf, np.float32)
        self._who = np.full((buckets, WAYS, HOLDERS), _NOBODY, np.int16)
        self._when = np.full((buckets, WAYS, HOLDERS), -np.inf, np.float32)
        self._epoch: float | None = None

    def claim(self, rungs: Sequence[int], slot: int, now: float) -> None:
        """`slot` holds `rungs` from now on, as far as anybody knows."""
        if not rungs:
            return
        if self._epoch is None:
            self._epoch = now
        time = np.float32(now - self._epoch)
        wanted = np.array(rungs, np.uint64)
        buckets = (wanted & self._mask).astype(np.intp)
        same = self._rungs[buckets] == wanted[:, None]
        known = same.any(1)
        ways = np.where(known, same.argmax(1), self._used[buckets].argmin(1))
        if not known.all():
            # Two new rungs may fall into one place: then the later has it, and the earlier is not remembered.
            fresh = ~known
            self._who[buckets[fresh], ways[fresh]] = _NOBODY
            self._when[buckets[fresh], ways[fresh]] = -np.inf
            self._rungs[buckets[fresh], ways[fresh]] = wanted[fresh]
        self._used[buckets, ways] = time
        own = self._who[buckets, ways] == slot
        holders = np.where(own.any(1), own.argmax(1), self._when[buckets, ways].argmin(1))
        self._who[buckets, ways, holders] = slot
        self._when[buckets, ways, holders] = time

    def deepest(
        self, rungs: Sequence[int], believed_since: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """(slots, depths): of each slot with a claim since its `believed_since`, how many of `rungs` it holds.

        A claim of a deep rung stands for all above it: engines forget the ends of prompts first.
        """
        none = np.empty(0, np.intp)
        if not rungs or self._epoch is None:
            return none, none
        wanted = np.array(rungs, np.uint64)
        buckets = (wanted & self._mask).astype(np.intp)
        rows, ways = np.nonzero(self._rungs[buckets] == wanted[:, None])
        if not len(rows):
            return none, none
        who = self._who[buckets[rows], ways].astype(np.intp)
        when = self._when[buckets[rows], ways]
        known = (who >= 0) & (who < len(believed_since))
        believed = known & (when + self._epoch >= believed_since[np.where(known, who, 0)])
        found, holders = np.nonzero(believed)
        slots, depths = who[found, holders], rows[found] + 1
        order = np.lexsort((-depths, slots))
        slots, depths = slots[order], depths[order]
        first = np.ones(len(slots), bool)
        first[1:] = slots[1:] != slots[:-1]
        return slots[first], depths[first]

    @property
    def bytes(self) -> int:
        return self._rungs.nbytes + self._used.nbytes + self._who.nbytes + self._when.nbytes

    def check_integrity(self) -> None:
        """Raises `AssertionError` when a rung is in a foreign bucket, or a replica twice at one rung."""
        buckets, ways = np.nonzero(self._rungs)
        assert ((self._rungs[buckets, ways] & self._mask) == buckets.astype(np.uint64)).all()
        for bucket, way in zip(buckets.tolist(), ways.tolist(), strict=True):
            who = [slot for slot in self._who[bucket, way].tolist() if slot != _NOBODY]
            assert len(set(who)) == len(who)
        free = self._rungs == 0
        assert (self._who[free] == _NOBODY).all()
