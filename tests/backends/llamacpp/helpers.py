"""What the tests of the llama.cpp engine share: requests, and a look inside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from backends.llamacpp.settings import LlamaCppSettings
from protocols.request import Prompt, Request, Sampling
from tests.backends.contract import Answer, chat, until

if TYPE_CHECKING:
    from backends.llamacpp.backend import LlamaCppBackend
    from backends.llamacpp.bindings import Context
    from backends.llamacpp.runner import Runner


def greedy(prompt: Prompt | str, max_tokens: int | None = 16, **fields: Any) -> Request:
    prompt = chat(prompt) if isinstance(prompt, str) else prompt
    values = {"sampling": Sampling(temperature=0.0), "ignore_eos": True} | fields
    return msgspec.structs.replace(Request("test", "m", prompt, max_tokens=max_tokens), **values)


@asynccontextmanager
async def started(demo_model: str, **settings: Any) -> AsyncIterator[LlamaCppBackend]:
    """A backend of its own, which must be left idle and healthy."""
    from backends.llamacpp.backend import LlamaCppBackend

    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, **settings))
    await backend.start()
    yield backend
    await until(backend, running=0, within_s=10)
    assert backend.stats().kv_tokens_used == 0
    assert parts(backend)[0].idle
    await backend.check_health()
    await backend.aclose()


def parts(backend: LlamaCppBackend) -> tuple[Runner, Context]:
    """Of a model that generates."""
    assert backend._engine is not None
    assert backend._engine._runner is not None
    return backend._engine._runner, backend._engine._runner._context


def forget(backend: LlamaCppBackend) -> None:
    """What the slots and the prompt cache of an idle engine hold."""
    runner, _ = parts(backend)
    for slot in runner.kv.slots:
        runner.kv.clear(slot)
    assert runner.kv.prompts is not None
    runner.kv.prompts.clear()


@asynccontextmanager
async def watched(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCppBackend]:
    """Nothing remembered from other tests, and after every step the slots know what the KV cache really holds."""
    forget(backend)
    check_every_step(monkeypatch)
    yield backend
    await until(backend, running=0, within_s=10)
    await backend.check_health()


async def check_near_ties(backend: LlamaCppBackend, request: Request, one: Answer, other: Answer) -> None:
    """Answers computed in other steps may part where two candidates are as good as equal (docstring of `engine`)."""
    at = next((i for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return
    from backends.llamacpp.bindings import Batch

    runner, context = parts(backend)  # which is idle
    slot = runner.kv.slots[0]
    runner.kv.clear(slot)
    tokens = np.concatenate([await backend._tokens(request), np.array(one.tokens[:at], np.int32)])
    batch = Batch(context.batch_size)
    for start in range(0, len(tokens), batch.capacity):
        batch.clear()
        row = batch.add(tokens[start : start + batch.capacity], slot.id, start, logits=True)
        while context.decode(batch):
            assert runner.kv.evict(batch.size), "no room"
    logits = context.logits(row)
    gap = logits.max() - logits[[one.tokens[at], other.tokens[at]]].min()
    context.forget(slot.id)
    assert gap < 1.0, f"{one.tokens[at]} or {other.tokens[at]} after {at} tokens, {gap} apart"


def check_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step the books are right, and say what the KV cache really holds. A fault ends the engine."""
    from backends.llamacpp.runner import Runner

    step = Runner.step

    def checked(self: Runner) -> None:
        step(self)
        self.check_integrity()

    monkeypatch.setattr(Runner, "step", checked)
