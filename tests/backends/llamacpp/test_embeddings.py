"""Embeddings, on models small enough to check every number, and beside a generation on a real one."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.base import BackendStartError, ModelCard
from backends.llamacpp.settings import LlamaCppSettings, Pooling
from protocols.calls import Embedding, EmbeddingRequest, RerankRequest
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, Unavailable
from protocols.request import TextPrompt, TokenPrompt
from tests.backends.contract import answer, chat, until
from tests.backends.llamacpp.helpers import greedy

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import LlamaCppError, Model
from backends.llamacpp.embedding_context import EmbeddingContext

pytestmark = pytest.mark.model

TEXTS = ("the cat sat on the mat.", "a dog ran far away", "paris", "what is the capital of france? it is not here!")
CLOSE = 2e-3
"""Attention is computed with 16-bit keys, and rounds as the batch is shaped; the numbers themselves are near 1."""


@asynccontextmanager
async def started(path: Path | str, **settings: Any) -> AsyncIterator[tuple[LlamaCppBackend, ModelCard]]:
    backend = LlamaCppBackend(LlamaCppSettings(model=str(path), **{"context_length": 256} | settings))
    card = await backend.start()
    yield backend, card
    await backend.aclose()


def request(*texts: str, **fields: Any) -> EmbeddingRequest:
    return EmbeddingRequest("test", "m", tuple(TextPrompt(text) for text in texts), **fields)


def matrices(embeddings: list[Embedding]) -> list[np.ndarray]:
    return [np.array(embedding.vectors()) for embedding in embeddings]


async def embed(path: Path, pooling: Pooling | None, normalize: int = -1) -> list[np.ndarray]:
    async with started(path, pooling=pooling) as (backend, _):
        return matrices(await backend.embed(request(*TEXTS, normalize=normalize)))


# --- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert_model", "decoder_model"])
async def test_pooling_is_what_it_says_of_the_vectors_of_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    tokens = await embed(path, "none")
    assert len({len(rows) for rows in tokens}) == len(TEXTS), "inputs of several lengths"
    for pooled, expected in (
        (await embed(path, "mean"), [rows.mean(axis=0) for rows in tokens]),
        (await embed(path, "cls"), [rows[0] for rows in tokens]),
        (await embed(path, "last"), [rows[-1] for rows in tokens]),
    ):
        for got, vector in zip(pooled, expected, strict=True):
            assert got.shape == (1, 32)
            assert np.allclose(got[0], vector, atol=CLOSE)


async def test_the_model_says_how_it_pools_unless_it_is_told(synthetic: ModuleType, models_folder: Path) -> None:
    from gguf import PoolingType

    written = {
        "mean": synthetic.write_bert(models_folder),
        "cls": synthetic.write_bert(models_folder, "bert-cls", pooling=PoolingType.CLS),
        "none": synthetic.write_bert(models_folder, "bert-silent", pooling=None),
        "last": synthetic.write_decoder(models_folder),
    }
    for pooling, path in written.items():
        async with started(path) as (_, card):
            assert card.pooling == pooling
    async with started(written["mean"], pooling="last") as (_, card):
        assert card.pooling == "last"


async def test_a_decoder_that_reads_both_ways_only_embeds(synthetic: ModuleType, models_folder: Path) -> None:
    """It has a KV cache, unlike an encoder."""
    path = synthetic.write_decoder(models_folder, "decoder-both-ways", causal=False)
    async with started(path, embedding_batch_size=32) as (backend, card):
        assert (card.tasks, card.pooling) == (("embed",), "none")
        one, other = matrices(await backend.embed(request("the cat", "the dog")))
        assert not np.allclose(one[0], other[0], atol=CLOSE), "the first token sees those behind it"
        with pytest.raises(ContextOverflow):
            await backend.embed(EmbeddingRequest("t", "m", (TokenPrompt((5,) * 33),)))


async def test_vectors_of_tokens_are_never_normalised(bert_model: Path) -> None:
    for plain, asked in zip(await embed(bert_model, "none"), await embed(bert_model, "none", 2), strict=True):
        assert np.array_equal(plain, asked)
        assert abs(np.linalg.norm(plain[0]) - 1) > 0.1


# --- norms and bytes --------------------------------------------------------------------------------------------------


async def test_norms(bert_model: Path) -> None:
    async with started(bert_model) as (backend, card):
        assert card.embedding_length == 32
        (plain,) = matrices(await backend.embed(request(TEXTS[0], normalize=-1)))
        for norm in (1, 2, 3):
            (got,) = matrices(await backend.embed(request(TEXTS[0], normalize=norm)))
            assert np.allclose(got, plain / np.linalg.norm(plain[0], norm), atol=1e-6)
        (got,) = matrices(await backend.embed(request(TEXTS[0], normalize=0)))
        assert np.allclose(got, plain / np.abs(plain).max() * 32760, rtol=1e-5)
        (default,) = matrices(await backend.embed(request(TEXTS[0])))
        assert np.linalg.norm(default) == pytest.approx(1, abs=1e-6)


async def test_the_same_numbers_as_text_and_as_bytes(bert_model: Path) -> None:
    async with started(bert_model, pooling="none") as (backend, _):
        (got,) = await backend.embed(request(TEXTS[0]))
    numbers = struct.unpack(f"<{got.rows * 32}f", base64.b64decode(got.base64))
    assert list(numbers) == [number for vector in got.vectors() for number in vector]
    assert (got.rows, got.dimensions) == (got.prompt_tokens, 32)


# --- many inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert_model", "decoder_model"])
async def test_many_inputs_keep_their_order_and_are_what_they_are_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    async with started(request.getfixturevalue(kind), embedding_batch_size=64) as (backend, _):
        inputs = tuple(TokenPrompt(tuple(range(5, 6 + n % 23)) + (n % 40 + 1,)) for n in range(120))
        before = backend.stats()
        together = await backend.embed(EmbeddingRequest("test", "m", inputs))
        after = backend.stats()
        assert [got.prompt_tokens for got in together] == [len(prompt.tokens) for prompt in inputs]
        for prompt, got in list(zip(inputs, together, strict=True))[::7]:
            (alone,) = await backend.embed(EmbeddingRequest("test", "m", (prompt,)))
            assert np.allclose(got.vectors(), alone.vectors(), atol=CLOSE)
        tokens = sum(len(prompt.tokens) for prompt in inputs)
        assert after.prompt_tokens_total - before.prompt_tokens_total == tokens
        assert tokens / 64 <= after.steps_total - before.steps_total < len(inputs) / 2


async def test_requests_that_arrive_together(bert_model: Path) -> None:
    async with started(bert_model) as (backend, _):
        alone = [matrices(await backend.embed(request(text)))[0] for text in TEXTS]
        together = await asyncio.gather(*(backend.embed(request(text)) for text in TEXTS))
        for one, got in zip(alone, together, strict=True):
            assert np.allclose(one, matrices(got)[0], atol=CLOSE)


async def test_special_tokens_of_text_and_none_of_tokens(bert_model: Path, synthetic: ModuleType) -> None:
    async with started(bert_model) as (backend, _):
        (text,) = await backend.embed(request("cat"))
        cat = synthetic.WORDPIECE.index("\u2581cat")
        tokens, bare = await backend.embed(
            EmbeddingRequest("t", "m", (TokenPrompt((synthetic.CLS, cat, synthetic.SEP)), TokenPrompt((cat,))))
        )
        assert text.prompt_tokens == 3
        assert np.allclose(text.vectors(), tokens.vectors(), atol=CLOSE)
        assert bare.prompt_tokens == 1


async def test_tokens_a_decoder_adds(synthetic: ModuleType, models_folder: Path) -> None:
    path = synthetic.write_decoder(models_folder, "decoder-ends", adds_bos=True, adds_eos=True)
    async with started(path) as (backend, _):
        (got,) = await backend.embed(request("the"))
        expected = TokenPrompt((synthetic.BEGIN, synthetic.THE, synthetic.END))
        (same,) = await backend.embed(EmbeddingRequest("t", "m", (expected,)))
        assert got.prompt_tokens == 3
        assert got.data == same.data


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "error", "param"),
    [
        ((), InvalidRequest, "input"),
        ((TextPrompt("cat"), TokenPrompt(())), InvalidRequest, "input[1]"),
        ((TextPrompt("cat"), TokenPrompt((5, 10**6))), InvalidRequest, "input[1]"),
        ((TokenPrompt((-1,)),), InvalidRequest, "input[0]"),
        ((TextPrompt("cat"), TextPrompt("dog"), TextPrompt("the " * 200)), ContextOverflow, "input[2]"),
        ((TokenPrompt((5,) * 129),), ContextOverflow, "input[0]"),
    ],
)
async def test_a_bad_input_is_named_and_fails_alone(
    bert_model: Path, inputs: tuple[TextPrompt | TokenPrompt, ...], error: type[InvalidRequest], param: str
) -> None:
    async with started(bert_model) as (backend, _):
        good, bad = await asyncio.gather(
            backend.embed(request(*TEXTS)),
            backend.embed(EmbeddingRequest("t", "m", inputs)),
            return_exceptions=True,
        )
        assert isinstance(good, list)
        assert type(bad) is error
        assert isinstance(bad, InvalidRequest)
        assert bad.param == param
        (whole,) = await backend.embed(EmbeddingRequest("t", "m", (TokenPrompt((5,) * 128),)))
        assert whole.prompt_tokens == 128, "as long as the model has positions"


async def test_too_long_names_both_counts(bert_model: Path) -> None:
    async with started(bert_model, embedding_batch_size=32) as (backend, card):
        assert card.context_length == 32
        with pytest.raises(ContextOverflow, match="Item 1 is too large: it has 202 tokens, .* takes 32 ") as caught:
            await backend.embed(request("cat", "the " * 200))
        assert caught.value.details == {"n_prompt_tokens": 202, "n_ctx": 32}


async def test_an_unknown_norm(bert_model: Path) -> None:
    async with started(bert_model) as (backend, _):
        with pytest.raises(InvalidRequest, match="-2"):
            await backend.embed(request("cat", normalize=-2))


async def test_empty_text_is_the_tokens_a_model_adds_or_an_error(bert_model: Path, decoder_model: Path) -> None:
    async with started(bert_model) as (backend, _):
        (got,) = await backend.embed(request(""))
        assert got.prompt_tokens == 2
    async with started(decoder_model) as (backend, _):
        with pytest.raises(InvalidRequest, match="empty"):
            await backend.embed(request("cat", ""))


async def test_a_model_that_only_embeds_does_nothing_else(bert_model: Path) -> None:
    async with started(bert_model, slots=3) as (backend, card):
        assert card.tasks == ("embed",)
        assert (card.slots, backend.stats().slots) == (3, 3)
        with pytest.raises(NotSupported, match="generate"):
            await answer(backend, greedy("hello"))
        with pytest.raises(NotSupported, match="generate"):
            await backend.count_tokens(greedy("hello"))
        with pytest.raises(NotSupported, match="rank"):
            await backend.rerank(RerankRequest("t", "m", "cat", ("dog",)))
        await backend.check_health()


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_cancelling_drops_what_is_not_computed(bert_model: Path) -> None:
    async with started(bert_model, embedding_batch_size=32) as (backend, _):
        inputs = (TokenPrompt((5,) * 32),) * 2000
        leaving = asyncio.ensure_future(backend.embed(EmbeddingRequest("t", "m", inputs)))
        while not backend.stats().prompt_tokens_total:
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(backend, running=0, within_s=10)
        assert backend.stats().queued_prompt_tokens == 0
        assert 0 < backend.stats().prompt_tokens_total < 2000 * 32
        await backend.embed(request("cat"))


async def test_closing_ends_those_who_wait(bert_model: Path) -> None:
    async with started(bert_model, embedding_batch_size=32) as (backend, _):
        inputs = (TokenPrompt((5,) * 32),) * 2000
        waiting = asyncio.ensure_future(backend.embed(EmbeddingRequest("t", "m", inputs)))
        while not backend.stats().prompt_tokens_total:
            await asyncio.sleep(0)
        await backend.aclose()
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await backend.embed(request("cat"))


async def test_when_the_thread_dies_those_who_wait_are_told(bert_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(bert_model) as (backend, _):

        def die(_context: EmbeddingContext, _inputs: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(EmbeddingContext, "compute", die)
        with pytest.raises(Unavailable, match="failed"):
            await backend.embed(request("cat"))
        with pytest.raises(Unavailable):
            await backend.check_health()
        assert (backend.stats().running, backend.stats().waiting) == (0, 0)


# --- beside a generation ----------------------------------------------------------------------------------------------


async def test_a_model_embeds_while_it_generates_and_says_the_same(demo_model: str) -> None:
    async with started(demo_model, slots=2) as (backend, card):
        assert card.tasks == ("generate", "embed")
        assert (card.pooling, card.embedding_length) == ("last", 576)
        story = greedy("Tell me a story about a fox.", 40)
        alone = await answer(backend, story)
        (quiet,) = await backend.embed(request("A fox ran over the hill."))

        async def embed_until(done: asyncio.Future[Any]) -> list[Embedding]:
            made: list[Embedding] = []
            while not done.done():
                made += await backend.embed(request("A fox ran over the hill."))
            return made

        again = asyncio.ensure_future(answer(backend, msgspec.structs.replace(story, id="again")))
        embedded = await embed_until(again)
        assert len(embedded) > 4
        assert all(np.allclose(got.vectors(), quiet.vectors(), atol=CLOSE) for got in embedded)
        assert (await again).tokens == alone.tokens


async def test_a_generation_goes_on_beside_many_embeddings(demo_model: str) -> None:
    async with started(demo_model, slots=1, embedding_batch_size=32) as (backend, _):
        inputs = (TokenPrompt((5,) * 32),) * 100
        embedding = asyncio.ensure_future(backend.embed(EmbeddingRequest("t", "m", inputs)))
        while not backend.stats().steps_total:
            await asyncio.sleep(0)
        got = await answer(backend, greedy(chat("Hi"), 8))
        assert len(got.tokens) == 8
        assert not embedding.done(), "its batches and the steps of the generation take turns"
        embedding.cancel()
        await until(backend, running=0, within_s=10)


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "line"),
    [
        ("write_t5", "it has an encoder beside its decoder, as T5 does, which is not supported"),
        ("no vocabulary", "the model has no vocabulary"),
    ],
)
async def test_what_is_not_served_is_one_line(
    synthetic: ModuleType, models_folder: Path, write: str, line: str
) -> None:
    if write == "write_t5":
        path = synthetic.write_t5(models_folder)
    else:
        path = synthetic.write_decoder(models_folder, "decoder-mute", vocabulary=False)
    with pytest.raises(BackendStartError) as caught:
        await LlamaCppBackend(LlamaCppSettings(model=str(path))).start()
    assert str(caught.value) == f"model {str(path)!r}: {line}"


async def test_a_cut_embedding_model_is_one_line(bert_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(bert_model.read_bytes()[:-4096])
    with pytest.raises(BackendStartError) as caught:
        await LlamaCppBackend(LlamaCppSettings(model=str(cut))).start()
    assert str(cut) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_would_end_the_process_is_refused(bert_model: Path) -> None:
    model = Model(bert_model)
    context = EmbeddingContext(model, pooling="mean", batch_size=200, threads=1)
    assert (context.max_inputs, context.input_length) == (64, 128)
    token = np.array([5], np.int32)
    for wrong in ([], [token[:0]], [token] * 65, [np.repeat(token, 129)], [np.repeat(token, 101)] * 2):
        with pytest.raises(LlamaCppError):
            context.compute(wrong)
    with pytest.raises(LlamaCppError, match="answered"):
        context.compute([np.array([10**6], np.int32)])
    assert len(context.compute([token, token])) == 2
    context.close()
    context.close()
    with pytest.raises(LlamaCppError, match="closed"):
        context.compute([token])
    small = EmbeddingContext(model, pooling="none", batch_size=32, threads=1)
    assert small.max_inputs == 32
    small.close()
    model.close()
