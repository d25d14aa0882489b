"""Guessed tokens on a real model: they change how many steps an answer takes, and nothing else about it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from backends.base import BackendStartError
from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import InternalError
from protocols.events import Finished, TextDelta, Timings, TokenLogprob
from protocols.request import (
    GbnfConstraint,
    JsonSchemaConstraint,
    LogprobOptions,
    Prompt,
    Request,
    Sampling,
    SlotOptions,
    TextPrompt,
)
from tests.backends.contract import Answer, answer, chat, until
from tests.backends.llamacpp.helpers import check_every_step, check_near_ties, greedy, parts, started

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import NO_KV_SPACE, Batch, LlamaCppError
from backends.llamacpp.draft_model import check_same_vocabulary
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler import Drawn, Sampler
from backends.llamacpp.scheduler import Work

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 256
TIDE = "The grey ship came in with the tide. Its captain asked for bread and water. "
COPY = chat(f"Repeat this text exactly:\n\n{TIDE}")
COUNTING = TextPrompt("one two three four, one two three four, one two three four, one two")
CODE = TextPrompt(
    "def load(path):\n    with open(path) as file:\n        return json.load(file)\n\n\n"
    "def save(path, data):\n    with open(path, 'w') as file:\n        json.dump(data, file)\n\n\n"
    "def load_yaml(path):\n    with open(path) as file:\n"
)
PROMPTS: dict[str, Prompt] = {"copy": COPY, "counting": COUNTING, "code": CODE, "chat": chat("Why is the sky blue?")}

EAGER = {"ngram_size": 1, "row_cost": 0.0}
"""Guesses cost nothing, so there are some in nearly every step, most of them wrong."""


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_step(monkeypatch)


def drafting(demo_model: str, kind: str) -> dict[str, Any]:
    return {"kind": "draft", "draft_model": demo_model, "p_min": 0.5, "row_cost": 0.0} if kind == "draft" else EAGER


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngram", "draft"])
async def backend(demo_model: str, request: pytest.FixtureRequest) -> AsyncIterator[LlamaCppBackend]:
    speculation = {"kind": request.param} | drafting(demo_model, request.param)
    async with started(demo_model, slots=4, context_length=CONTEXT, speculation=speculation) as backend:
        yield backend


async def both(backend: LlamaCppBackend, request: Request) -> tuple[Answer, Answer]:
    """Without and with guesses, both behind a prompt of which the slot knows all but the last token."""
    await answer(backend, msgspec.structs.replace(request, max_tokens=1, stop=(), n=1))
    plain = await answer(backend, msgspec.structs.replace(request, speculate=False))
    return plain, await answer(backend, request)


def timings(got: Answer) -> Timings:
    last = got.frames[-1].events[-1]
    assert isinstance(last, Finished)
    assert last.timings is not None
    return last.timings


async def check_slot(backend: LlamaCppBackend, request: Request, got: Answer) -> None:
    """The slot holds the prompt and the answer but for its last token, and no guess."""
    expected = [*(await backend._tokens(request)).tolist(), *got.tokens[:-1]]
    slots = parts(backend)[0].kv.slots
    assert expected in [slot.tokens.tolist() for slot in slots]


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_greedy_answers_are_the_same(backend: LlamaCppBackend, prompt: Any) -> None:
    request = greedy(prompt, 60)
    plain, guessed = await both(backend, request)
    assert timings(guessed).draft_n > 0
    await check_near_ties(backend, request, plain, guessed)
    assert len(guessed.tokens) == guessed.completion.usage.completion_tokens == 60
    model = backend._loaded.model  # type: ignore[union-attr]
    assert guessed.choice.text == b"".join(map(model.piece, guessed.tokens)).decode("utf-8", "replace")


async def test_right_guesses_save_steps_and_are_counted(backend: LlamaCppBackend) -> None:
    before = backend.stats()
    plain = await answer(backend, greedy(COPY, 40, speculate=False))
    between = backend.stats()
    guessed = await answer(backend, greedy(COPY, 40))
    after = backend.stats()
    assert between.steps_total - before.steps_total == 40
    assert timings(plain).draft_n == timings(plain).draft_n_accepted == 0
    assert between.draft_tokens_total == before.draft_tokens_total
    told = timings(guessed)
    assert 0 < told.draft_n_accepted <= told.draft_n
    assert after.draft_tokens_total - between.draft_tokens_total == told.draft_n
    assert after.draft_accepted_total - between.draft_accepted_total == told.draft_n_accepted
    assert after.generated_tokens_total - between.generated_tokens_total == told.predicted_n == 40
    steps = after.steps_total - between.steps_total
    assert steps < 30
    assert len([frame for frame in guessed.frames if frame.tokens]) == steps, "one frame a step"
    assert 40 - told.draft_n_accepted <= steps <= 40


async def test_its_own_draft_model_is_nearly_always_right(demo_model: str) -> None:
    speculation = drafting(demo_model, "draft")
    async with started(demo_model, slots=2, context_length=CONTEXT, speculation=speculation) as backend:
        told = timings(await answer(backend, greedy(chat("Tell me a story about a fox."), 60)))
        assert told.draft_n >= 20
        assert told.draft_n_accepted >= 0.9 * told.draft_n


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.5, "seed": 1},
        {"temperature": 0.5, "seed": 2, "repeat_penalty": 1.1, "presence_penalty": 0.2},
        {"temperature": 0.7, "seed": 3, "xtc_probability": 0.3, "top_k": 10},
        {"temperature": 0.6, "seed": 4, "mirostat": 2},
    ],
    ids=str,
)
async def test_a_seed_gives_the_same_tokens(backend: LlamaCppBackend, sampling: dict[str, Any]) -> None:
    """Each token is drawn from the same logits by the same chain in the same state."""
    plain, guessed = await both(backend, greedy(COUNTING, 30, sampling=Sampling(**sampling)))
    assert timings(guessed).draft_n > 0
    assert guessed.tokens == plain.tokens


async def test_grammar_and_schema(backend: LlamaCppBackend) -> None:
    item = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}}}
    schema = {"type": "array", "items": item | {"required": ["name", "age"]}, "minItems": 4, "maxItems": 4}
    prompt = TextPrompt('[{"name": "Ada", "age": 36}, {"name": "Bob", "age": 41}, {"name": "Eve", "age": 36}]\nAgain: ')
    request = greedy(prompt, 90, constraint=JsonSchemaConstraint(schema), ignore_eos=False)
    plain, guessed = await both(backend, request)
    assert timings(guessed).draft_n_accepted > 0
    assert guessed.tokens == plain.tokens
    assert guessed.choice == plain.choice


async def test_a_grammar_that_ends_among_the_guesses(backend: LlamaCppBackend) -> None:
    """Nothing may follow its last token, and none may say so."""
    words = "one two three four, one two three four, one two three"
    request = greedy(COUNTING, 40, constraint=GbnfConstraint(f'root ::= " {words}"'))
    plain, guessed = await both(backend, request)
    assert timings(guessed).draft_n_accepted > 0
    assert guessed.tokens == plain.tokens
    assert guessed.choice == plain.choice
    assert guessed.choice.reason == "stop"
    held = [*(await backend._tokens(request)).tolist(), *guessed.tokens]
    assert held in [slot.tokens.tolist() for slot in parts(backend)[0].kv.slots]


async def test_log_probabilities(backend: LlamaCppBackend) -> None:
    def told(got: Answer) -> list[TokenLogprob]:
        events = [event for frame in got.frames for event in frame.events]
        return [entry for event in events if isinstance(event, TextDelta) for entry in event.logprobs]

    plain, guessed = await both(backend, greedy(COPY, 30, logprobs=LogprobOptions(2)))
    assert guessed.tokens == plain.tokens
    assert [entry.token for entry in told(guessed)] == list(guessed.tokens)
    assert [entry.logprob for entry in told(guessed)] == pytest.approx([e.logprob for e in told(plain)], abs=0.2)
    assert [len(entry.top) for entry in told(guessed)] == [2] * 30


async def test_several_choices(backend: LlamaCppBackend) -> None:
    request = greedy(COUNTING, 24, n=2, sampling=Sampling(temperature=0.3, seed=5))
    before = backend.stats()
    guessed = await answer(backend, request)
    assert [choice.reason for choice in guessed.completion.choices] == ["length"] * 2
    ends = [event for frame in guessed.frames for event in frame.events if isinstance(event, Finished)]
    drafted = [end.timings.draft_n for end in ends if end.timings is not None]
    assert min(drafted) > 0
    assert sum(drafted) == backend.stats().draft_tokens_total - before.draft_tokens_total
    for index in range(2):
        assert sum(len(frame.tokens) for frame in guessed.frames if frame.choice == index) == 24


# --- ends among the guesses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20, 21])
async def test_a_budget(backend: LlamaCppBackend, max_tokens: int) -> None:
    whole = await answer(backend, greedy(COPY, 40))
    request = greedy(COPY, max_tokens)
    got = await answer(backend, request)
    assert got.tokens == whole.tokens[:max_tokens]
    assert got.completion.usage.completion_tokens == max_tokens
    assert got.choice.reason == "length"
    await check_slot(backend, request, got)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
async def test_a_stop_string(backend: LlamaCppBackend, share: float) -> None:
    whole = (await answer(backend, greedy(COPY, 40))).choice.text
    stop = whole[int(len(whole) * share) :][:4]
    request = greedy(COPY, 40, stop=(stop,))
    plain, guessed = await both(backend, request)
    assert guessed.tokens == plain.tokens
    assert guessed.choice == plain.choice
    assert guessed.choice.stop_sequence == stop
    assert guessed.completion.usage.completion_tokens == len(guessed.tokens)
    await check_slot(backend, request, guessed)


async def test_an_end_token(backend: LlamaCppBackend) -> None:
    """Like the turns before, the answer ends with it."""
    turn = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\nYes, of course.<|im_end|>\n"
    prompt = TextPrompt(turn * 3 + "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n")
    request = greedy(prompt, 40, ignore_eos=False)
    plain, guessed = await both(backend, request)
    assert guessed.tokens == plain.tokens
    assert guessed.choice == plain.choice
    assert guessed.choice.reason == "stop"
    assert timings(guessed).draft_n_accepted > 0
    await check_slot(backend, request, guessed)


@pytest.mark.parametrize("k", [1, 9, 23])
async def test_a_resumed_answer(backend: LlamaCppBackend, k: int) -> None:
    request = greedy(COPY, 40)
    await answer(backend, request)
    whole = await answer(backend, request)
    rest = await answer(backend, msgspec.structs.replace(request, resume=whole.tokens[:k]))
    assert whole.tokens[:k] + rest.tokens == whole.tokens
    assert rest.completion.usage.completion_tokens == 40
    assert timings(rest).predicted_n == 40 - k


async def test_the_context_is_never_exceeded(backend: LlamaCppBackend) -> None:
    request = greedy(TextPrompt(TIDE * 12), None)
    prompt = len(await backend._tokens(request))
    got = await answer(backend, request)
    assert len(got.tokens) == CONTEXT - prompt
    assert timings(got).draft_n_accepted > 0
    shifted = await answer(backend, greedy(TextPrompt(TIDE * 12), 200, slot=SlotOptions(shift=True)))
    assert len(shifted.tokens) == 200
    assert timings(shifted).draft_n_accepted > 50


async def test_a_draw_that_fails_fails_alone(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its guesses; they are forgotten."""
    draw = Sampler.draw
    broken: list[Sampler] = []

    def failing(self: Sampler, context: Any, row: int) -> Drawn | None:
        if self.spec.params.seed == 666:
            broken.append(self)
            if len(broken) > 20:
                raise LlamaCppError("broken")
        return draw(self, context, row)

    monkeypatch.setattr(Sampler, "draw", failing)
    good = asyncio.create_task(answer(backend, greedy(COUNTING, 60)))
    bad = greedy(COPY, 40, sampling=Sampling(temperature=0.0, seed=666), n=2)
    with pytest.raises(InternalError):
        await answer(backend, bad)
    assert len((await good).tokens) == 60


# --- on and off -------------------------------------------------------------------------------------------------------


async def test_off_unless_asked_for(demo_model: str) -> None:
    async with started(demo_model, slots=1, context_length=CONTEXT) as backend:
        assert timings(await answer(backend, greedy(COPY, 30))).draft_n == 0
        asked = timings(await answer(backend, greedy(COPY, 30, speculate=True)))
        assert asked.draft_n_accepted > 0


async def test_never_where_states_cannot_be_cut(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.llamacpp.loading.can_be_cut", lambda context: False)
    async with started(demo_model, slots=1, context_length=CONTEXT, speculation="ngram") as backend:
        got = await answer(backend, greedy(COPY, 20, speculate=True))
        assert (len(got.tokens), timings(got).draft_n) == (20, 0)


# --- draft models that do not fit -------------------------------------------------------------------------------------


async def failed_start(demo_model: str, draft_model: str) -> str:
    speculation = {"kind": "draft", "draft_model": draft_model}
    backend = LlamaCppBackend(LlamaCppSettings.model_validate({"model": demo_model, "speculation": speculation}))
    with pytest.raises(BackendStartError) as caught:
        await backend.start()
    await backend.aclose()
    message = str(caught.value)
    assert "\n" not in message
    return message


async def test_a_draft_model_that_is_not_there(demo_model: str) -> None:
    assert "there is no file /nowhere/draft.gguf" in await failed_start(demo_model, "/nowhere/draft.gguf")


async def test_a_draft_model_that_does_not_fit(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(model: object, draft: object) -> None:
        raise LlamaCppError("its vocabulary is not the model's")

    monkeypatch.setattr("backends.llamacpp.loading.check_same_vocabulary", differs)
    assert "its vocabulary is not the model's" in await failed_start(demo_model, demo_model)
    monkeypatch.undo()
    answers = iter([True, False])
    monkeypatch.setattr("backends.llamacpp.loading.can_be_cut", lambda context: next(answers))
    assert "cannot be cut" in await failed_start(demo_model, demo_model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 2}, "tokens 2, not 3"),
        ({"bos_text": "<s>"}, "begin of text"),
        ({"adds_bos": False}, "begin of text"),
        ({"eos_text": ""}, "end of text"),
        ({"end_tokens": frozenset({1})}, r"end tokens \[1\], not \[2\]"),
        ({"special_piece": [b"a", b"B", b"</s>"].__getitem__}, "token 1 is b'B', not b'b'"),
    ],
    ids=str,
)
async def test_vocabularies_are_compared(change: dict[str, Any], message: str) -> None:
    def model(**fields: Any) -> Any:
        values = {"vocab_size": 3, "adds_bos": True, "bos_text": "<b>", "eos_text": "</s>", "end_tokens": {2}}
        return SimpleNamespace(**values | {"special_piece": [b"a", b"b", b"</s>"].__getitem__} | fields)

    check_same_vocabulary(model(), model())
    with pytest.raises(LlamaCppError, match=message):
        check_same_vocabulary(model(), model(**change))


async def test_a_draft_model_without_room_is_no_error(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = drafting(demo_model, "draft")
    async with started(demo_model, slots=2, context_length=CONTEXT, speculation=speculation) as backend:
        model = parts(backend)[0]._drafting._model  # type: ignore[union-attr]
        assert model is not None
        decode = model._context.decode
        calls: list[int] = []

        def full_at_the_third(batch: Batch) -> int:
            calls.append(batch.size)
            return NO_KV_SPACE if len(calls) == 3 else decode(batch)

        monkeypatch.setattr(model._context, "decode", full_at_the_third)
        got = await answer(backend, greedy(COPY, 100))
        assert len(got.tokens) == 100
        assert len(calls) > 3, "after a rest it goes on"


async def test_a_draft_model_reads_a_long_prompt_in_pieces(demo_model: str) -> None:
    settings = {"slots": 2, "context_length": CONTEXT, "batch_size": 32, "speculation": drafting(demo_model, "draft")}
    async with started(demo_model, **settings) as backend:
        told = timings(await answer(backend, greedy(TextPrompt(TIDE * 8), 40)))
        assert told.draft_n_accepted > 0


# --- many at once -----------------------------------------------------------------------------------------------------


async def test_guesses_have_no_room_and_are_dropped(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = {"kind": "ngram", **EAGER}
    async with started(demo_model, slots=1, context_length=CONTEXT, speculation=speculation) as backend:
        runner, context = parts(backend)
        compute, decode = runner._compute, context.decode
        refused = guesses = 0

        def computing(work: list[Work]) -> None:
            nonlocal guesses
            guesses = sum(part.guesses for part in work)
            compute(work)

        def without_room(batch: Batch) -> int:
            nonlocal refused
            refused += bool(guesses)
            return NO_KV_SPACE if guesses else decode(batch)

        monkeypatch.setattr(runner, "_compute", computing)
        monkeypatch.setattr(context, "decode", without_room)
        got = await answer(backend, greedy(COPY, 30))
        assert refused
        assert len(got.tokens) == 30
        assert timings(got).draft_n == 0, "what was not computed was not guessed"


async def test_a_failed_decode_is_repeated_without_guesses(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = {"kind": "ngram", **EAGER}
    async with started(demo_model, slots=2, context_length=CONTEXT, speculation=speculation) as backend:
        _, context = parts(backend)
        decode = context.decode
        failed = 0

        def failing(batch: Batch) -> int:
            nonlocal failed
            guessing = batch.size > 1 and np.count_nonzero(batch._logits[: batch.size]) == batch.size
            failed += guessing
            return -3 if guessing else decode(batch)

        monkeypatch.setattr(context, "decode", failing)
        assert len((await answer(backend, greedy(COPY, 20))).tokens) == 20
        assert failed


@pytest.mark.parametrize("kind", ["ngram", "draft"])
async def test_a_cache_that_is_too_small_for_all(demo_model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = 0
    pause = Runner._pause_youngest

    def counted(self: Runner) -> None:
        nonlocal pauses
        pauses += 1
        pause(self)

    monkeypatch.setattr(Runner, "_pause_youngest", counted)
    settings = {"slots": 4, "context_length": CONTEXT, "unified_kv": True, "kv_size": 256, "batch_size": 64}
    speculation = {"kind": kind} | drafting(demo_model, kind)
    async with started(demo_model, **settings, speculation=speculation) as backend:
        requests = [greedy(TextPrompt(f"{i} {TIDE * 2}"), 80) for i in range(4)]
        answers = await asyncio.gather(*(answer(backend, request) for request in requests))
        assert [len(got.tokens) for got in answers] == [80] * 4
        assert pauses
        assert backend.stats().draft_accepted_total > 0
        for request, got in list(zip(requests, answers, strict=True))[:2]:
            alone = await answer(backend, msgspec.structs.replace(request, speculate=False))
            await check_near_ties(backend, request, alone, got)


async def test_a_crowd_with_cancellations(backend: LlamaCppBackend) -> None:
    """With and without guesses, of all kinds, some given up: everyone gets what is theirs, nothing is left behind."""
    rng = random.Random(3)

    async def run(i: int) -> None:
        patience = rng.choice([None, None, 1, 3])
        request = greedy(
            rng.choice(list(PROMPTS.values())),
            rng.choice([1, 5, 20, 40]),
            speculate=rng.choice([None, None, False]),
            stop=rng.choice([(), ("e",), ("the tide",)]),
            n=rng.choice([1, 1, 1, 2]),
            sampling=Sampling(temperature=rng.choice([0.0, 1.0]), seed=i),
            slot=SlotOptions(shift=rng.random() < 0.2, reuse=rng.random() < 0.8),
        )
        if patience is None:
            got = await answer(backend, request)
            assert got.completion.usage.completion_tokens == len(got.tokens)
            return
        stream = backend.generate(request)
        async for _ in stream:
            patience -= 1
            if not patience:
                break
        await stream.aclose()

    before = backend.stats()
    await asyncio.wait_for(asyncio.gather(*(run(i) for i in range(24))), 200)
    await until(backend, running=0, within_s=10)
    assert backend.stats().draft_accepted_total > before.draft_accepted_total
