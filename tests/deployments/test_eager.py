"""Awaitables that are begun outside of a task."""

from __future__ import annotations

import asyncio

from deployments.eager import Begun, finish
from tests.deployments.support import WITHIN_S, settle


async def test_what_need_not_wait_is_done() -> None:
    async def answer() -> int:
        return 7

    begun = Begun(answer())
    assert begun.done
    assert begun.value == 7
    assert await begun == 7


async def test_what_waits_is_brought_to_its_end_by_another_task() -> None:
    ready = asyncio.Event()

    async def answer() -> int:
        await ready.wait()
        await asyncio.sleep(0)
        return 7

    begun = Begun(answer())
    assert not begun.done
    task = asyncio.get_running_loop().create_task(finish(begun))
    await settle()
    ready.set()
    assert await asyncio.wait_for(task, WITHIN_S) == 7
    assert begun.value == 7


async def test_what_is_given_up_is_closed() -> None:
    closed = False

    async def answer() -> None:
        nonlocal closed
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed = True

    task = asyncio.get_running_loop().create_task(finish(Begun(answer())))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed
