"""How inputs of many requests share batches, and the norms: decisions that need no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from backends.pooling import normalized
from protocols.errors import InternalError, ServingError

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.bindings import LlamaCppError, Tokens
from backends.llamacpp.embedder import Embedder
from backends.llamacpp.streams import Call

if TYPE_CHECKING:
    from backends.llamacpp.embedding_context import EmbeddingContext
    from backends.pooling import Matrix

POISON = 666


class Recorder:
    """A context of 10 tokens and 4 inputs a batch. The vector of an input is its first token and its length."""

    batch_size, max_inputs = 10, 4

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = True

    def compute(self, inputs: Sequence[Tokens]) -> list[Matrix]:
        self.batches.append([int(tokens[0]) for tokens in inputs])
        assert sum(len(tokens) for tokens in inputs) <= self.batch_size
        if any(tokens[0] == POISON for tokens in inputs):
            raise LlamaCppError("poison")
        return [np.array([[tokens[0], len(tokens)]], np.float32) for tokens in inputs]

    def close(self) -> None:
        self.open = False


def embedder(context: Recorder) -> Embedder:
    return Embedder(lambda: cast("EmbeddingContext", context), slots=4, chunk=4)


def call(*inputs: tuple[int, int]) -> Call:
    """Inputs by their first token and length."""
    return Call([np.full(length, first, np.int32) for first, length in inputs], -1)


def run(made: Embedder) -> None:
    while not made.idle:
        made.admit()
        assert made.running
        made.step()
    for result in made.results:
        assert result.last
        result.stream.receive(result.item)


async def firsts(made: Call) -> list[int]:
    return [int(matrix[0, 0]) for matrix in await made.answer]


async def test_a_request_of_one_input_does_not_wait_for_one_of_many() -> None:
    context = Recorder()
    made = embedder(context)
    many, one = call(*((n, 3) for n in range(8))), call((100, 3))
    made.submit(many)
    made.submit(one)
    run(made)
    assert context.batches == [[0, 100, 1], [2, 3, 4], [5, 6, 7]]
    assert await firsts(many) == list(range(8))
    assert await firsts(one) == [100]


async def test_what_found_no_room_goes_first_next_time() -> None:
    context = Recorder()
    made = embedder(context)
    for waiting in (call((1, 6), (2, 6)), call((3, 8)), call((4, 3)), call((5, 9))):
        made.submit(waiting)
    run(made)
    assert context.batches == [[1, 4], [3], [5], [2]]


async def test_a_batch_has_no_more_inputs_than_the_context_takes() -> None:
    context = Recorder()
    made = embedder(context)
    made.submit(call(*((n, 1) for n in range(6))))
    run(made)
    assert context.batches == [[0, 1, 2, 3], [4, 5]]


async def test_batches_are_small_while_others_generate_but_an_input_is_whole() -> None:
    context = Recorder()
    made = embedder(context)
    made.submit(call((1, 2), (2, 2), (3, 2), (4, 7), (5, 2)))
    while not made.idle:
        made.admit(beside_generation=len(context.batches) < 3)
        made.step()
    assert context.batches == [[1, 2], [3], [4], [5]]


async def test_a_request_that_cannot_be_computed_fails_alone() -> None:
    made = embedder(Recorder())
    bad, good = call((1, 2), (POISON, 2), (2, 2)), call((7, 2), (8, 2))
    made.submit(bad)
    made.submit(good)
    run(made)
    with pytest.raises(InternalError) as caught:
        await bad.answer
    assert caught.value.message == InternalError.PUBLIC_MESSAGE
    assert await firsts(good) == [7, 8]
    assert made.stats().queued_prompt_tokens == 0


async def test_a_context_that_cannot_be_made_fails_those_who_wait_and_nobody_later() -> None:
    context, failures = Recorder(), [LlamaCppError("no memory")]

    def open_context() -> EmbeddingContext:
        if failures:
            raise failures.pop()
        return cast("EmbeddingContext", context)

    made = Embedder(open_context, slots=4, chunk=4)
    unlucky, lucky = call((1, 2)), call((2, 2))
    made.submit(unlucky)
    made.admit()
    assert made.idle
    assert not made.running
    made.submit(lucky)
    run(made)
    with pytest.raises(ServingError):
        await unlucky.answer
    assert await firsts(lucky) == [2]


async def test_cancelling_drops_what_is_not_computed() -> None:
    context = Recorder()
    made = embedder(context)
    leaving, staying = call(*((n, 5) for n in range(4))), call((9, 5))
    made.submit(leaving)
    made.submit(staying)
    made.admit()
    made.step()
    assert made.stats().queued_prompt_tokens == 15
    made.cancel(leaving)
    made.cancel(leaving)
    assert made.idle
    stats = made.stats()
    assert (stats.running, stats.waiting, stats.queued_prompt_tokens, stats.prompt_tokens_total) == (0, 0, 0, 10)
    assert context.batches == [[0, 9]]


async def test_statistics_of_those_who_run_and_wait() -> None:
    made = embedder(Recorder())
    for waiting in (call((1, 6), (2, 6)), call((3, 8))):
        made.submit(waiting)
    assert made.taken == 2
    made.admit()
    stats = made.stats()
    assert (stats.slots, stats.running, stats.waiting, stats.queued_prompt_tokens) == (4, 1, 1, 20)
    made.step()
    assert (made.stats().queued_prompt_tokens, made.stats().steps_total) == (14, 1)


async def test_closing_frees_the_context() -> None:
    context = Recorder()
    made = embedder(context)
    made.submit(call((1, 2)))
    made.admit()
    made.step()
    made.submit(call((1, 2)))
    made.close()
    assert made.idle
    assert not context.open


async def test_an_answer_for_someone_who_has_gone() -> None:
    made = call((1, 2))
    waiting = asyncio.ensure_future(made.answer)
    waiting.cancel()
    made.receive([])
    made.receive(InternalError("late"))
    assert made.answer.cancelled()


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [1, 2, 3, 17])
def test_the_norm_that_was_asked_for_becomes_one(norm: int) -> None:
    rows = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    got = normalized(rows, norm)
    assert got.dtype == np.float32
    assert np.allclose(np.linalg.norm(got.astype(np.float64), norm, axis=1), 1, atol=1e-6)
    assert np.allclose(got / got[:, :1], rows / rows[:, :1], rtol=1e-5), "only the length changes"


def test_norm_0_scales_the_largest_to_int16_and_norm_minus_1_leaves_all_as_it_is() -> None:
    rows = np.array([[0.5, -2.0, 1.0]], np.float32)
    assert normalized(rows, 0).tolist() == [[8190.0, -32760.0, 16380.0]]
    assert normalized(rows, -1) is rows


@pytest.mark.parametrize("norm", [0, 1, 2, 3])
def test_nothing_has_no_direction(norm: int) -> None:
    assert normalized(np.zeros((1, 3), np.float32), norm).tolist() == [[0.0, 0.0, 0.0]]


def test_a_great_norm_of_small_and_large_numbers() -> None:
    rows = np.array([[1e-30, 5e-31], [3e30, 1e30]], np.float32)
    assert np.allclose(normalized(rows, 1000), [[1, 0.5], [1, 1 / 3]], rtol=1e-6)
