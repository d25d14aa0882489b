"""What one key may do in a minute, and at a time, at one gateway.

Gateways share no state: behind several of them a key can have as many times its limits as there are gateways. A limit
that all of them keep together would cost every request a round trip to a store, and all of them with it when it is
down.
"""

from __future__ import annotations

from collections.abc import Callable

from deployments.keys import ApiKey
from protocols.errors import RateLimited

_MINUTE_S = 60.0
_RETRY_S = 1.0
"""After which a request that found its key's others running is told to come again."""


class Bucket:
    """An allowance that grows by `per_minute` a minute, and no further than one minute's worth.

    It may be overdrawn, and takes nothing more until it has grown out of it. So what is larger than a whole minute's
    worth waits until the bucket is full, and is paid for afterwards.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._at = clock()

    def set_rate(self, per_minute: float) -> None:
        """From now on. What was used of the old allowance is used of the new one as well."""
        used = self._per_minute - self._now()
        self._per_minute = per_minute
        self._level = per_minute - used

    def wait_s(self, amount: float) -> float:
        """The seconds until `amount` can be taken; 0 if it can be now."""
        missing = min(amount, self._per_minute) - self._now()
        # A hair below is enough: what has grown in n steps is not to the last bit what it would be in one.
        return missing * _MINUTE_S / self._per_minute if missing > 1e-6 else 0.0

    def take(self, amount: float) -> None:
        """A negative amount is given back."""
        self._level = min(self._now() - amount, self._per_minute)

    def _now(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self._per_minute / _MINUTE_S, self._per_minute)
        self._at = now
        return self._level


class Account:
    """What one key has used. Belongs to one event loop."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self._clock = clock
        self._requests = self._changed(None, key.requests_per_minute)
        self._tokens = self._changed(None, key.tokens_per_minute)
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    @property
    def counts_tokens(self) -> bool:
        return self._tokens is not None

    def update(self, key: ApiKey) -> None:
        """The key's entry in the file has changed."""
        self.key = key
        self._requests = self._changed(self._requests, key.requests_per_minute)
        self._tokens = self._changed(self._tokens, key.tokens_per_minute)

    def _changed(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return Bucket(per_minute, self._clock)
        bucket.set_rate(per_minute)
        return bucket

    def enter(self) -> None:
        """A request begins, and `leave` must follow. `RateLimited` if it may not."""
        limit = self.key.concurrent_requests
        if limit is not None and self._running >= limit:
            raise RateLimited(f"This key has {limit} requests at a time, and they are running.", retry_after_s=_RETRY_S)
        if self._requests is not None:
            self._admit(self._requests, 1, f"{self.key.requests_per_minute} requests per minute")
        self._running += 1

    def leave(self) -> None:
        self._running -= 1

    def charge(self, tokens: int) -> None:
        """For what is thought to be used. `RateLimited` if it may not be."""
        if self._tokens is not None:
            self._admit(self._tokens, tokens, f"{self.key.tokens_per_minute} tokens per minute")

    def settle(self, charged: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.take(used - charged)

    def _admit(self, bucket: Bucket, amount: int, limit: str) -> None:
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            raise RateLimited(f"This key has {limit}. Try again in {max(1, round(wait_s))} s.", retry_after_s=wait_s)
        bucket.take(amount)


class Accounts:
    """Those of all keys that were used. They outlive a change of the file, which forgives nobody anything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}

    def of(self, key: ApiKey) -> Account:
        account = self._accounts.get(key.id)
        if account is None:
            account = self._accounts[key.id] = Account(key, self._clock)
        elif account.key is not key:
            account.update(key)
        return account
