"""What the HTTP side needs of whoever runs the models. `dispatch.py` satisfies it with Serve, `local.py` without."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from protocols.events import Frame
from protocols.request import Request


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that can be asked for. `created` is when it was deployed, in Unix seconds."""

    id: str
    created: int


class ModelPool(Protocol):
    def models(self) -> Sequence[ModelEntry]:
        """All models, in order of their ids. Never waits and never wakes one."""

    def stream(self, request: Request) -> AsyncGenerator[Frame, None]:
        """The request's frames, in legal order, ending with the last `Finished`. Raises `ServingError`, at any point.

        Closing the generator cancels the request wherever it is.
        """

    async def count_tokens(self, request: Request) -> int:
        """The prompt tokens `stream` would report for the same request, without generating. Raises `ServingError`."""
