"""Several streams of one request as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all `streams` as they come. The first error ends it; all are closed when it ends."""
    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for item in streams[0]:
                yield item
        return
    queue: asyncio.Queue[T | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        open_streams = len(tasks)
        while open_streams:
            got = await queue.get()
            if got is not None:
                yield got
                continue
            open_streams -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
