"""How long each replica will be busy with prompts, as a clock per replica that work sets forward and time catches up.

    busy until B(replica);  a request of s seconds: B = max(B, now) + s;  the wait there: max(0, B - now)

The clock drains by itself, so it is right on average even where nobody ever reports that a request is over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESERVATION_S: Final = 10.0
"""Seconds a choice counts before the replica has accepted it: longer than any handle call takes to be accepted."""
LEASE_S: Final = 3600.0
"""Seconds an accepted request is remembered if its end is never reported."""
TYPICAL_REQUEST_S: Final = 5.0
_SMOOTH: Final = 0.05


class _Lease(msgspec.Struct, eq=False, gc=False):
    slot: int
    seconds: float
    at: float  # when it was charged
    ends: float  # where its work ends on the replica's clock
    expires_at: float
    accepted: bool = False


class Load:
    """Work this gateway has sent to each replica, by slot, as leases keyed by request.

    A choice is charged at once, so that requests routed in the same moment do not all pick the same replica. It
    becomes firm when the replica accepts and is undone if that never happens. Serve reports completions from threads
    of its own, and a short request may complete before its acceptance is reported: hence the lock, and hence `accept`
    revives no lease that is gone. `now` is of one clock that only goes forward.
    """

    def __init__(self, slots: int = 8) -> None:
        self._lock = threading.Lock()
        self._busy_until: Floats = np.zeros(slots)
        self._counts = np.zeros(slots)
        self._leases: list[dict[str, _Lease]] = [{} for _ in range(slots)]
        # Of those the ones whose work may still be ahead, in the order of their work: few, however many are running.
        self._ahead: list[list[_Lease]] = [[] for _ in range(slots)]
        # All leases, in the order in which they expire.
        self._chosen: OrderedDict[str, _Lease] = OrderedDict()
        self._accepted: OrderedDict[str, _Lease] = OrderedDict()
        self._request_s = TYPICAL_REQUEST_S

    @property
    def request_s(self) -> float:
        """Seconds from a request's choice to its end, lately."""
        return self._request_s

    def grow(self, slots: int) -> None:
        with self._lock:
            more = slots - len(self._leases)
            if more > 0:
                self._busy_until = np.concatenate((self._busy_until, np.zeros(more)))
                self._counts = np.concatenate((self._counts, np.zeros(more)))
                self._leases.extend({} for _ in range(more))
                self._ahead.extend([] for _ in range(more))

    def reserve(self, request: str, slot: int, seconds: float, now: float) -> None:
        with self._lock:
            self._expire(now)
            self._drop(request, now)
            self._hold(request, slot, max(seconds, 0.0), now)

    def accept(self, request: str, slot: int, now: float) -> None:
        """It was taken by the replica in `slot`, chosen or not."""
        with self._lock:
            lease = self._chosen.get(request) or self._accepted.get(request)
            if lease is None:
                return
            if lease.slot != slot:
                at = lease.at
                self._drop(request, now)
                lease = self._hold(request, slot, lease.seconds, now)
                lease.at = at
            self._chosen.pop(request, None)
            lease.accepted = True
            lease.expires_at = now + LEASE_S
            self._accepted[request] = lease
            self._accepted.move_to_end(request)

    def release(self, request: str, now: float) -> None:
        """It is over. What it had not used of its time is given back to those behind it."""
        with self._lock:
            lease = self._drop(request, now)
            if lease is not None and lease.accepted:
                self._request_s += _SMOOTH * (max(now - lease.at, 0.0) - self._request_s)

    def observe(self, slot: int, seconds: float, measured_at: float) -> None:
        """The replica itself says it had this much to do at `measured_at`; what was sent later comes on top."""
        with self._lock:
            busy_until = measured_at + max(seconds, 0.0)
            ahead = self._ahead[slot]
            if ahead:
                for lease in ahead:
                    if lease.at > measured_at:
                        busy_until += lease.seconds
                        lease.ends = busy_until
                    elif lease.ends > busy_until:
                        lease.ends = busy_until
                self._ahead[slot] = [lease for lease in ahead if lease.ends > measured_at]
            self._busy_until[slot] = busy_until

    def waits(self, now: float) -> Floats:
        """Seconds until each replica has done what it has, by slot. A copy."""
        with self._lock:
            self._expire(now)
            waits: Floats = self._busy_until - now
        np.maximum(waits, 0.0, out=waits)
        return waits

    def wait(self, slot: int, now: float) -> float:
        """Of one slot; call `waits` first: that is where leases expire."""
        return max(self._busy_until.item(slot) - now, 0.0)

    def counts(self) -> Floats:
        """Requests of this gateway at each replica, by slot. A copy."""
        with self._lock:
            return self._counts.copy()

    def count(self, slot: int) -> float:
        return self._counts.item(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """The replicas in these slots are gone, with all they had to do."""
        with self._lock:
            for slot in slots:
                for request in self._leases[slot]:
                    self._chosen.pop(request, None)
                    self._accepted.pop(request, None)
                self._leases[slot] = {}
                self._ahead[slot] = []
                self._busy_until[slot] = self._counts[slot] = 0.0

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the leases, their order and the clocks disagree."""
        with self._lock:
            leases = {request: lease for held in self._leases for request, lease in held.items()}
            assert not self._chosen.keys() & self._accepted.keys()
            assert leases == {**self._chosen, **self._accepted}, (leases, self._chosen, self._accepted)
            assert all(lease.accepted for lease in self._accepted.values())
            assert not any(lease.accepted for lease in self._chosen.values())
            for slot, held in enumerate(self._leases):
                assert len(held) == self._counts[slot]
                assert all(lease.slot == slot for lease in held.values())
                ahead = self._ahead[slot]
                assert len(set(map(id, ahead))) == len(ahead)
                assert set(map(id, ahead)) <= set(map(id, held.values()))
                for lease in ahead:
                    assert lease.ends <= self._busy_until[slot] + 1e-6, (lease, self._busy_until[slot])

    def _hold(self, request: str, slot: int, seconds: float, now: float) -> _Lease:
        ends = max(self._busy_until.item(slot), now) + seconds
        lease = self._leases[slot][request] = self._chosen[request] = _Lease(
            slot, seconds, now, ends, now + RESERVATION_S
        )
        self._ahead[slot].append(lease)
        self._counts[slot] += 1
        self._busy_until[slot] = ends
        return lease

    def _drop(self, request: str, now: float) -> _Lease | None:
        lease = self._chosen.pop(request, None) or self._accepted.pop(request, None)
        if lease is None:
            return None
        slot = lease.slot
        del self._leases[slot][request]
        self._counts[slot] -= 1
        ahead = self._ahead[slot]
        unused = min(max(lease.ends - now, 0.0), lease.seconds)
        if unused:
            latest = self._busy_until.item(slot) - unused
            self._busy_until[slot] = latest
            behind = False
            for other in ahead:
                if behind:
                    other.ends -= unused
                other.ends = min(other.ends, latest)
                behind = behind or other is lease
        self._ahead[slot] = [other for other in ahead if other.ends > now and other is not lease]
        return lease

    def _expire(self, now: float) -> None:
        for leases in (self._chosen, self._accepted):
            while leases:
                request = next(iter(leases))
                if leases[request].expires_at >= now:
                    break
                self._drop(request, now)
