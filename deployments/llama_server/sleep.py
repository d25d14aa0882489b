"""A model that leaves memory when nobody has used it for a while, and comes back for whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import cast

import msgspec

from backends.base import Backend, BackendStartError, BackendStats, ModelCard
from deployments.local import LocalPool
from deployments.models import ModelEntry
from protocols.calls import AnswerT, GetAllStats, GetCard, Question, ReplicaStats
from protocols.errors import Unavailable
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink

_TOTALS = [name for name in BackendStats.__struct_fields__ if name.endswith("_total")]


class SleepingPool:
    """The `ModelPool` of one model, asleep after `idle_s` seconds without a request.

    Its card and its counts are read in its sleep, and reading them keeps it from none.
    """

    def __init__(self, make: Callable[[], Backend], model: str, waiting_limit: int, idle_s: float) -> None:
        self._make = make
        self._model = model
        self._waiting_limit = waiting_limit
        self._idle_s = idle_s
        self._backend: Backend | None = None
        self._card: ModelCard | None = None
        self._past = BackendStats(0, 0, 0)
        self._pool: LocalPool | None = None
        self._changing = asyncio.Lock()
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._dozing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `BackendStartError`."""
        async with self._changing:
            await self._wake()
        self._watch()

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        async with self._changing:
            await self._unload()

    def models(self) -> Sequence[ModelEntry]:
        return [ModelEntry(self._model, 0)]

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        async with self._awake() as pool, aclosing(pool.stream(request, sink)) as frames:
            async for frame in frames:
                yield frame

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        if isinstance(call, GetCard) and self._card is not None:
            return cast(AnswerT, msgspec.structs.replace(self._card, asleep=self._pool is None))
        if isinstance(call, GetAllStats):
            return cast(AnswerT, [ReplicaStats(self._stats())])
        async with self._awake() as pool:
            return await pool.call(call)

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[LocalPool]:
        self._users += 1  # before it waits: whoever is about to put the model to sleep sees it
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with self._changing:
                try:
                    pool = self._pool or await self._wake()
                except BackendStartError as error:
                    raise Unavailable(f"The model cannot be loaded again: {error}") from error
            yield pool
        finally:
            self._users -= 1
            if not self._users:
                self._watch()

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._doze)

    def _doze(self) -> None:
        self._dozing = asyncio.get_running_loop().create_task(self._sleep())

    async def _wake(self) -> LocalPool:
        backend = self._make()
        self._card = await backend.start()
        self._backend = backend
        self._pool = LocalPool({self._model: backend}, {self._model: self._waiting_limit})
        return self._pool

    async def _sleep(self) -> None:
        async with self._changing:
            if not self._users:
                await self._unload()

    def _stats(self) -> BackendStats:
        """With what was counted before it slept; all else is that of nobody while it does."""
        if self._backend is None:
            return self._past
        now = self._backend.stats()
        sums = {name: getattr(now, name) + getattr(self._past, name) for name in _TOTALS}
        return msgspec.structs.replace(now, **sums)

    async def _unload(self) -> None:
        if self._backend is not None:
            stats = self._stats()
            self._past = BackendStats(0, 0, 0, **{name: getattr(stats, name) for name in _TOTALS})
            backend, self._backend, self._pool = self._backend, None, None
            await backend.aclose()
