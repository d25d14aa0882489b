"""A call of several requests as one stream: they run side by side, and their choices are counted through."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from protocols.codec import Call
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink


class Run(Protocol):
    """`ModelPool.stream`."""

    def __call__(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]: ...


AT_ONCE = 16
"""Requests of one call that run at a time: one client with many prompts is not to fill a model's queue alone."""

_AHEAD = 16
"""Frames that may wait for a client that reads slowly, before the requests wait as well."""


def stream(run: Run, call: Call[Any], sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
    """The frames of all requests of `call`, their choices counted through. Errors and closing as in `side_by_side`.

    With several requests nothing goes to `sink`.
    """
    if len(call.requests) == 1:
        return run(call.request, sink)
    firsts = itertools.accumulate((request.n for request in call.requests), initial=0)
    return side_by_side(
        [partial(_counted, run, request, first) for request, first in zip(call.requests, firsts, strict=False)]
    )


async def _counted(run: Run, request: Request, first_choice: int) -> AsyncGenerator[Frame, None]:
    async with aclosing(run(request)) as frames:
        async for frame in frames:
            yield _moved(frame, first_choice) if first_choice else frame


async def side_by_side(runs: Sequence[Callable[[], AsyncGenerator[Frame, None]]]) -> AsyncGenerator[Frame, None]:
    """The frames of all `runs`, as they come. The first error of any of them is raised, and ends the others.

    Closing the generator ends them all.
    """
    frames: asyncio.Queue[Frame | Exception | None] = asyncio.Queue(_AHEAD)
    places = asyncio.Semaphore(AT_ONCE)

    async def run_one(run: Callable[[], AsyncGenerator[Frame, None]]) -> None:
        async with places, aclosing(run()) as own:
            async for frame in own:
                await frames.put(frame)

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(run_one(run))
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
