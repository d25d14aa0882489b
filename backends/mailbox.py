"""What an engine has made for one request, until its only reader takes it."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from protocols.events import Frame
from protocols.sink import Sink, is_middle

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out, unbounded; of one event loop, on which it is made, and one reader.

    There is one for each stream, and something is put into it for each token: `asyncio.Queue` takes 3 KB, and twice
    as long.
    """

    __slots__ = ("_error", "_items", "_loop", "_sink", "_waiter")

    def __init__(self, sink: Sink | None = None) -> None:
        self._sink = sink
        self._items: list[T] = []
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()  # which asks the kernel for the process's id, every time
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """To the sink, if the reader waits and `item` is for it. Never raises."""
        waits = self._waiter is not None and not self._waiter.done()
        if waits and self._sink is not None and isinstance(item, Frame) and is_middle(item):
            try:
                if self._sink(item):
                    return
            except Exception as error:
                self._error = error
        self._items.append(item)
        if self._waiter is not None and waits:
            self._waiter.set_result(None)

    async def get(self) -> T:
        """Raises what the sink has raised."""
        while not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        return self._items.pop(0)
