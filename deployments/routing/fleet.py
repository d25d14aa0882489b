"""What a gateway knows of each replica, in arrays by slot: a decision looks at all of them, and they may be many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from deployments.routing.ask import VERSION

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

DEFAULT_RATE: Final = 1000.0
"""Prefill tokens per second of a replica that says nothing of itself."""
RATE_BOUNDS: Final = (1.0, 1e7)
RATE_ALIKE: Final = 0.12
TYPICAL_RATE_S: Final = 1.0
UNKNOWN: Final = -1
SILENT_ASKS: Final = 3
SILENT_S: Final = 1.0
"""What a replica that does not answer may have in its queue unseen."""
FULL_S: Final = 1.0
"""How long a replica that was full is thought to be."""
_FIRST_SLOTS: Final = 8


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What a replica published when it became ready. `prefill_rate`: a first guess, tokens per second."""

    slots: int
    max_ongoing: int
    prefill_rate: float
    version: int = VERSION


STRANGER: Final = ReplicaFacts(slots=1, max_ongoing=2**31, prefill_rate=DEFAULT_RATE, version=UNKNOWN)
"""A replica of another version: it is routed to by what this gateway itself has sent there."""


class Fleet:
    """Slots are reused; `reset_at` says since when what is known of a slot is about the replica in it now."""

    def __init__(self) -> None:
        self.slot_of: dict[str, int] = {}
        self.ids: npt.NDArray[np.object_] = np.zeros(0, object)  # str by slot, "" where it is free
        self.free: list[int] = []
        self._known_before = False
        self._typical_rate = DEFAULT_RATE
        self._typical_at = -math.inf
        self.last_joined = -math.inf  # after the first replicas
        self.version = 0  # of the set of living replicas
        self.askable = 0  # of them, those that speak this version
        self.speaking = 0  # the same, with the dead that are still listed
        self.slowest = RATE_BOUNDS[1]  # the lowest rate of those, or a little less
        self.alive: Flags = np.zeros(0, bool)
        self.keyed: Flags = np.zeros(0, bool)  # speaks this version
        self.rate: Floats = np.zeros(0)  # prefill tokens per second, of equal replicas the same
        self.told_rate: Floats = np.zeros(0)  # as each has measured it
        self.sat: Floats = np.zeros(0)  # requests that run at once
        self.max_ongoing: Floats = np.zeros(0)
        self.ongoing: Floats = np.zeros(0)  # as it said last
        self.told_at: Floats = np.zeros(0)  # when that was
        self.calibration: Floats = np.zeros(0)  # 0 to 1; 0 where nothing is known of what it holds
        self.generation: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.reset_at: Floats = np.zeros(0)
        self.horizon: Floats = np.zeros(0)  # age in seconds at which it forgets; inf: it does not
        self.joined: Floats = np.zeros(0)
        self.draining_until: Floats = np.zeros(0)
        self.blocked_until: Floats = np.zeros(0)  # it should get nothing: dead, draining or full
        self.penalty: Floats = np.zeros(0)  # seconds its silence costs; nan where there is no replica
        self.silent: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # asks in a row that it has not answered

    def __len__(self) -> int:
        """Slots, with and without a replica."""
        return len(self.ids)

    def update(self, replicas: Mapping[str, ReplicaFacts | None], now: float) -> tuple[list[int], list[int]]:
        """The replicas there are now. Returns the slots that were freed and those that were taken."""
        gone = [slot for replica, slot in self.slot_of.items() if replica not in replicas]
        for slot in gone:
            del self.slot_of[self.ids[slot]]
            self.ids[slot] = ""
            self.alive[slot] = self.keyed[slot] = False
            self.blocked_until[slot], self.penalty[slot] = -math.inf, math.nan
            self.free.append(slot)
        come: dict[int, ReplicaFacts] = {}
        back = False
        for replica, facts in replicas.items():
            known = self.slot_of.get(replica)
            if known is not None:
                if not self.alive[known]:
                    self.alive[known] = back = True
                    self._block(known)
                continue
            if not self.free:
                self._grow()
            slot = self.free.pop()
            self.slot_of[replica] = slot
            self.ids[slot] = replica
            come[slot] = facts or STRANGER
        self._begin(come, now)
        if come and self._known_before:
            self.last_joined = now
        self._known_before = self._known_before or bool(replicas)
        if gone or come or back:
            self._changed()
        return gone, list(come)

    def lost(self, slot: int) -> None:
        """It has died: it gets nothing until it is listed anew."""
        self.alive[slot] = False
        self._block(slot)
        self._changed()

    def tell_load(self, slot: int, ongoing: float, at: float) -> None:
        """Requests at the replica, as it said, or as it was at `at`."""
        self.ongoing[slot] = ongoing
        self.told_at[slot] = at
        self._block(slot)

    def tell_draining(self, slot: int, until: float) -> None:
        """-inf: it is not."""
        if self.draining_until.item(slot) != until:
            self.draining_until[slot] = until
            self._block(slot)

    def tell_silence(self, slot: int, silent: bool) -> None:
        """Whether it left an ask without an answer."""
        asks = self.silent.item(slot)
        if not silent and not asks:
            return
        asks = self.silent[slot] = asks + 1 if silent else 0
        self.penalty[slot] = SILENT_S if asks >= SILENT_ASKS else 0.0

    def _block(self, slot: int) -> None:
        if not self.alive.item(slot):
            until = math.inf
        elif self.ongoing.item(slot) >= self.max_ongoing.item(slot):
            until = max(self.draining_until.item(slot), self.told_at.item(slot) + FULL_S)
        else:
            until = self.draining_until.item(slot)
        self.blocked_until[slot] = until

    def _changed(self) -> None:
        self.version += 1
        self.askable = int(np.count_nonzero(self.keyed & self.alive))
        self.speaking = int(np.count_nonzero(self.keyed))
        self._find_slowest()

    def _find_slowest(self) -> None:
        self.slowest = float(self.rate[self.keyed].min(initial=RATE_BOUNDS[1]))

    def forgot(self, slot: int, generation: int, now: float) -> bool:
        """Notes the replica's generation; whether it is another one than before, and all it held is gone."""
        before = self.generation.item(slot)
        if before == generation:
            return False
        known = before != UNKNOWN
        self.generation[slot] = generation
        if known:
            self.reset_at[slot] = now
        return known

    def tell_rate(self, slot: int, rate: float, now: float) -> None:
        """A rate like most others' counts as the fleet's median: equal replicas measure rates that differ by a percent.

        Costs would never be equal otherwise, and the owner never preferred.
        """
        if now - self._typical_at > TYPICAL_RATE_S:
            self.told_rate[slot] = rate
            self._typical_at = now
            self._typical_rate = _middle(self.told_rate[self.keyed]) if self.speaking else rate
            like = np.abs(self.told_rate - self._typical_rate) <= RATE_ALIKE * self._typical_rate
            self.rate = np.where(like, self._typical_rate, self.told_rate)
            self._find_slowest()
        elif rate != self.told_rate.item(slot):
            self.told_rate[slot] = rate
            if abs(rate - self._typical_rate) <= RATE_ALIKE * self._typical_rate:
                rate = self._typical_rate
            self.rate[slot] = rate
            self.slowest = min(self.slowest, rate)

    def _begin(self, come: Mapping[int, ReplicaFacts], now: float) -> None:
        """All at once: a gateway may find a thousand when it starts."""
        slots = list(come)
        self.alive[slots] = True
        self.keyed[slots] = [facts.version == VERSION for facts in come.values()]
        rates = [bounded(facts.prefill_rate, DEFAULT_RATE, *RATE_BOUNDS) for facts in come.values()]
        self.rate[slots] = self.told_rate[slots] = rates
        self.sat[slots] = [bounded(facts.slots, 1.0, 1.0, 1e6) for facts in come.values()]
        self.max_ongoing[slots] = [bounded(facts.max_ongoing, 1e9, 1.0, 1e9) for facts in come.values()]
        self.ongoing[slots] = 0.0
        self.told_at[slots] = -math.inf
        self.calibration[slots] = self.keyed[slots]
        self.generation[slots] = UNKNOWN
        self.reset_at[slots] = now
        self.horizon[slots] = math.inf
        # The replicas a gateway finds when it starts may be as old as they like: only later ones are new.
        self.joined[slots] = now if self._known_before else -math.inf
        self.draining_until[slots] = self.blocked_until[slots] = -math.inf
        self.silent[slots] = 0
        self.penalty[slots] = 0.0

    def _grow(self) -> None:
        old = len(self.ids)
        new = max(2 * old, _FIRST_SLOTS)
        for name, array in list(vars(self).items()):
            if isinstance(array, np.ndarray):
                grown = np.zeros(new, array.dtype)
                grown[:old] = array
                setattr(self, name, grown)
        # Free slots are computed with too, and never chosen.
        self.rate[old:] = self.told_rate[old:] = self.sat[old:] = 1.0
        self.ids[old:] = ""
        self.blocked_until[old:], self.penalty[old:] = -math.inf, math.nan
        self.free.extend(range(new - 1, old - 1, -1))

    def check_integrity(self) -> None:
        """Raises `AssertionError` when slots, ids and flags disagree."""
        assert {replica: slot for slot, replica in enumerate(self.ids) if replica} == self.slot_of
        assert sorted(self.free) == [slot for slot, replica in enumerate(self.ids) if not replica]
        assert not (self.alive | self.keyed)[self.free].any()
        assert all(len(array) == len(self.ids) for array in vars(self).values() if isinstance(array, np.ndarray))
        used = list(self.slot_of.values())
        assert self.speaking == np.count_nonzero(self.keyed)
        assert self.askable == np.count_nonzero(self.keyed & self.alive)
        assert self.slowest <= self.rate[self.keyed].min(initial=RATE_BOUNDS[1])
        assert np.isnan(self.penalty[self.free]).all() and not np.isnan(self.penalty[used]).any()
        assert (np.isinf(self.blocked_until[used]) & (self.blocked_until[used] > 0) == ~self.alive[used]).all()
        assert np.isfinite(self.rate[used]).all() and (self.rate[used] >= RATE_BOUNDS[0]).all()
        assert ((self.calibration[used] >= 0) & (self.calibration[used] <= 1)).all()


def _middle(values: Floats) -> float:
    """The median; of an even number the upper one. A fifth of the time of NumPy's own."""
    half = len(values) // 2
    return float(np.partition(values, half)[half])


def bounded(value: object, default: float, low: float, high: float) -> float:
    """`value` if it is a number, within bounds; else `default`. What another process says is not to be trusted."""
    number: float
    if type(value) is int or type(value) is float:
        number = value
    else:
        return default
    if number != number:
        return default
    return float(min(max(number, low), high))
