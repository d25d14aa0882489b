"""When requests are sent: by a clock, whatever the server does (open loop), or by so many clients (closed loop)."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator

import msgspec

from deployments.bench.client import Outcome, Server, ask, session


class Schedule(msgspec.Struct, frozen=True):
    """Of `rate` and `concurrency` one is set; the load ends with `requests` or after `duration_s`, what is first.

    With a rate (requests per second, Poisson arrivals) a request's time begins when it is due: what it waits because
    the ones before are slow is not lost from sight. `duration_s` is for sending; what runs then is waited for.
    """

    rate: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def more(self, sent: int, elapsed_s: float) -> bool:
        return (self.requests is None or sent < self.requests) and (
            self.duration_s is None or elapsed_s < self.duration_s
        )

    def due(self) -> Iterator[float]:
        """Seconds after the start at which the requests of an open loop are due."""
        assert self.rate is not None
        rng = random.Random(self.seed)
        at = 0.0
        for sent in itertools.count():
            if not self.more(sent, at):
                return
            yield at
            at += rng.expovariate(self.rate)


async def run(server: Server, schedule: Schedule, bodies: Iterator[bytes], done: Callable[[Outcome], None]) -> None:
    """`done` is called with each outcome as it comes. `bodies` must not end before the schedule does."""
    began = time.perf_counter()
    async with session(server) as http:

        async def one(body: bytes, due: float) -> None:
            done(await ask(http, server, body, began, due))

        async def client(numbers: Iterator[int]) -> None:
            while schedule.more(next(numbers), (now := time.perf_counter()) - began):
                await one(next(bodies), now)

        async with asyncio.TaskGroup() as group:
            if schedule.rate is None:
                numbers = itertools.count()
                for _ in range(schedule.concurrency or 1):
                    group.create_task(client(numbers))
            else:
                for at in schedule.due():
                    await asyncio.sleep(began + at - time.perf_counter())
                    group.create_task(one(next(bodies), began + at))
