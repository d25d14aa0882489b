"""What this gateway itself has sent where: rungs -> replicas, of bounded size.

Rungs are looked up by the dozen in each decision, one by one in a dictionary: for so few that is much faster than
arrays are. The dictionaries hold nothing but numbers, and the rest is in flat arrays: so the garbage collector has
nothing to walk through. They are many and small, so that none takes long to be resized.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Final

ROWS: Final = 131_072
"""Rungs remembered; about 20 MB when all are."""
HOLDERS: Final = 4
"""Replicas remembered of a rung: a hot one is everywhere, and nobody needs a list of that."""
LOOKED_AT: Final = 8
"""The one of so many rungs that was used longest ago makes room."""
_SHARDS: Final = 64
_NOBODY: Final = -1


class Index:
    """Claims with their time; whether one is still believed is for the reader to say (`believed_since`).

    Slots up to 32,767.
    """

    def __init__(self, rows: int = ROWS) -> None:
        assert rows % LOOKED_AT == 0
        self._row_of: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._rungs = array("Q", bytes(8 * rows))  # by row
        self._used = array("d", bytes(8 * rows))
        self._who = array("h", [_NOBODY]) * (rows * HOLDERS)  # by row and holder
        self._when = array("d", [-math.inf]) * (rows * HOLDERS)
        self._next = 0  # the first row that was never used
        self._hand = 0  # where room is made next

    def __len__(self) -> int:
        """Rungs it knows of."""
        return self._next

    def claim(self, rungs: Sequence[int], slot: int, now: float) -> None:
        """`slot` holds `rungs` from now on, as far as anybody knows."""
        row_of, used, who, when = self._row_of, self._used, self._who, self._when
        for rung in rungs:
            shard = row_of[rung % _SHARDS]
            row = shard.get(rung)
            if row is None:
                row = shard[rung] = self._new_row()
                self._rungs[row] = rung
            used[row] = now
            place = row * HOLDERS
            if who[place] != slot:
                places = range(place, place + HOLDERS)
                place = next((one for one in places if who[one] == slot), -1)
                if place < 0:
                    place = min(places, key=when.__getitem__)
                    who[place] = slot
            when[place] = now

    def deepest(self, rungs: Sequence[int], above: int, believed_since: Callable[[int], float]) -> dict[int, int]:
        """By slot with a claim since its `believed_since`: how many of `rungs` it holds, where more than `above`.

        A claim of a deep rung stands for all above it: engines forget the ends of prompts first.
        """
        row_of, who, when = self._row_of, self._who, self._when
        found: dict[int, int] = {}
        since: dict[int, float] = {}
        for depth in range(len(rungs), above, -1):
            rung = rungs[depth - 1]
            row = row_of[rung % _SHARDS].get(rung)
            if row is None:
                continue
            for place in range(row * HOLDERS, row * HOLDERS + HOLDERS):
                slot = who[place]
                if slot == _NOBODY:
                    break
                if slot in found:
                    continue
                if slot not in since:
                    since[slot] = believed_since(slot)
                if when[place] >= since[slot]:
                    found[slot] = depth
        return found

    def _new_row(self) -> int:
        if self._next < len(self._rungs):
            self._next += 1
            return self._next - 1
        start = self._hand
        self._hand = (start + LOOKED_AT) % len(self._rungs)
        row = min(range(start, start + LOOKED_AT), key=self._used.__getitem__)
        rung = self._rungs[row]
        del self._row_of[rung % _SHARDS][rung]
        for place in range(row * HOLDERS, row * HOLDERS + HOLDERS):
            self._who[place], self._when[place] = _NOBODY, -math.inf
        return row

    def check_integrity(self) -> None:
        """Raises `AssertionError` when rows and rungs disagree, or a replica is at one rung twice."""
        rows = {rung: row for shard in self._row_of for rung, row in shard.items()}
        assert sorted(rows.values()) == list(range(self._next))
        assert all(rung in self._row_of[rung % _SHARDS] and self._rungs[row] == rung for rung, row in rows.items())
        for row in range(self._next):
            places = slice(row * HOLDERS, row * HOLDERS + HOLDERS)
            who = [slot for slot in self._who[places] if slot != _NOBODY]
            assert 1 <= len(set(who)) == len(who)
            assert self._who[places].tolist() == who + [_NOBODY] * (HOLDERS - len(who))
            assert max(self._when[places]) == self._used[row]
