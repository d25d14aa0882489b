"""What the statistics say of the queue and of the prompt cache: routing depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.llamacpp.settings import LlamaCppSettings
from protocols.events import Progress
from protocols.request import Request, SlotOptions, TextPrompt
from tests.backends.contract import answer, until
from tests.backends.llamacpp.helpers import greedy, watched

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

STORY = "The old mill stands by the river, and nobody has been there for years. " * 6
OTHER = "A ship came into the harbour at night, without a light and without a sound. " * 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=2, context_length=512, batch_size=32))
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(shared: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCppBackend]:
    async with watched(shared, monkeypatch) as backend:
        yield backend
    assert shared.stats().uncached_tokens_queued == 0


def text(prompt: str, max_tokens: int = 2, **fields: object) -> Request:
    return greedy(TextPrompt(prompt), max_tokens, **fields)


async def test_those_who_wait_count_by_what_is_new_to_them(backend: LlamaCppBackend) -> None:
    running = [backend.generate(text(prompt, 200)) for prompt in (STORY, "Hi")]
    for stream in running:
        async for frame in stream:
            if frame.tokens:
                break
    assert backend.stats().uncached_tokens_queued == 0
    story, other = [await backend.count_tokens(text(prompt)) for prompt in (STORY, OTHER)]
    new = [
        (text(STORY), 1),  # its last token is always computed again
        (text(OTHER), other),
        (text(OTHER), 1),  # the one before it is going to compute the rest
        (text(STORY, slot=SlotOptions(reuse=False)), story),
        (text(OTHER, n=2), 1),  # a prompt counts once
    ]
    tasks, total, waiting = [], 0, 0
    for request, tokens in new:
        tasks.append(asyncio.create_task(answer(backend, request)))
        total += tokens
        waiting += request.n
        await until(backend, running=2, waiting=waiting, within_s=10)
        deadline = asyncio.get_running_loop().time() + 10
        while backend.stats().uncached_tokens_queued != total:  # all of it, until the engine has looked at it
            assert asyncio.get_running_loop().time() < deadline, (backend.stats(), total)
            await asyncio.sleep(0.002)
    for stream in running:
        await stream.aclose()
    await asyncio.gather(*tasks)


async def test_a_prompt_counts_until_it_is_computed(backend: LlamaCppBackend) -> None:
    total = await backend.count_tokens(text(STORY))
    left = [total]
    async for frame in backend.generate(text(STORY, 1)):
        if isinstance(frame.events[0], Progress):
            left.append(backend.stats().uncached_tokens_queued)
            assert left[-1] <= total - frame.events[0].processed
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


async def test_the_prompt_cache(backend: LlamaCppBackend) -> None:
    stats = backend.stats()
    assert (stats.prompt_cache_tokens, stats.prompt_cache_bytes) == (0, 0)
    first = await answer(backend, text(STORY, slot=SlotOptions(id=0)))
    await answer(backend, text(OTHER, slot=SlotOptions(id=0)))
    stats = backend.stats()
    assert stats.prompt_cache_tokens == first.completion.usage.prompt_tokens + 1
    assert stats.prompt_cache_bytes > 1000 * stats.prompt_cache_tokens
