"""Ranking documents: the prompt of each, and its score."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from protocols.calls import EmbeddingRequest, RerankRequest
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported
from protocols.request import TextPrompt
from tests.backends.contract import answer
from tests.backends.llamacpp.helpers import greedy

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.bindings import Model
from backends.llamacpp.embedding_context import EmbeddingContext
from backends.llamacpp.embedding_inputs import rerank_inputs
from tests.backends.llamacpp.test_embeddings import CLOSE, started

pytestmark = pytest.mark.model

QUERY = "what is the capital of france"
DOCUMENTS = ("paris", "berlin", "a cat sat on the mat.", "paris")
TEMPLATE = "<|begin|>Q: {query}\nD: {document}<|end|>"


@pytest.fixture(scope="session")
def bert_reranker(synthetic: ModuleType, models_folder: Path) -> Path:
    from gguf import PoolingType

    return Path(synthetic.write_bert(models_folder, "bert-reranker", pooling=PoolingType.RANK))


@pytest.fixture(scope="session")
def decoder_reranker(synthetic: ModuleType, models_folder: Path) -> Path:
    return Path(synthetic.write_decoder_reranker(models_folder, template=TEMPLATE))


def ranking(query: str, *documents: str) -> RerankRequest:
    return RerankRequest("test", "m", query, documents)


def prompts(path: Path, query: str, *documents: str) -> list[list[int]]:
    model = Model(path)
    made = [tokens.tolist() for tokens in rerank_inputs(model, ranking(query, *documents), 1000)]
    model.close()
    return made


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_special_tokens_only_where_the_model_adds_them(bert_reranker: Path, synthetic: ModuleType) -> None:
    def word(text: str) -> int:
        return int(synthetic.WORDPIECE.index(f"\u2581{text}"))

    cat, dog, mat = word("cat"), word("dog"), word("mat")
    assert prompts(bert_reranker, "cat", "dog mat", "") == [
        [synthetic.CLS, cat, synthetic.SEP, dog, mat],
        [synthetic.CLS, cat, synthetic.SEP],
    ]


def test_a_decoder_that_adds_both_ends(synthetic: ModuleType, models_folder: Path) -> None:
    s = synthetic
    path = s.write_decoder(models_folder, "decoder-both", adds_bos=True, adds_eos=True)
    assert prompts(path, "the", "the") == [[s.BEGIN, s.THE, s.END, s.THE, s.END]]
    path = s.write_decoder(models_folder, "decoder-neither")
    assert prompts(path, "the", "the") == [[s.THE, s.THE]]


def test_a_template_is_filled_in_one_pass(decoder_reranker: Path, synthetic: ModuleType) -> None:
    model = Model(decoder_reranker)

    def tokens(text: str) -> list[int]:
        return [int(token) for token in model.tokenize(text, add_special=False, parse_special=True)]

    (made,) = rerank_inputs(model, ranking("a {document}", "{query} <|end|>"), 1000)
    assert made.tolist() == tokens("<|begin|>Q: a {document}\nD: {query} <|end|><|end|>")
    assert (made[0], made[-1]) == (synthetic.BEGIN, synthetic.END)
    model.close()


def test_without_a_template_control_tokens_are_text(bert_reranker: Path, synthetic: ModuleType) -> None:
    (made,) = prompts(bert_reranker, "cat", "[SEP]")
    assert made.count(synthetic.SEP) == 1


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert_reranker", "decoder_reranker"])
async def test_scores_are_of_each_document_and_the_same_again(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    expected = [len(tokens) for tokens in prompts(path, QUERY, *DOCUMENTS)]
    async with started(path) as (backend, card):
        assert (card.tasks, card.pooling) == (("rerank",), "rank")
        first = await backend.rerank(ranking(QUERY, *DOCUMENTS))
        assert await backend.rerank(ranking(QUERY, *DOCUMENTS)) == first
        assert [got.prompt_tokens for got in first] == expected
        assert len({round(got.score, 4) for got in first[:3]}) == 3
        assert first[3].score == pytest.approx(first[0].score, abs=CLOSE)
        for document, got in zip(DOCUMENTS, first, strict=True):
            (alone,) = await backend.rerank(ranking(QUERY, document))
            assert alone.score == pytest.approx(got.score, abs=CLOSE)
        (other,) = await backend.rerank(ranking("a dog ran", DOCUMENTS[0]))
        assert abs(other.score - first[0].score) > CLOSE


async def test_the_score_is_the_first_output_of_the_classifier(decoder_reranker: Path) -> None:
    model = Model(decoder_reranker)
    context = EmbeddingContext(model, pooling=None, batch_size=256, threads=1)
    assert (context.pooling, context.dimensions) == ("rank", 2)
    (outputs,) = context.compute(rerank_inputs(model, ranking(QUERY, "paris"), 256))
    assert outputs.sum() == pytest.approx(1, abs=1e-5), "the probabilities of both labels"
    context.close()
    model.close()
    async with started(decoder_reranker) as (backend, _):
        (got,) = await backend.rerank(ranking(QUERY, "paris"))
    assert got.score == pytest.approx(float(outputs[0, 0]), abs=CLOSE)


async def test_many_documents_in_several_batches(bert_reranker: Path) -> None:
    documents = [" ".join(["cat", "dog", "mat", "paris"][n % 4 :] * (1 + n % 5)) for n in range(90)]
    async with started(bert_reranker) as (backend, _):
        scores = await backend.rerank(ranking(QUERY, *documents))
        steps = backend.stats().steps_total
        assert 1 < steps < 10
        for index in range(0, 90, 13):
            (alone,) = await backend.rerank(ranking(QUERY, documents[index]))
            assert np.isclose(alone.score, scores[index].score, atol=CLOSE)


# --- what is wrong ----------------------------------------------------------------------------------------------------


async def test_a_reranker_does_nothing_else(bert_reranker: Path, decoder_model: Path) -> None:
    async with started(bert_reranker) as (backend, _):
        with pytest.raises(NotSupported, match="embeddings"):
            await backend.embed(EmbeddingRequest("t", "m", (TextPrompt("cat"),)))
        with pytest.raises(NotSupported, match="generate"):
            await answer(backend, greedy("cat"))
    async with started(decoder_model) as (backend, _):
        with pytest.raises(NotSupported, match="rank"):
            await backend.rerank(ranking("cat", "dog"))


async def test_a_document_too_long_is_named_and_fails_alone(bert_reranker: Path) -> None:
    async with started(bert_reranker) as (backend, _):
        good, bad = await asyncio.gather(
            backend.rerank(ranking(QUERY, *DOCUMENTS)),
            backend.rerank(ranking(QUERY, "paris", "cat " * 200)),
            return_exceptions=True,
        )
        assert isinstance(good, list)
        assert isinstance(bad, ContextOverflow)
        assert bad.param == "documents[1]"
        assert bad.details == {"n_prompt_tokens": 208, "n_ctx": 128}
        with pytest.raises(InvalidRequest, match="empty") as caught:
            await backend.rerank(ranking(QUERY))
        assert caught.value.param == "documents"
