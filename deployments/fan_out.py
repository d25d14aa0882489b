"""A call of several requests as one stream: they run side by side, and their choices are counted through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from protocols.codec import Call
from protocols.events import Frame
from protocols.request import Request

Run = Callable[[Request], AsyncGenerator[Frame, None]]

AT_ONCE = 16
"""Requests of one call that run at a time: one client with many prompts is not to fill a model's queue alone."""

_AHEAD = 16
"""Frames that may wait for a client that reads slowly, before the requests wait as well."""


def stream(run: Run, call: Call[Any]) -> AsyncGenerator[Frame, None]:
    """The frames of all requests of `call`. The first error of any of them is raised, and ends the others.

    Closing the generator cancels them all.
    """
    return run(call.request) if len(call.requests) == 1 else _side_by_side(run, call.requests)


async def _side_by_side(run: Run, requests: Sequence[Request]) -> AsyncGenerator[Frame, None]:
    frames: asyncio.Queue[Frame | Exception | None] = asyncio.Queue(_AHEAD)
    places = asyncio.Semaphore(AT_ONCE)

    async def run_one(request: Request, first_choice: int) -> None:
        async with places, aclosing(run(request)) as own:
            async for frame in own:
                await frames.put(_moved(frame, first_choice) if first_choice else frame)

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                first_choice = 0
                for request in requests:
                    group.create_task(run_one(request, first_choice))
                    first_choice += request.n
        except ExceptionGroup as errors:
            await frames.put(errors.exceptions[0])
        else:
            await frames.put(None)

    running = asyncio.get_running_loop().create_task(run_all())
    try:
        while (item := await frames.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _moved(frame: Frame, by: int) -> Frame:
    events = tuple(msgspec.structs.replace(event, choice=event.choice + by) for event in frame.events)
    return Frame(events, frame.tokens, frame.choice + by)
