"""What the HTTP side needs of whoever runs the models. `dispatch.py` satisfies it with Serve, `local.py` without."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from protocols.calls import AnswerT, Question
from protocols.errors import InvalidRequest, Unavailable
from protocols.events import Frame
from protocols.request import Reasoning, Request, Sampling
from protocols.sink import Sink


class NamedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that can be asked for as `<model>:<name>`: number `id` of its model, with `scale`."""

    name: str
    id: int
    scale: float = 1.0


class Offer(msgspec.Struct, frozen=True):
    """What a model's config says to those who ask it. `reasoning` and `sampling` apply where a request says nothing."""

    aliases: tuple[str, ...] = ()
    adapters: tuple[NamedAdapter, ...] = ()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    reasoning: Reasoning = Reasoning()


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that can be asked for. `created` is when it was deployed, in Unix seconds.

    One that is not `ready` is being loaded; requests for it wait. `of` is the model that it is another name of, or a
    part of; "" for one in its own right. `aliases` are all names that are shown with it, `tags` words about it.
    `replicas` are running, and `starting` more are to come; one that is ready and has none sleeps.
    """

    id: str
    created: int
    ready: bool = True
    offer: Offer = Offer()
    of: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    replicas: int = 1
    starting: int = 0


def the_only_model(pool: ModelPool) -> str:
    """For whoever names none. Raises `InvalidRequest`, naming what there is, where that leaves a choice."""
    ids = [entry.id for entry in pool.models() if not entry.of]
    if not ids:
        raise Unavailable("There is no model here yet.", retry_after_s=1.0)
    if len(ids) > 1:
        raise InvalidRequest(f"Say in 'model' which one is asked: {', '.join(ids)}.", param="model")
    return ids[0]


class ModelPool(Protocol):
    def models(self) -> Sequence[ModelEntry]:
        """All models, in order of their ids. Never waits and never wakes one."""

    def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        """The request's frames, in legal order, ending with the last `Finished`. Raises `ServingError`, at any point.

        Closing the generator cancels the request wherever it is. `sink` may get frames in its reader's stead.
        """

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        """The answer to one of `protocols.calls.ModelCall`. Raises `ServingError`.

        Cancelling it cancels the call wherever it is.
        """
        ...
