"""An engine that died or hangs ends its process; one that works, waits or idles does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from backends.base import BackendStats
from backends.fake import FakeBackend, FakeFault, FakeSettings
from deployments import watchdog
from deployments.watchdog import EXIT_CODE, Progress, watch
from tests.deployments.support import eventually, request

IDLE = BackendStats(slots=2, running=0, waiting=0)
BUSY = msgspec.structs.replace(IDLE, running=1, steps_total=5)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.005)


def test_an_idle_engine_never_stalls() -> None:
    progress = Progress(0)
    assert [progress.stalled_s(IDLE, now) for now in (1, 100, 1000)] == [0, 0, 0]


def test_an_engine_without_steps_stalls_from_the_last_one_on() -> None:
    progress = Progress(0)
    assert progress.stalled_s(BUSY, 10) == 0  # it was not seen with this many steps before
    assert progress.stalled_s(BUSY, 15) == 5
    assert progress.stalled_s(msgspec.structs.replace(BUSY, steps_total=6), 20) == 0


def test_waiting_alone_is_no_work() -> None:
    progress = Progress(0)
    waiting = msgspec.structs.replace(IDLE, waiting=3)
    assert [progress.stalled_s(waiting, now) for now in (1, 100)] == [0, 0]


@asynccontextmanager
async def watched(backend: FakeBackend, stall_timeout_s: float) -> AsyncIterator[list[int]]:
    ends: list[int] = []
    task = asyncio.create_task(watch(backend, lambda: stall_timeout_s, ends.append))
    yield ends
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_engine_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend(FakeSettings())
    await backend.start()
    async with watched(backend, 1000) as ends:
        await asyncio.sleep(0.03)
        assert ends == []
        await backend.aclose()
        await eventually(lambda: ends)
        assert ends == [EXIT_CODE]
    assert "the engine cannot serve any more" in caplog.text


async def test_an_engine_that_hangs_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend(FakeSettings(fail_at=FakeFault(after_tokens=2, action="hang")))
    await backend.start()
    async with watched(backend, 0.05) as ends:
        frames = backend.generate(request())
        async for frame in frames:
            if frame.tokens:
                break
        await eventually(lambda: ends)
        assert ends == [EXIT_CODE]
        await frames.aclose()
    await backend.aclose()
    assert "has not moved" in caplog.text
