"""Who may go on to a model's replicas, and who waits, in one gateway. Mechanism only: what a place is, replicas say.

Serve gives a free replica to whichever waiting request looks next, and each looks more and more rarely: under load an
old request can lose to new ones again and again. So a gateway lets only as many requests pass as the replicas can run
and keeps the others in a line of its own: round robin between tenants, first come first served within one.

The line is bounded for each tenant, so that nobody fills it for the others. Past its bound a request is refused at
once, with the time after which a place is likely:

    retry_after = (waiting + 1) / rate        [seconds]     rate: places freed per second, of the last `RATE_PLACES`
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protocols.errors import Overloaded, Unavailable

FLOOR = 4
"""Places there always are: a model without a replica must see that somebody waits for it."""

RATE_PLACES = 32
RETRY_AFTER_S = (1.0, 60.0)
"""Bounds of what a refused client is told."""


class Line:
    """The requests of one model, of each tenant at most `max_waiting` that wait. Belongs to one event loop."""

    def __init__(self, model: str, max_waiting: int, clock: Callable[[], float], floor: int = FLOOR) -> None:
        self._model = model
        self._max_waiting = max_waiting
        self._clock = clock
        self._floor = floor
        self._capacity = floor
        self._inside = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns
        self._freed_at: deque[float] = deque(maxlen=RATE_PLACES)

    @property
    def waiting(self) -> int:
        return sum(len(futures) for futures in self._waiting.values())

    @property
    def inside(self) -> int:
        return self._inside

    def set_capacity(self, capacity: int) -> None:
        """How many requests the replicas can take now, all together."""
        self._capacity = max(capacity, self._floor)
        self._let_in()

    def place(self, within_s: float, tenant: str = "") -> Place:
        """A place among those that may go on, for the block. `Overloaded` if the tenant's line is full.

        `Unavailable` if it takes longer than `within_s`.
        """
        return Place(self, within_s, tenant)

    async def enter(self, within_s: float, tenant: str) -> None:
        if self._inside < self._capacity and not self._waiting:
            self._inside += 1
            return
        try:
            async with asyncio.timeout(within_s):
                await self._wait(tenant)
        except TimeoutError:
            raise Unavailable(
                f"The model '{self._model}' had no place for this request within {within_s:g} seconds.",
                retry_after_s=self.retry_after_s(),
            ) from None

    async def _wait(self, tenant: str) -> None:
        own = len(self._waiting.get(tenant, ()))
        if own >= self._max_waiting:
            raise Overloaded(
                f"{own} requests are waiting for the model '{self._model}', as many as may wait. Try again shortly.",
                retry_after_s=self.retry_after_s(),
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()  # the place came, and nobody is there to take it
            else:
                self._forget(tenant, place)
            raise

    def leave(self) -> None:
        self._inside -= 1
        self._freed_at.append(self._clock())
        self._let_in()

    def retry_after_s(self) -> float:
        low, high = RETRY_AFTER_S
        if len(self._freed_at) < 2:
            return low
        span = self._clock() - self._freed_at[0]
        rate = len(self._freed_at) / span if span > 0 else float("inf")
        return min(max((self.waiting + 1) / rate, low), high)

    def check_integrity(self) -> None:
        """Raises `AssertionError` when somebody waits though there is a place, or a tenant has a turn for nothing."""
        assert self._inside >= 0, self._inside
        assert all(self._waiting.values()), self._waiting
        assert not self._waiting or self._inside >= self._capacity, (self.waiting, self._inside, self._capacity)

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._capacity:
            tenant, line = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            place = line.popleft()
            if line:
                self._waiting[tenant] = line  # behind the others
            self._inside += 1
            place.set_result(None)

    def _forget(self, tenant: str, place: asyncio.Future[None]) -> None:
        line = self._waiting[tenant]
        line.remove(place)
        if not line:
            del self._waiting[tenant]


class Place:
    """One that was taken. Not a generator: each stream holds one, and a generator takes 1 KB."""

    __slots__ = ("_line", "_tenant", "_within_s")

    def __init__(self, line: Line, within_s: float, tenant: str) -> None:
        self._line = line
        self._within_s = within_s
        self._tenant = tenant

    async def __aenter__(self) -> None:
        await self._line.enter(self._within_s, self._tenant)

    async def __aexit__(self, *_: object) -> None:
        self._line.leave()


class Lines:
    """One line for each model that was asked for."""

    def __init__(self, max_waiting: int, clock: Callable[[], float]) -> None:
        self._max_waiting = max_waiting
        self._clock = clock
        self._lines: dict[str, Line] = {}

    def of(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(model, self._max_waiting, self._clock)
        return line
