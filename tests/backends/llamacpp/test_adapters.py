"""LoRA: requests with different adapters at once, and nothing computed with one set is taken for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from pydantic import ValidationError

from backends.adapters import AdapterSet, adapter_set
from backends.base import BackendStartError
from backends.llamacpp.adapter_file import check_adapter_file
from backends.llamacpp.gguf_file import DamagedFile
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.turns import Turns
from protocols.errors import InvalidRequest
from protocols.request import LoraScale, Request, SlotOptions, TextPrompt
from tests.backends.contract import Answer, answer
from tests.backends.llamacpp.adapters import write_adapter
from tests.backends.llamacpp.helpers import check_near_ties, greedy, parts, watched

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Batch, LoraAdapter

SLOTS = 4
CONTEXT = 512
STORY = "The old mill stands by the river, and nobody has been there for years. " * 6
ONE, OTHER = ((0, 1.0),), ((1, 1.0),)

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{seed}.gguf", seed=seed) for seed in (1, 2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["split", "unified"])
async def shared(demo_model: str, files: list[Path], request: pytest.FixtureRequest) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings.model_validate(
        {
            "model": demo_model,
            "slots": SLOTS,
            "context_length": CONTEXT,
            "batch_size": 64,
            "unified_kv": request.param,
            "flash_attention": "on",  # a token has the same logits alone and among others
            "adapters": [{"path": str(file), "scale": 0} for file in files],
        }
    )
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(shared: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LlamaCppBackend]:
    await shared.set_adapters(())
    async with watched(shared, monkeypatch) as backend:
        yield backend


def with_(request: Request, *scales: tuple[int, float]) -> Request:
    return msgspec.structs.replace(request, lora=tuple(LoraScale(id, scale) for id, scale in scales))


def cached(got: Answer) -> int:
    return got.completion.usage.cached_tokens


@pytest.fixture
def steps(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> list[AdapterSet]:
    """The set of each decode that follows. All tokens of a decode are of requests with the set that is applied."""
    runner, context = parts(backend)
    seen: list[AdapterSet] = []
    applied: list[AdapterSet] = [runner._applied]
    names = {id(adapter): number for number, adapter in enumerate(runner._adapters)}
    decode, apply = context.decode, context.apply_adapters

    def checked(batch: Batch) -> int:
        if threading.current_thread().name != "llamacpp-engine":  # a test's own
            return decode(batch)
        slots = {int(sequence) for sequence in batch._seq[: batch.size]}
        owners = {task.choice.slot.id: task.adapters for task in runner._running if task.choice is not None}
        assert {owners[slot] for slot in slots} == {applied[-1]}
        seen.append(applied[-1])
        return decode(batch)

    def noted(adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        apply(adapters)
        applied.append(tuple((names[id(adapter)], scale) for adapter, scale in adapters))

    monkeypatch.setattr(context, "decode", checked)
    monkeypatch.setattr(context, "apply_adapters", noted)
    return seen


# --- sets and turns, without a model ----------------------------------------------------------------------------------


async def test_equal_sets_are_equal() -> None:
    scales = [LoraScale(2, 0.5), LoraScale(0, 1.0), LoraScale(1, 0.0)]
    assert adapter_set(scales, 3) == ((0, 1.0), (2, 0.5))
    assert adapter_set(reversed(scales), 3) == adapter_set(scales, 3)
    assert adapter_set([LoraScale(0, 1.0), LoraScale(0, 0.0)], 1) == (), "of doubles the last counts"
    assert adapter_set([LoraScale(0, 0.1)], 1) == adapter_set([LoraScale(0, 0.1 + 1e-10)], 1), "32 bits"
    assert adapter_set([LoraScale(0, 1e-300)], 1) == ()


@pytest.mark.parametrize("scale", [LoraScale(2, 1.0), LoraScale(-1, 0.0)])
async def test_an_unknown_adapter_is_refused(scale: LoraScale) -> None:
    with pytest.raises(InvalidRequest, match=f"no LoRA adapter {scale.id}") as caught:
        adapter_set([scale], 2)
    assert caught.value.param == "lora"


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -100.1])
async def test_a_scale_is_a_number_within_reason(scale: float) -> None:
    with pytest.raises(InvalidRequest, match="from -100 to 100") as caught:
        adapter_set([LoraScale(0, scale)], 1)
    assert caught.value.param == "lora"


async def test_sets_take_turns() -> None:
    turns = Turns()
    assert turns.next([]) is None
    assert [turns.next([ONE, ONE, OTHER, ()]) for _ in range(6)] == [ONE, OTHER, (), ONE, OTHER, ()]
    assert [turns.next([OTHER]) for _ in range(2)] == [OTHER, OTHER]
    assert [turns.next([ONE, OTHER]) for _ in range(3)] == [OTHER, ONE, OTHER], "one that is new again queues behind"


async def test_nobody_starves() -> None:
    turns = Turns()
    crowd: list[AdapterSet] = [((0, float(i)),) for i in range(1, 6)]
    waited = {adapters: 0 for adapters in crowd}
    for step in range(100):
        present = [adapters for i, adapters in enumerate(crowd) if i == 0 or step % (i + 1)]  # they come and go
        chosen = turns.next(present)
        for adapters in present:
            waited[adapters] = 0 if adapters == chosen else waited[adapters] + 1
        assert waited[crowd[0]] <= len(crowd)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.model
async def test_a_scale_of_nothing_is_no_adapter(backend: LlamaCppBackend) -> None:
    request = greedy("Tell me a story about a fox.")
    plain, zero, one = [await answer(backend, with_(request, *scales)) for scales in ((), ((0, 0.0),), ONE)]
    assert zero.tokens == plain.tokens
    assert one.tokens != plain.tokens
    assert cached(zero) > 0, "what was computed without adapters is good for both"
    assert cached(one) == 0


@pytest.mark.model
async def test_scales_of_the_request_and_of_the_model(backend: LlamaCppBackend) -> None:
    request = greedy("Tell me a story about a fox.")
    sets: list[AdapterSet] = [(), ONE, OTHER, ((0, 1.0), (1, 0.5)), ((0, -1.5),)]
    for scales in sets:  # from here on, all find their prompt cached: the same steps give the same tokens
        await answer(backend, with_(request, *scales))
    own = [await answer(backend, with_(request, *scales)) for scales in sets]
    assert len({got.tokens for got in own}) == len(sets)
    for scales, expected in zip(sets, own, strict=True):
        await backend.set_adapters([LoraScale(id, scale) for id, scale in scales])
        assert [adapter.scale for adapter in backend.adapters()] == [dict(scales).get(id, 0.0) for id in (0, 1)]
        got = await answer(backend, request)
        assert got.tokens == expected.tokens
        assert cached(got) == got.completion.usage.prompt_tokens - 1
    assert (await answer(backend, with_(request))).tokens == own[0].tokens, "those that are not listed get 0"


@pytest.mark.model
async def test_the_list(backend: LlamaCppBackend, files: list[Path]) -> None:
    await backend.set_adapters([LoraScale(1, 0.25)])
    listed = [(a.id, a.path, a.scale, a.task_name, a.prompt_prefix) for a in backend.adapters()]
    assert listed == [(0, str(files[0]), 0.0, "task 1", "say: "), (1, str(files[1]), 0.25, "task 2", "say: ")]


@pytest.mark.model
async def test_what_is_set_is_for_requests_from_there_on(backend: LlamaCppBackend, steps: list[AdapterSet]) -> None:
    request = greedy("Tell me a story about a fox.", 24)
    running = asyncio.create_task(answer(backend, request))
    while not steps:
        await asyncio.sleep(0)
    await backend.set_adapters([LoraScale(0, 1.0)])
    new = await answer(backend, request)
    old = await running
    assert set(steps) == {(), ONE}
    assert old.tokens != new.tokens
    for got, scales in ((old, ()), (new, ONE)):
        alone = await answer(backend, with_(request, *scales))
        if scales == ():
            await check_near_ties(backend, request, alone, got)
        else:
            assert alone.tokens[:2] == got.tokens[:2]


@pytest.mark.model
@pytest.mark.parametrize("scales", [((2, 1.0),), ((0, float("nan")),)])
async def test_wrong_scales_fail_alone(backend: LlamaCppBackend, scales: AdapterSet) -> None:
    beside = asyncio.create_task(answer(backend, greedy("Hi", 4)))
    with pytest.raises(InvalidRequest) as caught:
        await answer(backend, with_(greedy("Hi", 4), *scales))
    assert caught.value.param == "lora"
    with pytest.raises(InvalidRequest):
        await backend.set_adapters([LoraScale(id, scale) for id, scale in scales])
    assert [adapter.scale for adapter in backend.adapters()] == [0.0, 0.0]
    assert len((await beside).tokens) == 4


@pytest.mark.model
async def test_the_largest_scales_only_spoil_their_own_answer(backend: LlamaCppBackend) -> None:
    request = greedy("Name a colour.", 4)
    expected = await answer(backend, request)
    for scale in (100.0, -100.0):
        for temperature in (0.0, 1.0):
            sampling = msgspec.structs.replace(greedy("").sampling, temperature=temperature)
            await answer(backend, with_(greedy("Name a colour.", 4, sampling=sampling), (0, scale)))
    await check_near_ties(backend, request, expected, await answer(backend, request))


# --- several sets at once ---------------------------------------------------------------------------------------------


@pytest.mark.model
async def test_sets_at_once_answer_as_they_do_alone(backend: LlamaCppBackend, steps: list[AdapterSet]) -> None:
    """More requests than slots, prompts that begin the same, two sets and none."""
    requests = [
        with_(greedy(TextPrompt(f"{STORY}{i} and {i} is"), 12), *scales)
        for i, scales in enumerate([(), ONE, OTHER, ONE, (), OTHER, ONE])
    ]
    answers = await asyncio.gather(*(answer(backend, request) for request in requests))
    switches = sum(one != other for one, other in zip(steps, steps[1:], strict=False))
    assert set(steps) == {(), ONE, OTHER}
    assert switches > 20, "all of them go on together"
    runner, _ = parts(backend)
    for request, together in zip(requests, answers, strict=True):
        alone = await answer(backend, msgspec.structs.replace(request, slot=SlotOptions(reuse=False)))
        runner._apply(adapter_set(request.lora or (), 2))
        await check_near_ties(backend, request, alone, together)


@pytest.mark.model
async def test_a_set_that_generates_does_not_wait_for_anothers_long_prompt(
    backend: LlamaCppBackend, steps: list[AdapterSet]
) -> None:
    stream = backend.generate(with_(greedy("Tell me a story about a fox.", 200), *ONE))
    async for frame in stream:
        if frame.tokens:
            break
    steps.clear()
    newcomer = asyncio.create_task(answer(backend, greedy(TextPrompt(STORY * 3), 1)))
    tokens = 0
    async for frame in stream:
        tokens += len(frame.tokens)
        if newcomer.done():
            break
    await stream.aclose()
    assert len((await newcomer).tokens) == 1
    turns = steps[steps.index(()) :]
    assert all(one != other for one, other in zip(turns, turns[1:], strict=False) if () in (one, other)), "in turns"
    assert tokens >= turns.count(()) - 1


# --- nothing is reused across sets ------------------------------------------------------------------------------------


@pytest.mark.model
async def test_no_prefix_is_taken_from_another_set(backend: LlamaCppBackend) -> None:
    prompt = greedy(TextPrompt(STORY + "Then"), 2)
    assert [cached(await answer(backend, with_(prompt, *scales))) for scales in ((), ONE, OTHER)] == [0, 0, 0]
    again = [await answer(backend, with_(prompt, *scales)) for scales in (OTHER, (), ONE)]
    assert all(cached(got) == got.completion.usage.prompt_tokens - 1 for got in again)


@pytest.mark.model
async def test_nobody_follows_another_set(backend: LlamaCppBackend) -> None:
    requests = [with_(greedy(TextPrompt(f"{STORY}{i}"), 2), *scales) for i, scales in enumerate([(), ONE, (), ONE])]
    answers = await asyncio.gather(*(answer(backend, request) for request in requests))
    assert [cached(got) > 0 for got in answers] == [False, False, True, True]


@pytest.mark.model
async def test_a_slot_is_emptied_for_another_set(backend: LlamaCppBackend) -> None:
    """And its conversation comes back from the prompt cache, for its own set only."""
    only = SlotOptions(id=1)
    prompt = greedy(TextPrompt(STORY + "Then"), 2, slot=only)
    assert cached(await answer(backend, prompt)) == 0
    assert cached(await answer(backend, with_(prompt, *ONE))) == 0
    back = await answer(backend, with_(prompt))
    assert cached(back) == back.completion.usage.prompt_tokens - 1
    runner, _ = parts(backend)
    assert runner.kv.prompts is not None
    assert [entry.adapters for entry in runner.kv.prompts] == [ONE]
    assert cached(await answer(backend, with_(prompt, *OTHER))) == 0
    assert {entry.adapters for entry in runner.kv.prompts} == {ONE, ()}


# --- starting ---------------------------------------------------------------------------------------------------------


async def test_settings() -> None:
    for adapter in ({"path": ""}, {"path": "a", "scale": "nan"}, {"path": "a", "weight": 1}, {"scale": 1}):
        with pytest.raises(ValidationError):
            LlamaCppSettings.model_validate({"model": "m", "adapters": [adapter]})


async def start_with(demo_model: str, *adapters: Path | str) -> None:
    listed = [{"path": str(path)} for path in adapters]
    await LlamaCppBackend(
        LlamaCppSettings.model_validate({"model": demo_model, "slots": 1, "adapters": listed})
    ).start()


@pytest.mark.model
async def test_a_bad_adapter_is_one_line(demo_model: str, tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "good.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:20_000])
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"GGUF" + b"\xff" * 4096)
    reasons = {
        str(cut): "corrupted or incomplete",
        str(noise): "version",
        str(tmp_path / "none.gguf"): "there is no file",
        str(write_adapter(tmp_path / "arch.gguf", architecture="qwen2")): "arch",
        str(write_adapter(tmp_path / "shape.gguf", inputs=64)): "wrong base model",
        str(write_adapter(tmp_path / "alora.gguf", invoked_by=(5, 6))): "aLoRA",
        demo_model: "adapter",
    }
    for source, reason in reasons.items():
        with pytest.raises(BackendStartError, match=reason) as caught:
            await start_with(demo_model, good, source)
        assert f"adapter {source!r}" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.model
async def test_adapters_apply_from_the_start(demo_model: str, files: list[Path]) -> None:
    answers = []
    for scale in (0.0, 1.0):
        settings = LlamaCppSettings.model_validate(
            {"model": demo_model, "slots": 1, "adapters": [{"path": str(files[0]), "scale": scale}]}
        )
        backend = LlamaCppBackend(settings)
        await backend.start()
        answers.append((await answer(backend, greedy("Tell me a story about a fox."))).tokens)
        await backend.aclose()
    assert answers[0] != answers[1]


@pytest.mark.model
async def test_what_would_end_the_process_is_found_before(demo_model: str, tmp_path: Path) -> None:
    """llama.cpp asserts the types of values, and cannot multiply with weights that are whole numbers."""
    whole = write_adapter(tmp_path / "good.gguf").read_bytes()
    check_adapter_file(tmp_path / "good.gguf")
    key = b"adapter.lora.alpha"
    at = whole.index(key) + len(key)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(whole[:at] + (4).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(BackendStartError, match=r"bad.gguf': its value adapter.lora.alpha is of the wrong type \(4\)"):
        await start_with(demo_model, bad)
    name = b"blk.3.attn_q.weight.lora_a"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    bad.write_bytes(whole[:at] + (26).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(BackendStartError, match=r"its tensor blk.3.attn_q.weight.lora_a is of a type \(26\)"):
        await start_with(demo_model, bad)


async def test_files_that_are_cut_are_refused(tmp_path: Path) -> None:
    whole = write_adapter(tmp_path / "good.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, 2500, 7):
        cut.write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            check_adapter_file(cut)
