"""Where the engine thread and the event loop meet: what a request has produced, on its way to whoever reads it."""

from __future__ import annotations

import asyncio

import msgspec

from backends.llamacpp.sequence import Generation
from protocols.errors import ServingError
from protocols.events import Frame


class Stream:
    """One request, seen from the event loop: the frames it has produced, then an error if it failed."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.items: asyncio.Queue[Frame | ServingError] = asyncio.Queue()


class Result(msgspec.Struct, frozen=True):
    stream: Stream
    item: Frame | ServingError
    last: bool
