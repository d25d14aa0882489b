"""Ends a replica's process when its engine can no longer serve, so that its requests move and Serve starts another.

Serve asks `check_health` every few seconds and believes only the third failure: for tens of seconds a dead engine
would be given requests. And an engine that hangs in the middle of a step is as healthy as ever to whoever asks. So the
replica looks itself. Ending the process is the one message that reaches everybody at once: the channel breaks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from backends.base import Backend, BackendStats

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h: an internal software error."""


class Progress:
    """Whether an engine that has work gets on with it. Work is what runs; requests that wait may wait for anything."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._mark: tuple[int, ...] = ()

    def stalled_s(self, stats: BackendStats, now: float) -> float:
        """Seconds for which nothing has moved though something runs; 0 while there is nothing to do."""
        mark = (
            stats.steps_total,
            stats.prompt_tokens_total,
            stats.generated_tokens_total,
            stats.uncached_tokens_queued,
        )
        if mark != self._mark or not stats.running:
            self._mark, self._since = mark, now
        return now - self._since


async def watch(
    backend: Backend, stall_timeout_s: Callable[[], float], end: Callable[[int], object] = os._exit
) -> None:
    """Looks at `backend` for as long as it is let. Calls `end` at most once, and returns then."""
    loop = asyncio.get_running_loop()
    progress = Progress(loop.time())
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            await backend.check_health()
        except Exception as error:
            # Whatever it is: a backend whose health cannot be told is not one to give requests to.
            logger.critical("the engine cannot serve any more (%s); this replica ends", error)
            end(EXIT_CODE)
            return
        stalled_s = progress.stalled_s(backend.stats(), loop.time())
        if stalled_s > stall_timeout_s():
            logger.critical("the engine has not moved for %.0f s though it has work; this replica ends", stalled_s)
            end(EXIT_CODE)
            return
