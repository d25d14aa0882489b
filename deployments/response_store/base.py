"""The interface of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class StoreError(Exception):
    """The store cannot be used, or not for this record; the message is for the log."""


class ResponseStore(Protocol):
    """Records by id, each kept for a time after its last use; past a limit those that were not used longest go first.

    Every method may raise `StoreError`. None blocks the event loop.
    """

    async def put(self, id: str, record: bytes) -> None:
        """When it returns, every gateway that shares the store finds the record."""

    async def get(self, ids: Sequence[str]) -> Mapping[str, bytes]:
        """Those of `ids` that there are. It is a use of them."""
        ...

    async def delete(self, id: str) -> bool:
        """Whether there was such a record."""
        ...

    async def aclose(self) -> None: ...
