"""The sampler chain: what it keeps, what it draws, and what it refuses."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from protocols.errors import InvalidRequest
from protocols.request import Sampling

c = pytest.importorskip("llama_cpp.llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.bindings import Batch, Context, LlamaCppError  # noqa: E402 - needs llama.cpp
from backends.llamacpp.sampling import RANDOM_SEED, SamplerChain, SamplerParams  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.llamacpp.bindings import Model

pytestmark = pytest.mark.model

LOGITS = [math.log(p) for p in (0.5, 0.3, 0.15, 0.04, 0.01)]


def draw(chain: SamplerChain, logits: list[float] = LOGITS) -> tuple[int, dict[int, float]]:
    """The token drawn, and what was drawn from."""
    data = (c.llama_token_data * len(logits))(*(c.llama_token_data(i, x, 0.0) for i, x in enumerate(logits)))
    array = c.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    c.llama_sampler_apply(chain.handle, ctypes.byref(array))
    return array.data[array.selected].id, {array.data[i].id: array.data[i].p for i in range(array.size)}


def chain_of(model: Model, *, banned: Any = (), **sampling: Any) -> SamplerChain:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return SamplerChain(model, SamplerParams.of(Sampling(**(plain | sampling))), banned)


def test_defaults_are_llama_cpps() -> None:
    params = SamplerParams.of(Sampling())
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.repeat_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.seed == RANDOM_SEED
    assert not params.penalises


@pytest.mark.parametrize(("given", "used"), [(-1, RANDOM_SEED), (7, 7), (2**32 + 7, 7)])
def test_seeds_are_32_bits(given: int, used: int) -> None:
    assert SamplerParams.of(Sampling(seed=given)).seed == used


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=math.nan), Sampling(top_p=math.inf), Sampling(repeat_penalty=0.0), Sampling(min_p=-math.inf)],
)
def test_values_that_make_no_sense(sampling: Sampling) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplerParams.of(sampling)
    assert caught.value.param


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 4, "top_p": 0.6}, {0, 1}),
    ],
)
def test_truncation(model: Model, sampling: dict[str, float], kept: set[int]) -> None:
    chain = chain_of(model, **sampling)
    assert set(draw(chain)[1]) == kept
    chain.close()


def test_temperature_sharpens(model: Model) -> None:
    for temperature in (0.5, 1.0, 2.0):
        chain = chain_of(model, temperature=temperature)
        weights = [math.exp(x / temperature) for x in LOGITS]
        assert draw(chain)[1][0] == pytest.approx(weights[0] / sum(weights), rel=1e-4)
        chain.close()


def test_draws_follow_the_distribution(model: Model) -> None:
    chain = chain_of(model)
    counts = Counter(draw(chain)[0] for _ in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.5, abs=0.04)
    assert counts[1] / 4000 == pytest.approx(0.3, abs=0.04)
    chain.close()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_zero_temperature_is_greedy(model: Model, temperature: float) -> None:
    chain = chain_of(model, temperature=temperature)
    assert {draw(chain)[0] for _ in range(20)} == {0}
    chain.close()


def test_a_seed_decides(model: Model) -> None:
    def drawn(seed: int) -> list[int]:
        chain = chain_of(model, seed=seed)
        values = [draw(chain)[0] for _ in range(40)]
        chain.close()
        return values

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


@pytest.mark.parametrize("repeat_penalty", [1.0, 1.3])
def test_replay_continues_where_another_chain_stood(model: Model, repeat_penalty: float) -> None:
    first, second = (chain_of(model, seed=9, repeat_penalty=repeat_penalty) for _ in range(2))
    before = []
    for _ in range(15):
        before.append(draw(first)[0])
        c.llama_sampler_accept(first.handle, before[-1])
    second.replay(np.array(before, np.int32))
    assert [draw(first) for _ in range(15)] == [draw(second) for _ in range(15)]
    first.close()
    second.close()


def test_penalties_see_the_prompt(model: Model) -> None:
    for penalty in ({"repeat_penalty": 10.0}, {"presence_penalty": 5.0}, {"frequency_penalty": 5.0}):
        chain = chain_of(model, temperature=0.0, **penalty)
        chain.observe_prompt(np.array([0, 1], np.int32))
        assert draw(chain, [2.0, 1.9, 1.0, 0.5])[0] == 2, penalty
        chain.close()


def test_banned_tokens_are_never_drawn(model: Model) -> None:
    for temperature in (0.0, 1.0):
        chain = chain_of(model, banned=(0, 1), temperature=temperature)
        assert not {draw(chain)[0] for _ in range(50)} & {0, 1}
        chain.close()


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    context = Context(model, sequences=2, context_length=256, batch_size=32, micro_batch_size=32, threads=1)
    yield context
    context.close()


def test_wrong_calls_are_errors_and_not_the_end_of_the_process(model: Model, context: Context) -> None:
    chain = chain_of(model)
    batch = Batch(64)
    with pytest.raises(LlamaCppError, match="row 0"):
        chain.sample(context, 0)
    batch.add([1, 2, 3], 0, 0, logits=True)
    assert context.decode(batch) == 0
    with pytest.raises(LlamaCppError, match="row 1"):
        context.logits(1)
    with pytest.raises(LlamaCppError, match="row 3"):
        chain.sample(context, 3)
    assert 0 <= chain.sample(context, 2) < model.vocab_size
    with pytest.raises(LlamaCppError, match="1 to 32"):
        batch.add(list(range(40)), 0, 3, logits=True)
        context.decode(batch)
    with pytest.raises(LlamaCppError, match="room"):
        batch.add(list(range(40)), 0, 3, logits=True)
    with pytest.raises(LlamaCppError, match="sequence 2"):
        context.truncate(2, 0)
    with pytest.raises(LlamaCppError, match="outside the vocabulary"):
        chain_of(model, repeat_penalty=1.1).replay(np.array([10**6], np.int32))
    with pytest.raises(LlamaCppError, match="outside the vocabulary"):
        model._read_piece(10**6, special=False)
    batch.clear()
    batch.add([1], 5, 0, logits=True)  # no such sequence: llama.cpp refuses the batch
    assert context.decode(batch) < 0
    chain.close()
    chain.close()
    with pytest.raises(LlamaCppError, match="closed"):
        _ = chain.handle


def test_tokenizing_takes_anything(model: Model) -> None:
    for text in ("", "\x00", "a\x00b", "\ud800", "👩‍👩‍👧", "x" * 100_000):
        pieces = b"".join(map(model.piece, model.tokenize(text, add_special=False, parse_special=False).tolist()))
        assert pieces == text.encode("utf-8", "replace")
