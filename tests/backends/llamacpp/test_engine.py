"""The engine on a real model: batching, reuse, cancellation, and one request's trouble staying its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from backends.base import BackendStartError
from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import ContextOverflow, InternalError, InvalidRequest, ServingError, Unavailable
from protocols.events import Progress, Started
from protocols.request import (
    ChatPrompt,
    ImagePart,
    Message,
    Request,
    Sampling,
    SlotOptions,
    TextPart,
    TextPrompt,
    TokenPrompt,
)
from tests.backends.contract import Answer, answer, until
from tests.backends.llamacpp.helpers import greedy, parts, watched

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import NO_KV_SPACE, Batch, Context, LlamaCppError, Model
from backends.llamacpp.sampler import Sampler, SamplerSpec

if TYPE_CHECKING:
    from backends.llamacpp.slots import Tokens

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 8
CONTEXT = 512
SUBJECTS = ["a fox", "the sea", "a clock", "winter", "a train", "bread", "the moon", "a garden"]
LONG = "The old mill stands by the river, and nobody has been there for years. "


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=SLOTS, context_length=CONTEXT))
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(shared: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCppBackend]:
    async with watched(shared, monkeypatch) as backend:
        yield backend


def story(subject: str, max_tokens: int = 32) -> Request:
    return greedy(f"Tell me a story about {subject}.", max_tokens)


async def at_once(backend: LlamaCppBackend, requests: list[Request]) -> list[Answer]:
    return list(await asyncio.gather(*(answer(backend, request) for request in requests)))


# --- batching ---------------------------------------------------------------------------------------------------------


async def test_eight_at_once_take_the_steps_of_one(backend: LlamaCppBackend) -> None:
    requests = [story(subject) for subject in SUBJECTS]
    start, before = time.monotonic(), backend.stats()
    for request in requests:
        await answer(backend, request)
    in_a_row, between = time.monotonic() - start, backend.stats()
    start = time.monotonic()
    await at_once(backend, requests)
    together, after = time.monotonic() - start, backend.stats()
    assert between.steps_total - before.steps_total == 8 * 32
    assert after.steps_total - between.steps_total <= 32 + 8
    assert together < in_a_row


async def test_the_same_steps_give_the_same_bits(model: Model) -> None:
    """What is guaranteed: each run computes three prompts together and then generates, in steps of the same shapes."""
    prompts = [
        model.tokenize(f"{LONG * 6}Tell me about {subject}.", add_special=False, parse_special=False)
        for subject in SUBJECTS[:3]
    ]
    context = Context(model, sequences=3, context_length=512, batch_size=512, micro_batch_size=512, threads=2)

    def run() -> tuple[list[list[int]], list[bytes]]:
        batch = Batch(512)
        rows = []
        for sequence, prompt in enumerate(prompts):
            context.forget(sequence)
            rows.append(batch.add(prompt, sequence, 0, logits=True))
        drawn: list[list[int]] = [[], [], []]
        seen = []
        for step in range(12):
            assert context.decode(batch) == 0
            logits = [context.logits(row) for row in rows]
            seen += [row.tobytes() for row in logits]
            for sequence, row in enumerate(logits):
                drawn[sequence].append(int(row.argmax()))
            batch.clear()
            rows = [batch.add([drawn[s][-1]], s, len(prompts[s]) + step, logits=True) for s in range(len(prompts))]
        return drawn, seen

    assert run() == run()
    context.close()


async def test_neighbours_only_ever_decide_between_near_ties(backend: LlamaCppBackend) -> None:
    """What is not guaranteed, and why it is no fault: see the docstring of `engine`."""
    requests = [greedy(f"{LONG * 8}Tell me about {subject}.", 24) for subject in SUBJECTS[:4]]
    together = await at_once(backend, requests)
    for request, met in zip(requests, together, strict=True):
        alone = await answer(backend, request)
        at = next((i for i, pair in enumerate(zip(alone.tokens, met.tokens, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        logits = _logits_after(backend, await backend._tokens(request), alone.tokens[:at])
        pair = logits[[alone.tokens[at], met.tokens[at]]]
        assert logits.max() - pair.min() < 1.0, f"{alone.tokens[at]} and {met.tokens[at]} after {at} tokens: {pair}"


def _logits_after(backend: LlamaCppBackend, prompt: Tokens, generated: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Computed apart from the engine, which is idle, in a sequence of its own."""
    _, context = parts(backend)
    batch = Batch(CONTEXT)
    row = batch.add(np.concatenate([prompt, np.array(generated, np.int32)]), SLOTS - 1, 0, logits=True)
    context.forget(SLOTS - 1)
    assert context.decode(batch) == 0
    logits = context.logits(row).copy()
    context.forget(SLOTS - 1)
    parts(backend)[0].kv.slots[SLOTS - 1].truncate(0)
    return logits


async def test_a_long_prompt_does_not_stop_those_who_generate(backend: LlamaCppBackend) -> None:
    generating = backend.generate(story("a fox", 200))
    async for frame in generating:
        if frame.tokens:
            break
    before = backend.stats()
    newcomer = asyncio.create_task(answer(backend, greedy(TextPrompt(LONG * 20), 1)))
    tokens = 0
    async for frame in generating:
        tokens += len(frame.tokens)
        if newcomer.done():
            break
    await generating.aclose()
    got = await newcomer
    progress = [event for frame in got.frames for event in frame.events if isinstance(event, Progress)]
    total = got.completion.usage.prompt_tokens
    assert len(progress) == -(-total // 128), "in chunks of prefill_chunk"
    assert [event.processed for event in progress] == [min(128 * i, total) for i in range(1, len(progress) + 1)]
    assert tokens >= len(progress)
    assert backend.stats().steps_total - before.steps_total >= len(progress)


# --- reuse of what is in the KV cache ---------------------------------------------------------------------------------


async def test_a_conversation_computes_only_what_is_new(backend: LlamaCppBackend) -> None:
    first = await answer(backend, greedy("Name a colour.", 8))
    again = await answer(backend, greedy("Name a colour.", 8))
    prompt_tokens = first.completion.usage.prompt_tokens
    assert first.completion.usage.cached_tokens == 0
    assert again.completion.usage.cached_tokens == prompt_tokens - 1
    turns = (
        Message("user", (TextPart("Name a colour."),)),
        Message("assistant", (TextPart(again.choice.text),)),
        Message("user", (TextPart("Another one."),)),
    )
    third = await answer(backend, greedy(ChatPrompt(turns), 4))
    start = third.frames[0].events[0]
    assert isinstance(start, Started)
    assert start.cached_tokens > prompt_tokens, "the answer is reused as well"
    timings = third.completion.timings
    assert timings is not None
    assert timings.prompt_n + timings.cache_n == third.completion.usage.prompt_tokens


async def test_a_sampled_answer_resumes_with_the_same_random_numbers(backend: LlamaCppBackend) -> None:
    request = greedy("Tell me about the sea.", 20, sampling=Sampling(temperature=1.2, seed=11, repeat_penalty=1.1))
    await answer(backend, request)
    whole = await answer(backend, request)
    rest = await answer(backend, msgspec.structs.replace(request, resume=whole.tokens[:9]))
    assert whole.tokens[:9] + rest.tokens == whole.tokens


# --- the end of a stream ----------------------------------------------------------------------------------------------


async def test_an_answer_ends_by_itself(backend: LlamaCppBackend) -> None:
    got = await answer(backend, greedy("What is 2 + 2? Answer with one number.", 200, ignore_eos=False))
    assert (got.choice.reason, got.choice.stop_sequence) == ("stop", None)
    assert got.tokens[-1] in backend._loaded.model.end_tokens  # type: ignore[union-attr]
    assert got.completion.usage.completion_tokens == len(got.tokens)
    assert "<|im_end|>" not in got.choice.text


async def test_a_budget_of_nothing(backend: LlamaCppBackend) -> None:
    got = await answer(backend, greedy("Hi", 0))
    assert (got.tokens, got.choice.text, got.choice.reason) == ((), "", "length")


async def test_without_max_tokens_the_context_is_the_limit(backend: LlamaCppBackend) -> None:
    got = await answer(backend, greedy(TextPrompt(LONG * 29), None))
    assert got.choice.reason == "length"
    assert got.completion.usage.prompt_tokens + got.completion.usage.completion_tokens == CONTEXT


# --- cancellation -----------------------------------------------------------------------------------------------------


async def test_closing_mid_stream_frees_the_slot_within_one_step(backend: LlamaCppBackend) -> None:
    leaving, staying = backend.generate(story("a fox", 300)), backend.generate(story("a clock", 300))
    await anext(staying)
    async for frame in leaving:
        if frame.tokens:
            break
    before = backend.stats()
    assert before.running == 2
    await leaving.aclose()
    while (stats := backend.stats()).running == 2:
        await asyncio.sleep(0)
    # One step may have been under way, and it may have ended just before the snapshot it is compared with.
    assert stats.steps_total - before.steps_total <= 2
    assert stats.kv_tokens_used < before.kv_tokens_used + 4
    await staying.aclose()


async def test_closing_in_the_middle_of_a_prefill(backend: LlamaCppBackend) -> None:
    others = backend.generate(story("a fox", 300))  # keeps the chunks small
    await anext(others)
    stream = backend.generate(greedy(TextPrompt(LONG * 25), 8))
    async for frame in stream:
        if any(isinstance(event, Progress) for event in frame.events):
            break
    await stream.aclose()
    await until(backend, running=1, within_s=10)
    await others.aclose()
    got = await answer(backend, greedy(TextPrompt(LONG * 25), 2))
    assert got.completion.usage.cached_tokens >= 128, "what was computed until then is kept"


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (greedy(TextPrompt("")), InvalidRequest),
        (greedy(TokenPrompt(())), InvalidRequest),
        (greedy(TokenPrompt((1, 2, 10**6))), InvalidRequest),
        (greedy(TokenPrompt((-1,))), InvalidRequest),
        (greedy("Hi", resume=(10**6,)), InvalidRequest),
        (greedy(TextPrompt(LONG * 100)), ContextOverflow),
        (greedy(TokenPrompt((5,) * CONTEXT)), ContextOverflow),
        (greedy("Hi", n=SLOTS + 1), InvalidRequest),
        (greedy("Hi", n=2, resume=(1,)), InvalidRequest),
        (greedy("Hi", slot=SlotOptions(id=SLOTS)), InvalidRequest),
        (greedy("Hi", sampling=Sampling(temperature=float("nan"))), InvalidRequest),
        (greedy(ChatPrompt((Message("user", (ImagePart("data:,"),)),))), InvalidRequest),
        (greedy(ChatPrompt(())), None),  # the template adds its system message only to a first one
        (greedy(TextPrompt("\ud800\x00")), None),
        (greedy(ChatPrompt((Message("user"),), template_kwargs={"messages": 1})), InvalidRequest),
    ],
)
async def test_a_malformed_request_leaves_the_next_one_working(
    backend: LlamaCppBackend, request_: Request, error: type[ServingError] | None
) -> None:
    beside = asyncio.create_task(answer(backend, story("a fox", 6)))
    if error is None:
        await answer(backend, request_)
    else:
        with pytest.raises(error) as caught:
            await answer(backend, request_)
        assert type(caught.value) is error
    assert len((await beside).tokens) == 6
    assert len((await answer(backend, story("a clock", 3))).tokens) == 3


async def test_a_request_that_cannot_be_computed_fails_alone(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = 4242
    expected = await answer(backend, story("a fox", 12))

    def refuse(decode: Callable[[Batch], int], batch: Batch) -> int:
        return -3 if poison in batch._token[: batch.size] else decode(batch)

    _patch_decode(backend, monkeypatch, refuse)
    good, bad = await asyncio.gather(
        answer(backend, story("a fox", 12)),
        answer(backend, greedy(TokenPrompt((10, poison, 11)), 12)),
        return_exceptions=True,
    )
    assert isinstance(bad, InternalError)
    assert bad.message == InternalError.PUBLIC_MESSAGE
    assert isinstance(good, Answer)
    assert len(good.tokens) == len(expected.tokens)
    await backend.check_health()


async def test_a_request_whose_sampler_cannot_be_made_fails_alone(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Sampler.of

    def refuse(model: Model, spec: SamplerSpec, prompt: Tokens, resume: Tokens) -> Sampler:
        if spec.params.seed == 13:
            raise LlamaCppError("no memory")
        return make(model, spec, prompt, resume)

    monkeypatch.setattr(Sampler, "of", refuse)
    unlucky = greedy("Hi", 4, sampling=Sampling(seed=13))
    good, bad = await asyncio.gather(
        answer(backend, story("a fox", 4)), answer(backend, unlucky), return_exceptions=True
    )
    assert isinstance(bad, InternalError)
    assert isinstance(good, Answer)


async def test_no_room_in_the_cache_costs_idle_slots_first(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answer(backend, greedy("What the idle slot remembers", 2))
    runner, _ = parts(backend)
    assert sum(slot.length for slot in runner.kv.slots)
    refusals = [NO_KV_SPACE]

    def refuse(decode: Callable[[Batch], int], batch: Batch) -> int:
        return refusals.pop() if refusals else decode(batch)

    _patch_decode(backend, monkeypatch, refuse)
    assert len((await answer(backend, greedy(TextPrompt("Something else entirely"), 4))).tokens) == 4
    assert sum(slot.length > 0 for slot in runner.kv.slots) == 1


async def test_a_prompt_that_finds_little_room_is_computed_in_smaller_pieces(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def refuse(decode: Callable[[Batch], int], batch: Batch) -> int:
        sizes.append(batch.size)
        return NO_KV_SPACE if batch.size > 50 else decode(batch)

    _patch_decode(backend, monkeypatch, refuse)
    got = await answer(backend, greedy(TextPrompt(LONG * 12), 2))
    assert got.choice.reason == "length"
    assert any(size > 50 for size in sizes)


def _patch_decode(
    backend: LlamaCppBackend,
    monkeypatch: pytest.MonkeyPatch,
    decode: Callable[[Callable[[Batch], int], Batch], int],
) -> None:
    _, context = parts(backend)
    real = context.decode
    monkeypatch.setattr(context, "decode", lambda batch: decode(real, batch))


async def test_when_the_thread_dies_everyone_is_told(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=1, context_length=256))
    await backend.start()
    running, waiting = backend.generate(story("a fox", 200)), backend.generate(story("a fox", 200))
    await anext(running)
    queued = asyncio.ensure_future(anext(waiting))
    await until(backend, running=1, waiting=1, within_s=10)

    def die(_decode: Callable[[Batch], int], _batch: Batch) -> int:
        raise RuntimeError("a bug")

    _patch_decode(backend, monkeypatch, die)
    with pytest.raises(Unavailable, match="failed"):
        async for _ in running:
            pass
    with pytest.raises(Unavailable, match="failed"):
        await queued
    with pytest.raises(Unavailable):
        await backend.check_health()
    with pytest.raises(Unavailable):
        await answer(backend, story("a fox"))
    assert (backend.stats().running, backend.stats().waiting) == (0, 0)
    await backend.aclose()
    await backend.aclose()


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_loaded_is_one_line(demo_model: str, tmp_path: Path) -> None:
    from backends.model_source import resolve_model

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(resolve_model(demo_model).read_bytes()[:2_000_000])
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"GGUF" + b"\xff" * 4096)
    for source in (str(cut), str(noise), str(tmp_path / "none.gguf"), "package:no_such_package/x.gguf"):
        with pytest.raises(BackendStartError) as caught:
            await LlamaCppBackend(LlamaCppSettings(model=source)).start()
        assert source in str(caught.value)
        assert "\n" not in str(caught.value)


async def test_a_context_longer_than_the_training_is_cut(demo_model: str) -> None:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=1, context_length=1_000_000))
    assert (await backend.start()).context_length == 8192
    await backend.aclose()
