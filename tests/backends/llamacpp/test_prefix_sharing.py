"""Prompts that begin the same compute the beginning once: from slot to slot, together, and out of the prompt cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio

from backends.llamacpp.settings import LlamaCppSettings
from protocols.events import Finished, Progress, Started
from protocols.request import Request, Sampling, SlotOptions, TextPrompt
from tests.backends.contract import Answer, answer, until
from tests.backends.llamacpp.helpers import check_every_step, check_near_ties, greedy, parts, watched

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Batch, Context, LlamaCppError, Model

if TYPE_CHECKING:
    from backends.llamacpp.slots import Tokens

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 5
CONTEXT = 512
BATCH = 64
SYSTEM = "The old mill stands by the river, and nobody has been there for years. " * 12
OTHER = "A ship came into the harbour at night, without a light and without a sound. " * 12


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["split", "unified"])
async def shared(demo_model: str, request: pytest.FixtureRequest) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings(
        model=demo_model, slots=SLOTS, context_length=CONTEXT, batch_size=BATCH, unified_kv=request.param
    )
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(shared: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCppBackend]:
    async with watched(shared, monkeypatch) as backend:
        yield backend


ANY_SLOT = SlotOptions()


def question(i: int, max_tokens: int = 4, system: str = SYSTEM, slot: SlotOptions = ANY_SLOT) -> Request:
    return greedy(TextPrompt(f"{system}{i} and {i} is"), max_tokens, slot=slot)


async def prefix_length(backend: LlamaCppBackend, system: str = SYSTEM) -> int:
    return await backend.count_tokens(greedy(TextPrompt(system)))


def cached(got: Answer) -> int:
    start = got.frames[0].events[0]
    assert isinstance(start, Started)
    assert start.cached_tokens == got.completion.usage.cached_tokens
    return start.cached_tokens


# --- together ---------------------------------------------------------------------------------------------------------


async def test_those_who_arrive_together_compute_the_beginning_once(backend: LlamaCppBackend) -> None:
    length = await prefix_length(backend)
    before = backend.stats()
    answers = await asyncio.gather(*(answer(backend, question(i)) for i in range(SLOTS)))
    after = backend.stats()
    assert [cached(got) >= length - 1 for got in answers] == [False] + [True] * (SLOTS - 1)
    assert after.cached_tokens_total - before.cached_tokens_total == sum(map(cached, answers))
    assert after.steps_total - before.steps_total <= -(-length // BATCH) + 4 + 6
    assert all(len(got.tokens) == 4 for got in answers)
    for i, together in enumerate(answers):
        alone = await answer(backend, question(i, slot=SlotOptions(reuse=False)))
        await check_near_ties(backend, question(i), alone, together)


async def test_more_than_there_are_slots(backend: LlamaCppBackend) -> None:
    length = await prefix_length(backend)
    answers = await asyncio.gather(*(answer(backend, question(i, 2)) for i in range(3 * SLOTS)))
    assert sum(cached(got) >= length - 1 for got in answers) == 3 * SLOTS - 1


async def test_two_crowds_do_not_wait_for_each_other(backend: LlamaCppBackend) -> None:
    requests = [question(i, system=(SYSTEM, OTHER)[i % 2]) for i in range(4)]
    answers = await asyncio.gather(*(answer(backend, request) for request in requests))
    assert [cached(got) > 100 for got in answers] == [False, False, True, True]


@pytest.mark.parametrize("leaves_after", [0, 1, 2])
async def test_the_one_they_follow_is_cancelled(backend: LlamaCppBackend, leaves_after: int) -> None:
    length = await prefix_length(backend)
    before = backend.stats().steps_total
    leader = backend.generate(question(0))
    assert isinstance((await anext(leader)).events[0], Started)
    followers = [asyncio.create_task(answer(backend, question(i))) for i in (1, 2, 3)]
    while backend.stats().running < 4:
        await asyncio.sleep(0.001)
    for _ in range(leaves_after):
        assert isinstance((await anext(leader)).events[0], Progress)
    await leader.aclose()
    answers = await asyncio.gather(*followers)
    assert all(len(got.tokens) == 4 for got in answers)
    assert cached(answers[0]) < length, "it goes on where the other one left"
    assert [cached(got) >= length - 1 for got in answers[1:]] == [True, True]
    assert backend.stats().steps_total - before <= 2 * -(-length // BATCH) + 10


async def test_all_of_a_crowd_are_cancelled(backend: LlamaCppBackend) -> None:
    tasks = [asyncio.create_task(answer(backend, question(i, 50))) for i in range(SLOTS + 2)]
    while backend.stats().running < SLOTS:
        await asyncio.sleep(0.001)
    for task in tasks[::2] + tasks[1::2]:
        task.cancel()
    await asyncio.wait(tasks)
    await until(backend, running=0, within_s=10)
    assert len((await answer(backend, question(0))).tokens) == 4


# --- from slot to slot ------------------------------------------------------------------------------------------------


async def test_a_prefix_comes_from_a_busy_slot(backend: LlamaCppBackend) -> None:
    length = await prefix_length(backend)
    running = backend.generate(question(1, 200))
    async for frame in running:
        if frame.tokens:
            break
    assert cached(await answer(backend, question(2))) >= length - 1
    assert backend.stats().running == 1
    ending = [event async for frame in running for event in frame.events if isinstance(event, Finished)]
    assert ending[0].usage.completion_tokens == 200


async def test_an_idle_conversation_lends_its_beginning_and_goes_on(backend: LlamaCppBackend) -> None:
    length = await prefix_length(backend)
    first = await answer(backend, question(1, 60))
    assert cached(await answer(backend, question(2, 60))) >= length - 1
    turn = greedy(TextPrompt(f"{SYSTEM}1 and 1 is{first.choice.text} So"), 4)
    assert cached(await answer(backend, turn)) > length + 30, "nothing of the first one was overwritten"


async def test_a_conversation_that_left_its_slot_comes_back(backend: LlamaCppBackend) -> None:
    here = SlotOptions(id=0)
    first = await answer(backend, question(1, 20, slot=here))
    await answer(backend, question(1, 20, OTHER, here))
    runner, _ = parts(backend)
    assert runner.kv.prompts is not None
    assert len(runner.kv.prompts) == 1
    await asyncio.gather(*(answer(backend, greedy(TextPrompt(f"{i} is"), 300)) for i in range(SLOTS)))
    again = await answer(backend, question(1, 20))
    assert cached(again) == again.completion.usage.prompt_tokens - 1
    assert again.tokens == first.tokens


# --- wishes -----------------------------------------------------------------------------------------------------------


async def test_without_reuse_all_is_computed(backend: LlamaCppBackend) -> None:
    await answer(backend, question(1))
    got = await answer(backend, question(1, slot=SlotOptions(reuse=False)))
    assert cached(got) == 0
    together = await asyncio.gather(
        *(answer(backend, question(i, slot=SlotOptions(reuse=False))) for i in range(SLOTS - 1))
    )
    assert [cached(got) for got in together] == [0] * (SLOTS - 1)


async def test_a_wanted_slot_is_waited_for_and_others_pass(backend: LlamaCppBackend) -> None:
    runner, _ = parts(backend)
    holder = backend.generate(question(1, 200, slot=SlotOptions(id=3)))
    await anext(holder)
    wanting = asyncio.create_task(answer(backend, greedy(TextPrompt("Two is"), 4, slot=SlotOptions(id=3))))
    await until(backend, running=1, waiting=1, within_s=10)
    await answer(backend, greedy(TextPrompt("Other"), 4))
    assert not wanting.done()
    await holder.aclose()
    assert len((await wanting).tokens) == 4
    expected = await backend._tokens(greedy(TextPrompt("Two is")))
    assert runner.kv.slots[3].tokens[: len(expected)].tolist() == expected.tolist()


async def test_sharing_can_be_switched_off(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_step(monkeypatch)
    backend = LlamaCppBackend(
        LlamaCppSettings(model=demo_model, slots=3, context_length=CONTEXT, prefix_sharing=False, prompt_cache_mib=0)
    )
    await backend.start()
    answers = await asyncio.gather(*(answer(backend, question(i)) for i in range(3)))
    assert [cached(got) for got in answers] == [0, 0, 0]
    assert cached(await answer(backend, question(0))) > 0
    await backend.aclose()


# --- several choices --------------------------------------------------------------------------------------------------


async def test_several_choices_share_their_prompt(backend: LlamaCppBackend) -> None:
    request = greedy(TextPrompt(SYSTEM + "Then"), 12, n=3, sampling=Sampling(temperature=1.5, seed=7))
    before = backend.stats()
    frames = [frame async for frame in backend.generate(request)]
    after = backend.stats()
    events = [event for frame in frames for event in frame.events]
    starts = [event for event in events if isinstance(event, Started)]
    ends = {event.choice: event for event in events if isinstance(event, Finished)}
    assert starts == [events[0]]
    assert sorted(ends) == [0, 1, 2]
    assert {frame.choice for frame in frames} == {0, 1, 2}
    assert all(event.choice == frame.choice for frame in frames for event in frame.events)
    tokens = {i: [t for frame in frames if frame.choice == i for t in frame.tokens] for i in range(3)}
    assert all(len(tokens[i]) == ends[i].usage.completion_tokens == 12 for i in range(3))
    assert len({tuple(t) for t in tokens.values()}) == 3
    assert all(end.usage.cached_tokens == 0 for end in ends.values())
    assert after.prompt_tokens_total - before.prompt_tokens_total == starts[0].prompt_tokens
    assert after.steps_total - before.steps_total <= -(-starts[0].prompt_tokens // BATCH) + 12 + 3

    got = await answer(backend, request)
    assert got.completion.usage.completion_tokens == 36
    if not parts(backend)[1].unified:  # else the sums over the cache depend on where in it a sequence lies
        alone = await answer(backend, greedy(request.prompt, 12, sampling=Sampling(temperature=1.5, seed=9)))
        assert list(alone.tokens) == tokens[2], "choice i has the random numbers of seed + i"


async def test_choices_that_find_no_slot_wait(backend: LlamaCppBackend) -> None:
    streams = [backend.generate(greedy(TextPrompt(f"{i} is"), 300)) for i in range(SLOTS - 2)]
    for stream in streams:
        await anext(stream)
    got = await answer(backend, greedy(TextPrompt("Five is"), 6, n=SLOTS, sampling=Sampling(seed=1)))
    assert [choice.index for choice in got.completion.choices] == list(range(SLOTS))
    assert got.completion.usage.completion_tokens == 6 * SLOTS
    for stream in streams:
        await stream.aclose()


async def test_a_request_with_several_choices_is_cancelled(backend: LlamaCppBackend) -> None:
    for tokens in (0, 1, 20):
        stream = backend.generate(greedy(TextPrompt(SYSTEM), 100, n=SLOTS))
        async for frame in stream:
            tokens -= len(frame.tokens)
            if tokens <= 0:
                break
        await stream.aclose()
        await until(backend, running=0, within_s=10)


async def test_several_choices_of_nothing(backend: LlamaCppBackend) -> None:
    got = await answer(backend, greedy("Hi", 0, n=3))
    assert [choice.reason for choice in got.completion.choices] == ["length"] * 3


# --- the bindings underneath ------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["split", "unified"])
def context(model: Model, request: pytest.FixtureRequest) -> Iterator[Context]:
    context = Context(
        model,
        sequences=3,
        context_length=256,
        batch_size=256,
        micro_batch_size=256,
        threads=2,
        unified_kv=request.param,
    )
    yield context
    context.close()


def decode(context: Context, sequence: int, tokens: Tokens, at: int = 0) -> np.ndarray:
    batch = Batch(256)
    row = batch.add(tokens, sequence, at, logits=True)
    assert context.decode(batch) == 0
    return context.logits(row).copy()


async def test_copied_saved_and_restored_tokens_are_as_good_as_computed_ones(model: Model, context: Context) -> None:
    prompt = model.tokenize(SYSTEM, add_special=False, parse_special=False)[:150]
    whole = decode(context, 0, prompt)
    assert context.copy(0, 1, 100)
    assert (context.length(0), context.length(1)) == (150, 100)
    copied = decode(context, 1, prompt[100:], 100)
    state = np.empty(context.state_size(1), np.uint8)
    assert context.save(1, state) == len(state)
    context.forget(1)
    decode(context, 1, prompt[:5])
    assert context.restore(2, state) == len(state)
    assert context.length(2) == 150
    assert context.truncate(2, 149)
    restored = decode(context, 2, prompt[149:], 149)
    for logits in (copied, restored):
        assert np.corrcoef(whole, logits)[0, 1] > 0.995
        assert logits.argmax() == whole.argmax()
    assert context.restore(2, state[:1000]) < 1000


async def test_changes_that_wait_for_a_decode_are_left_alone(model: Model, context: Context) -> None:
    prompt = model.tokenize(SYSTEM, add_special=False, parse_special=False)[:60]
    decode(context, 0, prompt)
    assert context.copy(0, 1, 50)
    state = np.empty(context.state_size(1), np.uint8)
    if context.unified:
        assert not context.unsettled
        assert context.save(1, state) == len(state)
        return
    assert context.unsettled == {0, 1}
    for sequence in (0, 1):
        with pytest.raises(LlamaCppError, match="wait for the next decode"):
            context.save(sequence, state)
        with pytest.raises(LlamaCppError, match="wait for the next decode"):
            context.restore(sequence, state)
    decode(context, 1, prompt[50:], 50)
    assert context.save(1, np.empty(context.state_size(1), np.uint8)) > 0


async def test_impossible_copies_and_shifts_are_refused(model: Model, context: Context) -> None:
    prompt = model.tokenize(SYSTEM, add_special=False, parse_special=False)[:20]
    decode(context, 0, prompt)
    for source, target, length in ((0, 0, 5), (0, 1, 21), (0, 1, 0), (1, 2, 1), (0, 3, 5), (-1, 1, 5)):
        with pytest.raises(LlamaCppError):
            context.copy(source, target, length)
    for sequence, keep, count in ((0, 0, 0), (0, -1, 4), (0, 5, 16), (3, 0, 1)):
        with pytest.raises(LlamaCppError):
            context.shift(sequence, keep, count)
    context.shift(0, 4, 10)
    assert context.length(0) == 10
