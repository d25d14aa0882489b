"""Probabilities: right numbers, in the right order, one entry per token, and with the text they belong to."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from backends.llamacpp.settings import LlamaCppSettings
from protocols.events import TextDelta, TokenLogprob
from protocols.request import GbnfConstraint, LogprobOptions, Request, Sampling, TextPrompt, TokenBias
from tests.backends.contract import Answer, answer, until

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Batch
from backends.llamacpp.logprobs import LOWEST, before_sampling
from tests.backends.llamacpp.helpers import greedy, parts

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "Tell me about the sea."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, slots=4, context_length=512, flash_attention="on"))
    await backend.start()
    yield backend
    await until(backend, running=0)
    await backend.aclose()


def asking(top: int, after_sampling: bool = False, tokens: int = 8, **fields: Any) -> Request:
    return greedy(fields.pop("prompt", PROMPT), tokens, logprobs=LogprobOptions(top, after_sampling), **fields)


def deltas(got: Answer) -> list[TextDelta]:
    return [event for frame in got.frames for event in frame.events if isinstance(event, TextDelta)]


def spelled(entries: tuple[TokenLogprob, ...]) -> str:
    return b"".join(entry.data for entry in entries).decode("utf-8", "replace")


# --- the numbers ------------------------------------------------------------------------------------------------------


async def test_before_sampling_they_are_those_of_the_model(backend: LlamaCppBackend) -> None:
    got = await answer(backend, asking(5))
    assert [entry.token for entry in got.choice.logprobs] == list(got.tokens)
    assert spelled(got.choice.logprobs) == got.choice.text
    prompt = await backend._tokens(asking(5))
    _, context = parts(backend)
    batch = Batch(512)
    for count, entry in enumerate(got.choice.logprobs[:4]):
        batch.clear()
        row = batch.add(np.concatenate([prompt, np.array(got.tokens[:count], np.int32)]), 3, 0, logits=True)
        context.forget(3)
        assert context.decode(batch) == 0
        logits = context.logits(row).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:5]
        assert [one.token for one in entry.top] == best.tolist()
        assert [one.logprob for one in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-2)
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-2)
    context.forget(3)


@pytest.mark.parametrize("after_sampling", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.5, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "seed": 3, "mirostat": 1},
        {"temperature": 1.0, "seed": 3, "mirostat": 2},
        {"temperature": 1.0, "seed": 3, "samplers": ("k", "a"), "adaptive_target": 0.2},
        {"temperature": 1.0, "seed": 3, "xtc_probability": 1.0},
        {"temperature": 1.0, "seed": 3, "top_n_sigma": 1.0},
        {"temperature": 0.0, "xtc_probability": 1.0},
        {"temperature": 0.0, "repeat_penalty": 1.3, "dry_multiplier": 1.0},
    ],
    ids=str,
)
async def test_they_are_ordered_probabilities_and_change_nothing(
    backend: LlamaCppBackend, sampling: dict[str, Any], after_sampling: bool
) -> None:
    request = asking(50, after_sampling, sampling=Sampling(**sampling))
    without = await answer(backend, msgspec.structs.replace(request, logprobs=None))
    got = await answer(backend, request)
    assert got.tokens == without.tokens
    assert [entry.token for entry in got.choice.logprobs] == list(got.tokens)
    for entry in got.choice.logprobs:
        values = [one.logprob for one in entry.top]
        assert values == sorted(values, reverse=True)
        assert len({one.token for one in entry.top}) == len(entry.top) <= 50
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        assert all(LOWEST <= value <= 0 for value in [entry.logprob, *values])
        listed = {one.token: one.logprob for one in entry.top}
        assert listed.get(entry.token, entry.logprob) == entry.logprob
        if after_sampling:
            assert LOWEST not in values, "what has no probability is not listed"
            if len(entry.top) < 50:
                assert sum(map(math.exp, values)) == pytest.approx(1, abs=1e-3)
        else:
            assert len(entry.top) == 50


async def test_after_greedy_sampling_one_is_certain(backend: LlamaCppBackend) -> None:
    got = await answer(backend, asking(5, after_sampling=True))
    assert {entry.logprob for entry in got.choice.logprobs} == {0.0}
    assert [[one.token for one in entry.top] for entry in got.choice.logprobs] == [[token] for token in got.tokens]


async def test_without_alternatives(backend: LlamaCppBackend) -> None:
    for after_sampling in (False, True):
        got = await answer(backend, asking(0, after_sampling))
        assert len(got.choice.logprobs) == len(got.tokens)
        assert {entry.top for entry in got.choice.logprobs} == {()}


async def test_biases_show_only_after_sampling(backend: LlamaCppBackend) -> None:
    sampling = Sampling(temperature=1.0, logit_bias=(TokenBias(1234, 100.0),))
    before = await answer(backend, asking(1, sampling=sampling))
    after = await answer(backend, asking(1, True, sampling=sampling))
    assert set(before.tokens) == set(after.tokens) == {1234}
    first = before.choice.logprobs[0]
    assert first.logprob < -1
    assert first.top[0].token != 1234
    assert all(entry.logprob == pytest.approx(0, abs=1e-6) for entry in after.choice.logprobs)


async def test_no_probability_is_the_lowest_number(model: Model) -> None:
    logits = np.array([0.0, -np.inf, 1.0, 1.0], np.float32)
    entry = before_sampling(model, logits, 1, 3)
    assert entry.logprob == LOWEST == pytest.approx(-3.4028235e38)
    assert [one.token for one in entry.top] == [2, 3, 0], "equal ones in the order of their ids"
    assert len(before_sampling(model, logits, 1, 10).top) == 4
    assert sum(math.exp(one.logprob) for one in before_sampling(model, logits, 1, 4).top) == pytest.approx(1)


# --- where they go ----------------------------------------------------------------------------------------------------


async def test_each_comes_with_its_text(backend: LlamaCppBackend) -> None:
    for delta in deltas(await answer(backend, asking(1, tokens=16))):
        assert delta.logprobs
        assert spelled(delta.logprobs) == delta.text


async def test_tokens_of_one_character_come_together(backend: LlamaCppBackend) -> None:
    assert backend._loaded is not None
    pieces = backend._loaded.model.tokenize("🦊", add_special=False, parse_special=False).tolist()
    assert len(pieces) > 1
    got = await answer(backend, asking(0, constraint=GbnfConstraint('root ::= "🦊🦊"'), tokens=30, ignore_eos=False))
    assert got.choice.text == "🦊🦊"
    assert len(got.choice.logprobs) == len(got.tokens)
    assert spelled(got.choice.logprobs) == "🦊🦊"
    for delta in deltas(got):
        assert spelled(delta.logprobs) == delta.text


async def test_text_that_waited_for_a_stop_brings_all_of_them(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, asking(0))
    held = await answer(backend, asking(0, stop=(whole.choice.text + "?",)))
    assert held.choice.text == whole.choice.text
    assert held.choice.logprobs == whole.choice.logprobs
    assert len(deltas(held)) == 1


async def test_a_stop_takes_those_of_its_tokens_along(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, asking(0, tokens=12))
    entries = whole.choice.logprobs
    stop = spelled(entries[5:8])
    got = await answer(backend, asking(0, tokens=12, stop=(stop,)))
    assert got.choice.stop_sequence == stop
    assert got.choice.logprobs == entries[:5]
    assert len(got.tokens) == 8
    inside = await answer(backend, asking(0, tokens=12, stop=(stop[2:],)))
    assert inside.choice.logprobs == entries[:6], "a token that was shown in part is one that was shown"


async def test_the_end_has_an_entry(backend: LlamaCppBackend) -> None:
    got = await answer(backend, asking(1, prompt="What is 2 + 2? Answer with one number.", tokens=60, ignore_eos=False))
    assert got.choice.reason == "stop"
    assert len(got.choice.logprobs) == len(got.tokens)
    assert got.choice.logprobs[-1].data == b""


async def test_a_resumed_answer_has_those_of_its_own_tokens(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, asking(2, tokens=10))
    rest = await answer(backend, asking(2, tokens=10, resume=whole.tokens[:6]))
    assert [entry.token for entry in rest.choice.logprobs] == list(whole.tokens[6:])


async def test_nobody_pays_who_does_not_ask(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual way is one call into llama.cpp per token: no logits, no candidates are ever looked at."""
    from backends.llamacpp.bindings import Context
    from backends.llamacpp.sampling import Candidates

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Context, "logits", refuse)
    monkeypatch.setattr(Candidates, "fill", refuse)
    request = Request("t", "m", TextPrompt("Once"), max_tokens=4, sampling=Sampling(temperature=0.9, seed=1))
    assert (await answer(backend, request)).tokens
