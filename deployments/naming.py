"""Names of models: aliases, and adapters as models of their own; and what their configs add to requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from backends.fake import FakeSettings
from backends.llamacpp import settings as llamacpp
from backends.vllm import settings as vllm
from deployments.models import ModelEntry, ModelPool, NamedAdapter, Offer
from deployments.settings import ConfigError, ModelSettings, model_settings
from protocols.calls import AnswerT, CountTokens, Question
from protocols.events import Frame
from protocols.request import ChatPrompt, LoraScale, Reasoning, Request, Sampling
from protocols.sink import Sink


def offer(settings: ModelSettings) -> Offer:
    defaults = settings.defaults
    sampling = defaults.model_dump(exclude={"max_tokens", "reasoning"})
    return Offer(
        settings.aliases,
        tuple(_adapters(settings)),
        Sampling(**sampling),
        defaults.max_tokens,
        Reasoning(**defaults.reasoning.model_dump()),
    )


def offer_of(application: Mapping[str, Any]) -> Offer:
    """By an application's config. Of another version's, nothing."""
    try:
        return offer(model_settings(application))
    except ConfigError:
        return Offer()


def _adapters(settings: ModelSettings) -> Iterator[NamedAdapter]:
    backend = settings.backend
    if isinstance(backend, FakeSettings):
        for id, path in enumerate(backend.adapters):
            yield NamedAdapter(PurePosixPath(path).stem, id)
    else:
        adapters: Sequence[llamacpp.AdapterSettings | vllm.AdapterSettings] = backend.adapters
        for id, adapter in enumerate(adapters):
            yield NamedAdapter(adapter.label, id, adapter.scale or 1.0)


def names(model: str, offer: Offer) -> list[str]:
    """What `model` can be called besides its id."""
    return [*offer.aliases, *(f"{model}:{adapter.name}" for adapter in offer.adapters)]


def clashes(offers: Mapping[str, Offer]) -> list[tuple[str, str, str]]:
    """(model, name, whose it is) for each name of a model that is another's already, in the order of `offers`."""
    owners = {model: model for model in offers}
    found = []
    for model, offered in offers.items():
        for name in names(model, offered):
            if name in owners:
                found.append((model, name, owners[name]))
            owners.setdefault(name, model)
    return found


class NamedModels:
    """A `ModelPool` in which models answer to all their names, and requests have what their model's config adds."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def models(self) -> Sequence[ModelEntry]:
        entries = list(self._pool.models())
        taken = {entry.id for entry in entries}
        for entry in self._pool.models():
            for name in names(entry.id, entry.offer):
                if name not in taken:
                    entries.append(ModelEntry(name, entry.created, entry.ready, of=entry.id))
                    taken.add(name)
        return sorted(entries, key=lambda entry: entry.id)

    def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        return self._pool.stream(self._completed(request), sink)

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        found = self._find(call.model)
        changes: dict[str, Any] = {} if found is None else {"model": found[0].id}
        if isinstance(call, CountTokens):
            changes["request"] = self._completed(call.request)
        return await self._pool.call(msgspec.structs.replace(call, **changes))

    def _find(self, name: str) -> tuple[ModelEntry, NamedAdapter | None] | None:
        """An id before an alias of another model; None for a name that nobody has."""
        entries = self._pool.models()
        for entry in entries:
            if entry.id == name:
                return entry, None
        for entry in entries:
            if name in entry.offer.aliases:
                return entry, None
            for adapter in entry.offer.adapters:
                if name == f"{entry.id}:{adapter.name}":
                    return entry, adapter
        return None

    def _completed(self, request: Request) -> Request:
        found = self._find(request.model)
        if found is None:
            return request  # the pool knows how to say so
        entry, adapter = found
        completed = with_defaults(request, entry.offer)
        if adapter is not None and request.lora is None:
            completed = msgspec.structs.replace(completed, lora=(LoraScale(adapter.id, adapter.scale),))
        return completed if completed.model == entry.id else msgspec.structs.replace(completed, model=entry.id)


def with_defaults(request: Request, offer: Offer) -> Request:
    """`request` with `offer`'s values where it has none of its own."""
    if offer.sampling != Sampling():
        theirs, ours = (msgspec.structs.asdict(sampling) for sampling in (request.sampling, offer.sampling))
        merged = {name: ours[name] if value is None else value for name, value in theirs.items()}
        request = msgspec.structs.replace(request, sampling=Sampling(**merged))
    if request.max_tokens is None and offer.max_tokens is not None:
        request = msgspec.structs.replace(request, max_tokens=offer.max_tokens)
    prompt = request.prompt
    if isinstance(prompt, ChatPrompt) and prompt.reasoning == Reasoning() and offer.reasoning != Reasoning():
        prompt = msgspec.structs.replace(prompt, reasoning=offer.reasoning)
        request = msgspec.structs.replace(request, prompt=prompt)
    return request
