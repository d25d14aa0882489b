"""Awaitables that are begun at once: most of what could wait does not have to."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """`awaitable`, run to where it first waits, from wherever it is begun: a callback will do.

    If it is `done` by then, `value` is there. Otherwise the rest of it has to be awaited, once.
    """

    __slots__ = ("_rest", "_waits_for", "done", "value")

    value: T

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._rest = awaitable.__await__()
        self._waits_for: Any = None
        self.done = False
        try:
            self._waits_for = next(self._rest)
        except StopIteration as end:
            self.done, self.value = True, end.value

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            try:
                yield self._waits_for
                self.value = yield from self._rest
            finally:
                self._rest.close()
            self.done = True
        return self.value


async def finish(begun: Begun[T]) -> T:
    """The rest of it, as something a task can run."""
    return await begun
