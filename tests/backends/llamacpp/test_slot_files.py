"""Slots in files: what is saved comes back, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from backends.base import BackendStartError
from backends.llamacpp import slot_files
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.slot_files import Header
from protocols.calls import SlotState
from protocols.errors import InternalError, InvalidRequest, NotSupported, Overloaded, Unavailable
from protocols.request import LoraScale, Request, Sampling, SlotOptions, TextPrompt
from tests.backends.contract import Answer, answer, until
from tests.backends.llamacpp.adapters import write_adapter
from tests.backends.llamacpp.helpers import check_every_step, forget, greedy, parts

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend

SLOTS = 3
CONTEXT = 256
STORY = "The old mill stands by the river, and nobody has been there for years. " * 4
TOKENS = np.arange(5, dtype=np.int32)
STATE = np.arange(200, dtype=np.uint8)
HEADER = Header("model", "layout", (("adapter", 0.5),), len(TOKENS), len(STATE))

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


# --- the file, without a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "slot-1.bin", ".hidden", "ü 日本", "x" * 255])
async def test_names(name: str) -> None:
    slot_files.check_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "../x", "a\\b", "a\0b", "a\nb", "x" * 256, "ü" * 128, "\ud800"]
)
async def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        slot_files.check_name(name)
    assert caught.value.param == "filename"


async def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    size = slot_files.write(path, HEADER, TOKENS, STATE)
    assert size == path.stat().st_size
    saved, read = slot_files.read(path, "model", "layout")
    assert read == size
    assert (saved.tokens.tolist(), saved.state.tolist()) == (TOKENS.tolist(), STATE.tolist())
    assert saved.adapters == HEADER.adapters
    assert os.listdir(tmp_path) == ["slot"]


async def test_every_changed_byte_and_every_shorter_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    slot_files.write(path, HEADER, TOKENS, STATE)
    whole = path.read_bytes()
    for i in range(len(whole)):
        for damaged in (whole[:i], whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(InvalidRequest) as caught:
                slot_files.read(path, "model", "layout")
            assert caught.value.param == "filename"
    path.write_bytes(whole + b"x")
    with pytest.raises(InvalidRequest, match="damaged"):
        slot_files.read(path, "model", "layout")


async def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    slot_files.write(path, HEADER, TOKENS, STATE)
    with pytest.raises(InvalidRequest, match="another model"):
        slot_files.read(path, "other", "layout")
    with pytest.raises(InvalidRequest, match="saved with layout; here are other"):
        slot_files.read(path, "model", "other")
    (tmp_path / "text").write_text("Hello")
    with pytest.raises(InvalidRequest, match="not a saved slot"):
        slot_files.read(tmp_path / "text", "model", "layout")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none", "."):
        with pytest.raises(InvalidRequest, match="no readable file"):
            slot_files.read(tmp_path / name, "model", "layout")


async def test_fingerprints(tmp_path: Path) -> None:
    data = bytearray(os.urandom(1 << 21))
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(data)
    other.write_bytes(data)
    assert slot_files.fingerprint(one) == slot_files.fingerprint(other)
    other.write_bytes(data + b"x")
    assert slot_files.fingerprint(one) != slot_files.fingerprint(other)
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    assert slot_files.fingerprint(one) != slot_files.fingerprint(other)


async def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slot"
    slot_files.write(path, HEADER, TOKENS, STATE)
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        slot_files.write(path, HEADER, TOKENS[:2], STATE)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["slot"]


# --- slots of a model -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(demo_model: str, folder: Path | None, **settings: Any) -> AsyncIterator[LlamaCppBackend]:
    values = {"slots": SLOTS, "context_length": CONTEXT, "slot_save_path": str(folder) if folder else None} | settings
    backend = LlamaCppBackend(LlamaCppSettings(model=demo_model, **values))
    await backend.start()
    yield backend
    await until(backend, running=0, within_s=10)
    await backend.check_health()
    await backend.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["split", "unified"])
async def shared(
    demo_model: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[LlamaCppBackend, Path]]:
    folder = tmp_path_factory.mktemp("slots")
    adapters = [{"path": str(write_adapter(folder.parent / f"{request.param}.gguf")), "scale": 0}]
    async with started(demo_model, folder, unified_kv=request.param, adapters=adapters) as backend:
        yield backend, folder


@pytest.fixture
def folder(shared: tuple[LlamaCppBackend, Path]) -> Path:
    return shared[1]


@pytest_asyncio.fixture(loop_scope="module")
async def backend(
    shared: tuple[LlamaCppBackend, Path], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LlamaCppBackend]:
    backend, folder = shared
    forget(backend)
    for file in folder.iterdir():
        file.unlink()
    check_every_step(monkeypatch)
    yield backend
    await until(backend, running=0, within_s=10)
    parts(backend)[0].check_integrity()


def in_slot(id: int, max_tokens: int = 8, text: str = STORY, **fields: Any) -> Request:
    return greedy(TextPrompt(text), max_tokens, slot=SlotOptions(id=id), **fields)


def cached(got: Answer) -> int:
    return got.completion.usage.cached_tokens


async def held(backend: LlamaCppBackend) -> list[int]:
    return [state.cached_tokens for state in await backend.slots()]


@pytest.mark.model
async def test_a_saved_slot_comes_back(backend: LlamaCppBackend, folder: Path) -> None:
    first = await answer(backend, in_slot(0))
    prompt_tokens = first.completion.usage.prompt_tokens
    again = await answer(backend, in_slot(0))
    saved = await backend.save_slot(0, "story")
    assert saved.tokens == prompt_tokens + 7, "the last token of an answer is not computed"
    assert saved.bytes == (folder / "story").stat().st_size
    assert (saved.slot, saved.filename) == (0, "story")
    assert await held(backend) == [saved.tokens, 0, 0], "saving changes nothing"
    forget(backend)
    assert await held(backend) == [0, 0, 0]
    restored = await backend.restore_slot(2, "story")
    assert (restored.tokens, restored.bytes) == (saved.tokens, saved.bytes)
    assert await held(backend) == [0, 0, saved.tokens]
    got = await answer(backend, in_slot(2))
    assert cached(got) == prompt_tokens - 1
    assert got.tokens == again.tokens


@pytest.mark.model
async def test_a_restored_slot_is_a_source_for_others(backend: LlamaCppBackend) -> None:
    first = await answer(backend, in_slot(0))
    await backend.save_slot(0, "story")
    forget(backend)
    await backend.restore_slot(1, "story")
    got = await answer(backend, in_slot(2, text=STORY + "Then"))
    assert cached(got) >= first.completion.usage.prompt_tokens - 1


@pytest.mark.model
async def test_what_is_saved_into_is_overwritten_and_what_is_restored_over_is_kept(backend: LlamaCppBackend) -> None:
    await answer(backend, in_slot(0, text="A"))
    await backend.save_slot(0, "story")
    first = await answer(backend, in_slot(0))
    assert (await backend.save_slot(0, "story")).tokens > 50
    other = await answer(backend, in_slot(1, text="Another one. " * 20))
    await backend.restore_slot(1, "story")
    assert (await held(backend))[1] == first.completion.usage.prompt_tokens + 7
    got = await answer(backend, in_slot(1, text="Another one. " * 20))
    assert cached(got) == other.completion.usage.prompt_tokens - 1, "from the prompt cache"


@pytest.mark.model
async def test_an_empty_slot(backend: LlamaCppBackend) -> None:
    assert (await backend.save_slot(0, "nothing")).tokens == 0
    await answer(backend, in_slot(1))
    assert (await backend.restore_slot(1, "nothing")).tokens == 0
    assert await held(backend) == [0, 0, 0]
    assert await backend.erase_slot(1) == 0


@pytest.mark.model
async def test_erasing(backend: LlamaCppBackend) -> None:
    got = await answer(backend, in_slot(0))
    assert await backend.erase_slot(0) == got.completion.usage.prompt_tokens + 7
    assert cached(await answer(backend, in_slot(0))) == 0


@pytest.mark.model
async def test_the_adapters_are_part_of_it(backend: LlamaCppBackend) -> None:
    lora = (LoraScale(0, 0.5),)
    await answer(backend, in_slot(0, lora=lora))
    await backend.save_slot(0, "story")
    forget(backend)
    await backend.restore_slot(1, "story")
    assert cached(await answer(backend, in_slot(2))) == 0
    assert cached(await answer(backend, in_slot(1, lora=lora))) > 50


@pytest.mark.model
async def test_what_cannot_be_restored_leaves_the_slot_empty(backend: LlamaCppBackend, folder: Path) -> None:
    await answer(backend, in_slot(0))
    await backend.save_slot(0, "story")
    whole = (folder / "story").read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "foreign": b"GGUF" + bytes(1000),
        "empty": b"",
    }
    for name, data in damaged.items():
        (folder / name).write_bytes(data)
    for name in (*damaged, "none"):
        await answer(backend, in_slot(1, 2))
        with pytest.raises(InvalidRequest) as caught:
            await backend.restore_slot(1, name)
        assert caught.value.param == "filename"
        assert name in caught.value.message
        assert (await held(backend))[1] == 0
        assert len((await answer(backend, in_slot(1, 2))).tokens) == 2


@pytest.mark.model
async def test_a_state_that_llama_cpp_refuses(backend: LlamaCppBackend, folder: Path) -> None:
    """Whole, and by its header of this model, yet not a state of this context."""
    await answer(backend, in_slot(0))
    await backend.save_slot(0, "story")
    store = backend._loaded.generating.slot_store  # type: ignore[union-attr]
    assert store is not None
    saved, _ = slot_files.read(folder / "story", store._model, store._layout)
    for state in (saved.state[:-50], saved.state[:3], np.zeros(500, np.uint8), saved.state[::-1].copy()):
        header = Header(store._model, store._layout, (), len(saved.tokens), len(state))
        slot_files.write(folder / "story", header, saved.tokens, state)
        with pytest.raises(InvalidRequest, match="does not fit"):
            await backend.restore_slot(1, "story")
        assert (await held(backend))[1] == 0
    header = Header(store._model, store._layout, (), len(saved.tokens) - 1, len(saved.state))
    slot_files.write(folder / "story", header, saved.tokens[:-1], saved.state)
    with pytest.raises(InvalidRequest, match="does not fit"):
        await backend.restore_slot(1, "story")
    many = np.zeros(10_000, np.int32)
    slot_files.write(folder / "story", Header(store._model, store._layout, (), 10_000, 200), many, STATE)
    with pytest.raises(InvalidRequest, match="10000 tokens are too many"):
        await backend.restore_slot(1, "story")
    assert len((await answer(backend, in_slot(1))).tokens) == 8


@pytest.mark.model
@pytest.mark.parametrize("name", ["", "..", "a/b", "../slots/x", "a\0"])
async def test_names_are_checked(backend: LlamaCppBackend, name: str) -> None:
    for call in (backend.save_slot, backend.restore_slot):
        with pytest.raises(InvalidRequest) as caught:
            await call(0, name)
        assert caught.value.param == "filename"


@pytest.mark.model
@pytest.mark.parametrize("slot", [-1, SLOTS])
async def test_there_must_be_such_a_slot(backend: LlamaCppBackend, slot: int) -> None:
    for call in (backend.save_slot(slot, "x"), backend.restore_slot(slot, "x"), backend.erase_slot(slot)):
        with pytest.raises(InvalidRequest) as caught:
            await call
        assert caught.value.param == "id_slot"


@pytest.mark.model
async def test_a_full_disk_is_a_clean_error(
    backend: LlamaCppBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answer(backend, in_slot(0))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(InternalError):
            await backend.save_slot(0, "story")
    assert list(folder.iterdir()) == []
    assert (await backend.save_slot(0, "story")).tokens > 50
    (folder / "folder").mkdir()
    with pytest.raises(InvalidRequest, match="is a folder"):
        await backend.save_slot(0, "folder")
    (folder / "folder").rmdir()


# --- beside running requests ------------------------------------------------------------------------------------------


@pytest.mark.model
async def test_a_busy_slot_is_waited_for_and_nobody_else(backend: LlamaCppBackend) -> None:
    stream = backend.generate(in_slot(0, 100))
    await anext(stream)
    saving, erasing = asyncio.create_task(backend.save_slot(0, "story")), asyncio.create_task(backend.erase_slot(0))
    cancelled = asyncio.create_task(backend.erase_slot(0))
    assert len((await answer(backend, in_slot(1, 4))).tokens) == 4, "others run"
    assert await backend.erase_slot(1) > 0
    assert not saving.done()
    assert not erasing.done()
    cancelled.cancel()
    rest = [frame async for frame in stream]
    saved, erased = await saving, await erasing
    tokens = sum(len(frame.tokens) for frame in rest)
    assert tokens == 100
    assert saved.tokens == erased > 100, "in the order they came"
    with pytest.raises(asyncio.CancelledError):
        await cancelled


@pytest.mark.model
async def test_a_slot_whose_copy_waits_for_a_step_can_be_saved(backend: LlamaCppBackend) -> None:
    """A request that is cancelled between the copy of its beginning and its first step leaves that behind."""
    first = await answer(backend, in_slot(0))
    runner, context = parts(backend)
    assert context.copy(0, 1, 50)
    runner.kv.slots[1].replace(runner.kv.slots[0].tokens[:50])
    if context.unified:
        runner.kv.slots[1].borrowed = runner.kv.slots[1].tied = runner.kv.slots[0].tied = 50
    for slot, tokens in ((0, first.completion.usage.prompt_tokens + 7), (1, 50)):
        assert (await backend.save_slot(slot, "story")).tokens == tokens
        runner.check_integrity()
    forget(backend)
    await backend.restore_slot(2, "story")
    assert cached(await answer(backend, in_slot(2))) == 50


@pytest.mark.model
async def test_files_are_written_beside_the_steps(backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    await answer(backend, in_slot(0))
    gate = threading.Event()
    write = slot_files.write

    def slow(*args: Any) -> int:
        gate.wait()
        return write(*args)

    monkeypatch.setattr(slot_files, "write", slow)
    saving = asyncio.create_task(backend.save_slot(0, "story"))
    assert len((await answer(backend, in_slot(0, 4))).tokens) == 4
    assert not saving.done()
    gate.set()
    assert (await saving).tokens > 50


@pytest.mark.model
async def test_what_slots_show(backend: LlamaCppBackend) -> None:
    await answer(backend, in_slot(2, 4))
    stream = backend.generate(in_slot(0, 100, sampling=Sampling(temperature=0.5, seed=7, top_k=3)))
    async for frame in stream:
        if frame.tokens:
            break
    states = await backend.slots()
    await stream.aclose()
    assert [(state.id, state.context_length) for state in states] == [(i, CONTEXT) for i in range(SLOTS)]
    busy, empty, idle = states
    assert (empty, idle.cached_tokens > 50, idle.request) == (SlotState(1, CONTEXT, 0), True, "")
    assert (busy.request, busy.max_tokens) == ("test", 100)
    assert busy.processed_tokens == busy.prompt_tokens == await backend.count_tokens(in_slot(0))
    assert busy.generated_tokens >= 1
    assert busy.cached_tokens == busy.prompt_tokens + busy.generated_tokens - 1
    assert busy.sampling is not None
    assert (busy.sampling.temperature, busy.sampling.seed, busy.sampling.top_k) == (0.5, 7, 3)
    assert busy.sampling.top_p == 0.95, "what the request left open too"


# --- other backends ---------------------------------------------------------------------------------------------------


@pytest.mark.model
async def test_without_a_folder(demo_model: str, tmp_path: Path) -> None:
    async with started(demo_model, None) as backend:
        for call in (backend.save_slot, backend.restore_slot):
            with pytest.raises(NotSupported, match="slot_save_path"):
                await call(0, "x")
        assert await backend.erase_slot(0) == 0
    with pytest.raises(BackendStartError, match="slot_save_path: there is no folder"):
        await LlamaCppBackend(LlamaCppSettings(model=demo_model, slot_save_path=str(tmp_path / "none"))).start()


@pytest.mark.model
async def test_another_process_reads_it_if_its_cache_is_alike(demo_model: str, tmp_path: Path) -> None:
    adapters = [str(write_adapter(tmp_path / f"{seed}.gguf", seed=seed)) for seed in (1, 2)]
    listed = [{"path": path, "scale": 0} for path in adapters]
    async with started(demo_model, tmp_path, adapters=listed) as backend:
        await answer(backend, in_slot(0))
        await backend.save_slot(0, "plain")
        await answer(backend, in_slot(1, lora=(LoraScale(1, 1.0),)))
        await backend.save_slot(1, "adapted")
    async with started(demo_model, tmp_path, adapters=listed[1:]) as backend:
        await backend.restore_slot(0, "adapted")
        await backend.restore_slot(1, "plain")
        assert cached(await answer(backend, in_slot(0, lora=(LoraScale(0, 1.0),)))) > 50, "it has another number now"
        assert cached(await answer(backend, in_slot(1))) > 50
    async with started(demo_model, tmp_path, cache_type_k="q8_0") as backend:
        with pytest.raises(InvalidRequest, match="3 KV caches of f16 keys .*; here are 3 KV caches of q8_0 keys"):
            await backend.restore_slot(0, "plain")
    async with started(demo_model, tmp_path) as backend:
        with pytest.raises(InvalidRequest, match="LoRA adapter that this model does not have"):
            await backend.restore_slot(0, "adapted")
    async with started(demo_model, tmp_path, flash_attention="on") as backend:
        with pytest.raises(InvalidRequest, match="flash attention off; here are 3 .* flash attention on"):
            await backend.restore_slot(0, "plain")


@pytest.mark.model
async def test_no_room_in_a_common_cache(demo_model: str, tmp_path: Path) -> None:
    async with started(demo_model, tmp_path, unified_kv=True, kv_size=CONTEXT, slots=2) as backend:
        await answer(backend, in_slot(0))
        await answer(backend, in_slot(0, 40))
        saved = await backend.save_slot(0, "story")
        await answer(backend, in_slot(0, text="Something else. " * 55))
        await backend.restore_slot(1, "story")
        assert await held(backend) == [0, saved.tokens], "the idle one made room"
        stream = backend.generate(in_slot(0, text="Something else. " * 55, max_tokens=60))
        async for frame in stream:
            if frame.tokens:
                break
        with pytest.raises(Overloaded, match=f"no room for {saved.tokens} tokens") as full:
            await backend.restore_slot(1, "story")
        assert full.value.retry_after_s
        await stream.aclose()


@pytest.mark.model
async def test_those_who_wait_hear_of_the_end(demo_model: str, tmp_path: Path) -> None:
    backend = LlamaCppBackend(
        LlamaCppSettings(model=demo_model, slots=1, context_length=CONTEXT, slot_save_path=str(tmp_path))
    )
    await backend.start()
    stream = backend.generate(in_slot(0, 200))
    await anext(stream)
    waiting = asyncio.create_task(backend.save_slot(0, "story"))
    await asyncio.sleep(0)
    await backend.aclose()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await backend.slots()
    await stream.aclose()
    assert msgspec.json.encode(list(tmp_path.iterdir())) == b"[]"
