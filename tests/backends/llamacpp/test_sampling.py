"""The sampler chain: what it keeps, what it draws, and that wrong calls are errors."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from protocols.request import Sampling

c = pytest.importorskip("llama_cpp.llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.bindings import Batch, Context, LlamaCppError  # noqa: E402 - needs llama.cpp
from backends.llamacpp.sampler_params import SamplerParams  # noqa: E402
from backends.llamacpp.sampling import Candidates, DrySampler, SamplerChain, dry_sampler  # noqa: E402

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


def chain_of(model: Model, *, biases: Any = None, **sampling: Any) -> SamplerChain:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return SamplerChain(model, SamplerParams.of(Sampling(**(plain | sampling))), biases or {})


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 4, "top_p": 0.6}, {0, 1}),
        ({"top_p": 0.1, "min_keep": 3}, {0, 1, 2}),
        ({"min_p": 0.9, "min_keep": 3}, {0, 1, 2}),
        ({"typical_p": 0.5}, {0, 1}),
        ({"typical_p": 0.2}, {1}),  # the likeliest is not the most typical
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, {2, 3, 4}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1, "min_keep": 4}, {0, 1, 2, 3, 4}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.6}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation(model: Model, sampling: dict[str, float], kept: set[int]) -> None:
    chain = chain_of(model, **sampling)
    assert set(draw(chain)[1]) == kept
    chain.close()


def test_top_n_sigma_leaves_those_near_the_best(model: Model) -> None:
    for sigma, kept in ((0.5, {0, 1}), (1.0, {0, 1, 2}), (9.0, {0, 1, 2, 3, 4})):
        chain = chain_of(model, top_n_sigma=sigma)
        assert {token for token, p in draw(chain)[1].items() if p > 0} == kept
        chain.close()


def test_the_order_is_the_requests(model: Model) -> None:
    def kept(*samplers: str) -> set[int]:
        chain = chain_of(model, samplers=samplers, temperature=5.0, min_p=0.2)
        tokens = set(draw(chain)[1])
        chain.close()
        return tokens

    assert kept("min_p", "temperature") == {0, 1, 2}
    assert kept("temperature", "min_p") == {0, 1, 2, 3, 4}, "hot first: all are alike when min_p looks"
    assert kept("temperature") == {0, 1, 2, 3, 4}
    assert kept("m") == {0, 1, 2}


def test_a_temperature_that_is_not_in_the_order_does_nothing(model: Model) -> None:
    chain = chain_of(model, samplers=("top_k",), temperature=0.0)
    assert draw(chain)[1][0] == pytest.approx(0.5, rel=1e-4)
    chain.close()
    chain = chain_of(model, samplers=())
    assert draw(chain)[1][0] == pytest.approx(0.5, rel=1e-4)
    chain.close()


def test_greedy_after_the_likeliest_were_excluded(model: Model) -> None:
    chain = chain_of(model, temperature=0.0, xtc_probability=1.0, xtc_threshold=0.1)
    assert {draw(chain)[0] for _ in range(20)} == {2}
    chain.close()


def test_dynamic_temperature_is_hot_where_the_model_is_unsure(model: Model) -> None:
    def likeliest(logits: list[float], **sampling: Any) -> float:
        chain = chain_of(model, **sampling)
        p = max(draw(chain, logits)[1].values())
        chain.close()
        return p

    sure, unsure = [math.log(p) for p in (0.97, 0.01, 0.01, 0.01)], [math.log(p) for p in (0.3, 0.25, 0.25, 0.2)]
    dynamic = {"temperature": 1.0, "dynatemp_range": 0.9}
    assert likeliest(sure, **dynamic) > likeliest(sure)
    assert likeliest(unsure, **dynamic) < likeliest(unsure)
    assert likeliest(sure, **dynamic, dynatemp_exponent=0.2) < likeliest(sure, **dynamic)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_replaces_the_truncation(model: Model, version: int) -> None:
    chain = chain_of(model, mirostat=version, mirostat_tau=9.0, top_k=1, repeat_penalty=9.0)
    assert len({draw(chain)[0] for _ in range(200)}) > 2, "top_k is not in it"
    chain.close()
    chain = chain_of(model, mirostat=version, mirostat_tau=0.01, mirostat_eta=1.0)
    drawn = [draw(chain)[0] for _ in range(50)]
    assert set(drawn[20:]) == {0}, "no surprise is wanted"
    chain.close()


def test_adaptive_p_prefers_what_is_as_likely_as_its_target(model: Model) -> None:
    for target, token in ((0.9, 0), (0.15, 2)):
        chain = chain_of(model, samplers=("adaptive_p",), adaptive_target=target, adaptive_decay=0.0)
        p = draw(chain)[1]
        assert max(p, key=lambda id_: p[id_]) == token
        chain.close()
    chain = chain_of(model, samplers=("adaptive_p",), adaptive_target=-1.0)
    assert draw(chain)[1][0] == pytest.approx(0.5, rel=1e-4), "off"
    chain.close()


def repeated(model: Model, text: str, **dry: Any) -> int:
    """What follows `text`, where the tokens that followed before are the likeliest."""
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    logits = np.zeros(model.vocab_size, np.float32)
    logits[tokens[3]] = 5.0
    logits[7] = 4.0
    chain = chain_of(model, temperature=0.0, **({"dry_multiplier": 2.0, "dry_penalty_last_n": 64} | dry))
    chain.observe_prompt(tokens)
    token = chain.pick(Candidates.of(logits))
    chain.close()
    return 0 if token == tokens[3] else token


def test_dry_ends_repetitions(model: Model) -> None:
    text = " one two three four; one two three"
    assert repeated(model, text) == 7
    assert repeated(model, text, dry_multiplier=0.0) == 0
    assert repeated(model, text, dry_allowed_length=3) == 7
    assert repeated(model, text, dry_allowed_length=4) == 0
    assert repeated(model, text, dry_penalty_last_n=5) == 0, "it looks no further back"
    assert repeated(model, text, dry_penalty_last_n=0) == 0
    assert repeated(model, text, dry_sequence_breakers=("two",)) == 0, "the repetition is too short behind it"
    assert repeated(model, text, dry_sequence_breakers=("\n", "")) == 7
    assert repeated(model, text, dry_multiplier=0.3, dry_base=4.0) == 7
    assert repeated(model, text, dry_multiplier=0.3, dry_base=1.0) == 0
    assert repeated(model, text, dry_multiplier=0.6, dry_base=0.5) == 7, "below 1 is the default"
    assert repeated(model, text, samplers=("temperature",)) == 0
    assert repeated(model, text, dry_penalty_last_n=2**40) == 7


def test_dry_samplers_are_made_once(model: Model) -> None:
    params = SamplerParams.of(Sampling(dry_multiplier=0.5, seed=3))
    assert dry_sampler(model, params) is dry_sampler(model, SamplerParams.of(Sampling(dry_multiplier=0.5, seed=4)))
    assert dry_sampler(model, SamplerParams()) is None
    one = DrySampler(model, params)
    del one


def test_penalties_forget(model: Model) -> None:
    for last_n, token in ((64, 1), (2, 0), (0, 0)):
        chain = chain_of(model, temperature=0.0, presence_penalty=5.0, repeat_last_n=last_n)
        chain.observe_prompt(np.array([0, 3, 4], np.int32))
        assert draw(chain, [2.0, 1.9, 1.0, 0.5, 0.5])[0] == token
        chain.close()


def test_biases_add_up_and_decide(model: Model) -> None:
    chain = chain_of(model, biases={4: 100.0})
    assert {draw(chain)[0] for _ in range(50)} == {4}
    chain.close()
    chain = chain_of(model, biases={1: math.log(2.0)})
    p = draw(chain)[1]
    assert p[1] / p[0] == pytest.approx(0.6 / 0.5, rel=1e-4)
    chain.close()


def test_an_unreadable_choice_is_an_error(model: Model) -> None:
    chain = chain_of(model)
    candidates = Candidates.of(np.zeros(5, np.float32))
    with pytest.raises(LlamaCppError, match="chose nothing"):
        _ = candidates.selected
    candidates.keep(np.zeros(5, np.bool_))
    with pytest.raises(LlamaCppError, match="no candidates"):
        chain.pick(candidates)
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


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"repeat_penalty": 1.3},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1},
        {"samplers": ("a",), "adaptive_target": -1.0},
    ],
    ids=str,
)
def test_replay_continues_where_another_chain_stood(model: Model, sampling: dict[str, Any]) -> None:
    first, second = (chain_of(model, seed=9, **sampling) for _ in range(2))
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
        chain = chain_of(model, biases={0: -math.inf, 1: -math.inf}, temperature=temperature)
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
