"""How much work this gateway has sent to each replica and not yet seen finished, in tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec

RESERVATION_S = 10.0
"""Seconds a choice counts before the replica has accepted it: longer than any handle call takes to be accepted."""


class _Lease(msgspec.Struct):
    replica: str
    tokens: int
    expires_at: float | None  # None: accepted, held until release


class TokenLoad:
    """In-flight tokens per replica, as leases keyed by request.

    A choice is reserved at once, so that requests routed in the same moment do not all pick the same replica. It
    becomes firm when the replica accepts and expires if that never happens. Serve reports completions from threads of
    its own, and a short request may complete before its acceptance is reported: hence the lock, and hence `accept`
    revives no lease that is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._tokens: dict[str, int] = {}

    def reserve(self, request: str, replica: str, tokens: int, now: float) -> None:
        with self._lock:
            self._drop(request)
            self._hold(request, replica, max(tokens, 1), now + RESERVATION_S)

    def accept(self, request: str, replica: str) -> None:
        with self._lock:
            tokens = self._drop(request)
            if tokens:
                self._hold(request, replica, tokens, None)

    def release(self, request: str) -> None:
        with self._lock:
            self._drop(request)

    def snapshot(self, now: float) -> dict[str, int]:
        """Tokens in flight of every replica that has any. Expired reservations are dropped first."""
        with self._lock:
            for request in [r for r, lease in self._leases.items() if (lease.expires_at or now) < now]:
                self._drop(request)
            return dict(self._tokens)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget the leases of replicas that are gone."""
        with self._lock:
            alive = set(replicas)
            for request in [r for r, lease in self._leases.items() if lease.replica not in alive]:
                self._drop(request)

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the sums and the leases disagree."""
        with self._lock:
            sums: dict[str, int] = {}
            for lease in self._leases.values():
                sums[lease.replica] = sums.get(lease.replica, 0) + lease.tokens
            assert sums == self._tokens, (sums, self._tokens)

    def _hold(self, request: str, replica: str, tokens: int, expires_at: float | None) -> None:
        self._leases[request] = _Lease(replica, tokens, expires_at)
        self._tokens[replica] = self._tokens.get(replica, 0) + tokens

    def _drop(self, request: str) -> int:
        """Ends the request's lease, if it has one, and says how many tokens it held."""
        lease = self._leases.pop(request, None)
        if lease is None:
            return 0
        left = self._tokens[lease.replica] - lease.tokens
        if left:
            self._tokens[lease.replica] = left
        else:
            del self._tokens[lease.replica]
        return lease.tokens
