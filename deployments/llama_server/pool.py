"""One model under every name, with what the command line says of requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from deployments.llama_server.settings import Defaults
from deployments.models import ModelEntry, ModelPool
from protocols.calls import AnswerT, ApplyTemplate, CountTokens, GetSlots, Question
from protocols.card import ModelCard
from protocols.errors import NotSupported
from protocols.events import Frame
from protocols.request import ChatPrompt, Prompt, Reasoning, Request, Sampling
from protocols.sink import Sink


class OneModelPool:
    """A `ModelPool` over one of a single model, to which every request goes whatever model it names."""

    def __init__(self, pool: ModelPool, entry: ModelEntry, defaults: Defaults, *, show_slots: bool) -> None:
        self._pool = pool
        self._entry = entry
        self._defaults = defaults
        self._show_slots = show_slots

    def models(self) -> Sequence[ModelEntry]:
        return [self._entry]

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        async with aclosing(self._pool.stream(self._completed(request), sink)) as frames:
            async for frame in frames:
                yield frame

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        asked: Question[Any] = msgspec.structs.replace(call, model=self._entry.id)
        match asked:
            case GetSlots() if not self._show_slots:
                raise NotSupported("This server does not show its slots: start it with --slots")
            case ApplyTemplate():
                asked = msgspec.structs.replace(asked, prompt=self._thinking(asked.prompt))
            case CountTokens():
                asked = msgspec.structs.replace(asked, request=self._completed(asked.request))
        answer: AnswerT = await self._pool.call(asked)
        if isinstance(answer, ModelCard):
            return msgspec.structs.replace(answer, sampling=over(answer.sampling, self._defaults.sampling))
        return answer

    def _completed(self, request: Request) -> Request:
        defaults = self._defaults
        extras = request.extras
        return msgspec.structs.replace(
            request,
            model=self._entry.id,
            prompt=self._thinking(request.prompt),
            sampling=over(defaults.sampling, request.sampling),
            max_tokens=defaults.max_tokens if request.max_tokens is None else request.max_tokens,
            ignore_eos=request.ignore_eos or defaults.ignore_eos,
            extras=msgspec.structs.replace(extras, echo=extras.echo or defaults.echo),
        )

    def _thinking(self, prompt: Prompt) -> Prompt:
        if not isinstance(prompt, ChatPrompt):
            return prompt
        asked, defaults = prompt.reasoning, self._defaults
        reasoning = Reasoning(
            enabled=defaults.think if asked.enabled is None else asked.enabled,
            effort=asked.effort,
            budget_tokens=defaults.think_tokens if asked.budget_tokens is None else asked.budget_tokens,
        )
        return msgspec.structs.replace(prompt, reasoning=reasoning)


def over(below: Sampling, above: Sampling) -> Sampling:
    """`above`, and what it leaves open from `below`."""
    said = {name: value for name in above.__struct_fields__ if (value := getattr(above, name)) is not None}
    return msgspec.structs.replace(below, **said)
