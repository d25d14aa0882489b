"""What an engine has made, until its reader takes it."""

from __future__ import annotations

import asyncio

import pytest

from backends.mailbox import Mailbox


async def test_what_was_put_is_got_in_its_order() -> None:
    box: Mailbox[int] = Mailbox()
    for number in range(5):
        box.put(number)
    assert [await box.get() for _ in range(5)] == list(range(5))


async def test_who_waits_is_woken_once_there_is_something() -> None:
    box: Mailbox[str] = Mailbox()
    waiting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.put("a")
    box.put("b")
    assert await waiting == "a"
    assert await box.get() == "b"


async def test_a_reader_that_gives_up_loses_nothing() -> None:
    box: Mailbox[str] = Mailbox()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await box.get()
    box.put("a")
    cancelled = asyncio.create_task(box.get())
    waiting = asyncio.create_task(box.get())
    cancelled.cancel()
    assert await waiting == "a"


async def test_a_reader_that_is_cancelled_as_it_is_woken_loses_nothing() -> None:
    box: Mailbox[str] = Mailbox()
    reader = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put("a")
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await box.get() == "a"
