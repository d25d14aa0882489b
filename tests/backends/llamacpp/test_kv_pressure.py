"""More requests than the KV cache has room for, longer ones than the context, and everything at once."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import ContextOverflow
from protocols.events import Finished
from protocols.request import Request, Sampling, SlotOptions, TextPrompt
from tests.backends.contract import Answer, answer, until
from tests.backends.llamacpp import helpers
from tests.backends.llamacpp.helpers import check_every_step, check_near_ties, greedy, parts

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import NO_KV_SPACE, Batch
from backends.llamacpp.runner import Runner

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 256
STORY = "The old mill stands by the river, and nobody has been there for years. "


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_step(monkeypatch)


def started(demo_model: str, **settings: Any) -> AbstractAsyncContextManager[LlamaCppBackend]:
    values = {"slots": 4, "context_length": CONTEXT, "unified_kv": True, "batch_size": 64} | settings
    return helpers.started(demo_model, **values)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tickets of paused tasks."""
    seen: list[int] = []
    pause = Runner._pause_youngest

    def counted(self: Runner) -> None:
        before = set(self._paused)
        pause(self)
        seen.extend(task.ticket for task in set(self._paused) - before)

    monkeypatch.setattr(Runner, "_pause_youngest", counted)
    return seen


# --- room -------------------------------------------------------------------------------------------------------------


async def test_the_size_of_the_cache_must_make_sense() -> None:
    with pytest.raises(ValidationError, match="kv_size needs unified_kv"):
        LlamaCppSettings(model="m", kv_size=4096)
    with pytest.raises(ValidationError, match="no room for one request of context_length 4096"):
        LlamaCppSettings(model="m", kv_size=2048, unified_kv=True)


async def test_a_crowd_that_does_not_fit_takes_turns(demo_model: str, pauses: list[int]) -> None:
    """Four times about 120 tokens in a cache of 256: all get to their end, nobody hears of it."""
    async with started(demo_model, kv_size=256) as backend:
        assert backend.stats().kv_tokens_capacity == 256
        requests = [greedy(TextPrompt(f"{i} {STORY}"), 100) for i in range(4)]
        answers = await asyncio.gather(*(answer(backend, request) for request in requests))
        assert [len(got.tokens) for got in answers] == [100] * 4
        assert pauses
        assert 0 not in pauses, "the oldest is never the one to wait"
        model = backend._loaded.model  # type: ignore[union-attr]
        for got in answers:
            assert got.choice.text == b"".join(map(model.piece, got.tokens)).decode("utf-8", "replace")
        alone = [await answer(backend, request) for request in requests]
        for request, one, other in zip(requests, answers, alone, strict=True):
            await check_near_ties(backend, request, one, other)


@pytest.mark.parametrize("cache", [0, 64])
async def test_a_paused_prompt_starts_again_where_it_was(demo_model: str, pauses: list[int], cache: int) -> None:
    async with started(demo_model, kv_size=256, slots=2, prompt_cache_mib=cache, prefix_sharing=False) as backend:
        first = asyncio.create_task(answer(backend, greedy(TextPrompt(STORY), 120)))
        await until(backend, running=1, within_s=10)
        second = await answer(backend, greedy(TextPrompt("Once" + STORY * 5), 60))
        assert len(second.tokens) == 60
        assert len((await first).tokens) == 120


async def test_cancelling_a_paused_request(demo_model: str, pauses: list[int]) -> None:
    async with started(demo_model, kv_size=256, slots=2) as backend:
        oldest = backend.generate(greedy(TextPrompt("1"), 240))
        await anext(oldest)
        youngest = asyncio.create_task(answer(backend, greedy(TextPrompt("2"), 240)))
        while not pauses:
            await anext(oldest)
        await until(backend, running=1, waiting=1, within_s=10)
        youngest.cancel()
        await until(backend, running=1, within_s=10)
        tokens = sum([len(frame.tokens) async for frame in oldest])
        assert tokens > 0


async def test_idle_conversations_go_to_the_prompt_cache_first(demo_model: str, pauses: list[int]) -> None:
    async with started(demo_model, kv_size=256) as backend:
        runner, _ = parts(backend)
        first = greedy(TextPrompt("Once " + STORY * 5), 40)
        await answer(backend, first)
        await answer(backend, greedy(TextPrompt("Then " + STORY * 6), 40))
        assert not pauses
        assert runner.kv.prompts is not None
        assert len(runner.kv.prompts) == 1
        again = await answer(backend, first)
        assert again.completion.usage.cached_tokens == again.completion.usage.prompt_tokens - 1


async def test_what_never_fits_is_refused_alone(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(demo_model) as backend:
        _, context = parts(backend)
        decode = context.decode
        poison = 4242

        def refuse(batch: Batch) -> int:
            return NO_KV_SPACE if poison in batch._token[: batch.size] else decode(batch)

        monkeypatch.setattr(context, "decode", refuse)
        bad = greedy(TextPrompt("x"), 4)
        prompt = await backend._tokens(bad)
        model = backend._loaded.model  # type: ignore[union-attr]
        text = model.piece(poison).decode()
        bad = greedy(TextPrompt(f"x{text}"), 4)
        assert poison in await backend._tokens(bad)
        good = [asyncio.create_task(answer(backend, greedy(TextPrompt(f"{i} is"), 8))) for i in range(2)]
        with pytest.raises(ContextOverflow) as caught:
            await answer(backend, bad)
        assert set(caught.value.details) == {"n_prompt_tokens", "n_ctx"}
        assert [len((await task).tokens) for task in good] == [8, 8]
        assert len(prompt) == 1


# --- context shift ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [False, True])
async def test_a_full_context_goes_on_when_asked(demo_model: str, unified: bool) -> None:
    async with started(demo_model, unified_kv=unified, slots=2) as backend:
        prompt = TextPrompt(STORY * 6)
        stops = await answer(backend, greedy(prompt, 250))
        assert (stops.choice.reason, stops.completion.usage.completion_tokens) == ("length", CONTEXT - 97)
        goes_on = await answer(backend, greedy(prompt, 250, slot=SlotOptions(shift=True, keep=10)))
        assert goes_on.completion.usage.completion_tokens == 250
        runner, _ = parts(backend)
        shifted = [slot for slot in runner.kv.slots if slot.exact < slot.capacity]
        assert [slot.exact for slot in shifted] == [10]
        again = await answer(backend, greedy(prompt, 2, slot=SlotOptions(id=shifted[0].id, reuse=True)))
        assert len(again.tokens) == 2


async def test_an_answer_that_lost_tokens_says_so(demo_model: str) -> None:
    """Also one that was resumed behind the place where they were dropped, and one that has just filled the context."""

    def end(got: Answer) -> tuple[str, bool]:
        last = got.frames[-1].events[-1]
        assert isinstance(last, Finished)
        return last.reason, last.truncated

    async with started(demo_model, context_shift=True, unified_kv=False, slots=1) as backend:
        prompt = TextPrompt(STORY)
        fits = await answer(backend, greedy(prompt, 20))
        assert end(fits) == ("length", False)
        shifted = await answer(backend, greedy(prompt, 300))
        assert end(shifted) == ("length", True)
        resumed = [f async for f in backend.generate(greedy(prompt, 310, resume=shifted.tokens))]
        last = resumed[-1].events[-1]
        assert isinstance(last, Finished) and last.truncated
        full = await answer(backend, greedy(prompt, 300, slot=SlotOptions(shift=False)))
        assert end(full) == ("length", True)


async def test_the_models_setting_and_the_requests_wish(demo_model: str) -> None:
    async with started(demo_model, context_shift=True, unified_kv=False, slots=2) as backend:
        on = await answer(backend, greedy(TextPrompt(STORY), 300))
        assert len(on.tokens) == 300
        off = await answer(backend, greedy(TextPrompt(STORY), 300, slot=SlotOptions(shift=False)))
        assert len(off.tokens) < CONTEXT
        resumed = greedy(TextPrompt(STORY), 310, resume=on.tokens)
        assert len((await answer(backend, resumed)).tokens) == 10


async def test_a_shift_leaves_those_who_share_the_tokens_alone(demo_model: str) -> None:
    """In a cache that all slots share, the moved tokens may be another request's too: they are computed anew."""
    async with started(demo_model, slots=3, prompt_cache_mib=0) as backend:
        prompt = TextPrompt(STORY * 10)
        whole = await answer(backend, greedy(prompt, 60))
        requests = [greedy(prompt, 200, slot=SlotOptions(shift=True, discard=40)), greedy(prompt, 60)]
        shifted, other = await asyncio.gather(*(answer(backend, request) for request in requests))
        assert len(shifted.tokens) == 200
        await check_near_ties(backend, requests[1], whole, other)


# --- everything -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"unified_kv": False}, {"kv_size": 384}, {"kv_size": 384, "prompt_cache_mib": 1, "prefix_sharing": False}],
    ids=["split", "oversubscribed", "without sharing"],
)
async def test_two_hundred_requests_leave_nothing_behind(demo_model: str, settings: dict[str, Any]) -> None:
    rng = random.Random(5)
    count = 200 if "prefix_sharing" not in settings else 50
    systems = [STORY * 3, "A ship came into the harbour at night. " * 6, ""]

    def make(i: int) -> Request:
        text = systems[rng.randrange(3)] + " ".join(
            rng.choices(["one", "two", "sea", "fox", "7"], k=rng.randint(1, 30))
        )
        slot = SlotOptions(
            id=rng.choice([None, None, None, None, 2]),
            reuse=rng.random() > 0.1,
            shift=rng.random() < 0.1,
        )
        return greedy(
            TextPrompt(text),
            rng.choice([0, 1, 3, 8, 8, 20, 40]),
            n=rng.choice([1, 1, 1, 1, 1, 1, 2, 4]),
            stop=rng.choice([(), ("e",), ("\n", "the")]),
            sampling=Sampling(temperature=rng.choice([0.0, 1.0]), seed=i),
            ignore_eos=rng.random() < 0.8,
            slot=slot,
        )

    async def run(backend: LlamaCppBackend, request: Request, patience: int | None) -> int:
        if patience is None:
            got = await answer(backend, request)
            return got.completion.usage.completion_tokens
        stream = backend.generate(request)
        if patience:
            async for _ in stream:
                patience -= 1
                if not patience:
                    break
        await stream.aclose()
        return 0

    async with started(demo_model, **settings) as backend:
        jobs = []
        for i in range(count):
            patience = rng.choice([None, None, None, 0, 1, 2, 9])
            jobs.append(asyncio.create_task(run(backend, make(i), patience)))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.05)
            if rng.random() < 0.05:
                jobs[rng.randrange(len(jobs))].cancel()
        done = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 300)
        assert [error for error in done if isinstance(error, Exception)] == []
        assert sum(tokens for tokens in done if isinstance(tokens, int)) > count
        await until(backend, running=0, within_s=10)
        runner, context = parts(backend)
        assert runner.kv.slots.busy == 0
        for slot in runner.kv.slots:
            runner.kv.clear(slot)
        assert [context.length(slot.id) for slot in runner.kv.slots] == [0] * 4
        assert np.isfinite(backend.stats().prefill_tokens_per_s)
