"""A model that sleeps: out of memory when idle, back for whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.base import BackendStartError
from backends.fake import FakeBackend, FakeSettings
from deployments.llama_server.sleep import SleepingPool
from protocols.calls import GetAllStats, GetCard, GetSlots
from protocols.errors import Unavailable
from protocols.llamacpp_native import questions
from tests.deployments.support import request


class Made:
    """The backends that a pool has made, in order."""

    def __init__(self) -> None:
        self.backends: list[FakeBackend] = []
        self.error: BackendStartError | None = None

    def __call__(self) -> FakeBackend:
        if self.error is not None:
            raise self.error
        self.backends.append(FakeBackend(FakeSettings(slots=1, tokens=3)))
        return self.backends[-1]


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
async def pool(made: Made) -> AsyncIterator[SleepingPool]:
    pool = SleepingPool(made, "m", 4, idle_s=0.001)
    await pool.start()
    yield pool
    await pool.aclose()


async def is_asleep(pool: SleepingPool) -> bool:
    return (await pool.call(GetCard("r", "m"))).asleep


async def falls_asleep(pool: SleepingPool) -> None:
    while not await is_asleep(pool):
        await asyncio.sleep(0.001)


async def test_it_sleeps_when_nobody_asks_and_wakes_for_a_request(pool: SleepingPool, made: Made) -> None:
    await falls_asleep(pool)
    assert len(made.backends) == 1
    frames = [frame async for frame in pool.stream(request("m"))]
    assert sum(len(frame.tokens) for frame in frames) == 3
    await falls_asleep(pool)
    await pool.call(GetSlots("r", "m"))
    assert len(made.backends) == 3


async def test_it_does_not_sleep_while_it_is_used(made: Made) -> None:
    pool = SleepingPool(made, "m", 4, idle_s=0)
    await pool.start()
    running = pool.stream(request("m"))
    await anext(running)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not await is_asleep(pool)
    used = len(made.backends)
    assert [frame async for frame in running]
    await falls_asleep(pool)
    assert len(made.backends) == used
    await pool.aclose()


async def test_several_that_ask_at_once_wake_it_once(pool: SleepingPool, made: Made) -> None:
    await falls_asleep(pool)
    await asyncio.gather(*(pool.call(GetSlots("r", "m")) for _ in range(5)))
    assert len(made.backends) == 2


async def test_a_card_is_read_in_its_sleep(pool: SleepingPool, made: Made) -> None:
    await falls_asleep(pool)
    ask = questions.props(b"", "r")
    assert b'"is_sleeping":true' in ask.render(await pool.call(GetCard("r", "m")), "m")
    assert len(made.backends) == 1


async def test_its_counts_are_read_in_its_sleep_and_go_on_behind_it(pool: SleepingPool, made: Made) -> None:
    await falls_asleep(pool)
    for generated in (3, 6):
        async for _ in pool.stream(request("m")):
            pass
        await falls_asleep(pool)
        (looked,) = await pool.call(GetAllStats("r", "m"))
        assert looked.stats.generated_tokens_total == generated
        assert (looked.stats.running, looked.stats.slots) == (0, 0)
        assert await is_asleep(pool), "looking wakes nobody"
    assert len(made.backends) == 3


async def test_one_that_cannot_wake_says_so_and_tries_again(pool: SleepingPool, made: Made) -> None:
    await falls_asleep(pool)
    made.error = BackendStartError("the file is gone")
    with pytest.raises(Unavailable, match="the file is gone"):
        await pool.call(GetSlots("r", "m"))
    made.error = None
    await pool.call(GetSlots("r", "m"))
    assert len(made.backends) == 2
