"""Where the engine thread and the event loop meet: what a request has produced, on its way to whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from backends.llamacpp.bindings import Tokens
from backends.llamacpp.sequence import Generation
from backends.mailbox import Mailbox
from backends.pooling import Matrix
from protocols.errors import ServingError
from protocols.events import Frame
from protocols.sink import Sink

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Receiver(Protocol[T_contra]):
    """One request, seen from the event loop."""

    def receive(self, item: T_contra | ServingError) -> None:
        """Takes what the engine made, on the event loop. After an error nothing more comes."""
        ...


class Stream:
    """One generation: the frames it has produced, then an error if it failed."""

    def __init__(self, generation: Generation, sink: Sink | None = None) -> None:
        self.generation = generation
        self.items: Mailbox[Frame | ServingError] = Mailbox(sink)

    def receive(self, item: Frame | ServingError) -> None:
        self.items.put(item)


class Call:
    """One request for vectors: a matrix for each of `inputs`, all of them together. Made on the event loop."""

    def __init__(self, inputs: Sequence[Tokens], normalize: int) -> None:
        self.inputs = inputs
        self.normalize = normalize
        self.tokens = sum(len(tokens) for tokens in inputs)
        self.answer: asyncio.Future[list[Matrix]] = asyncio.get_running_loop().create_future()

    def receive(self, item: list[Matrix] | ServingError) -> None:
        if self.answer.done():  # whoever waited has gone
            return
        if isinstance(item, ServingError):
            self.answer.set_exception(item)
        else:
            self.answer.set_result(item)


class Result(msgspec.Struct, Generic[T], frozen=True):
    stream: Receiver[T]
    item: T | ServingError
    last: bool
