"""Files that llama.cpp must not see, and models there is no memory for: found before loading, said in one line."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("gguf", reason="synthetic models are written with gguf")

from backends.base import BackendStartError
from backends.llamacpp import preflight
from backends.llamacpp.gguf_file import DamagedFile, GgufFile, Tensor, read_gguf
from backends.llamacpp.preflight import check_files, check_memory, kv_cache_bytes
from backends.llamacpp.settings import LlamaCppSettings
from tests.backends.llamacpp.synthetic import HEADS, LAYERS, WIDTH, write_decoder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("models"))


def changed(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return path


def test_a_good_file_is_read(good: Path) -> None:
    file = read_gguf(good)
    assert file.values["general.architecture"] == "llama"
    assert file.values["llama.block_count"] == LAYERS
    assert file.lengths["tokenizer.ggml.merges"] == 10
    sizes = [tensor.size for tensor in file.tensors]
    assert None not in sizes and sum(size or 0 for size in sizes) < good.stat().st_size
    check_files([good], "model 'm'")


def test_a_file_that_is_cut_anywhere_is_refused(good: Path, tmp_path: Path) -> None:
    whole = good.read_bytes()
    last = max(tensor.offset for tensor in read_gguf(good).tensors)
    assert last > len(whole) // 2
    for size in [*range(0, len(whole) - 64, 499), 1, 4, 8, 23, 24]:
        with pytest.raises(DamagedFile, match="incomplete|empty|not a GGUF"):
            read_gguf(changed(tmp_path, whole[:size]))


def test_a_file_with_a_wrong_byte_is_read_or_refused(good: Path, tmp_path: Path) -> None:
    whole, random = good.read_bytes(), Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.randrange(8_000)] = random.randrange(256)
        try:
            read_gguf(changed(tmp_path, bytes(damaged)))
        except DamagedFile as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("at", "bytes_", "says"),
    [
        (0, b"GGML", r"not a GGUF file \(it starts with b'GGML'\)"),
        (4, b"\x01\0\0\0", "GGUF version is 1"),
        (4, b"\0\0\0\x03", "GGUF version is 50331648"),
        (8, b"\xff" * 8, "incomplete"),
        (16, b"\xff" * 8, "incomplete"),
        (24, b"\xff" * 8, "incomplete"),
    ],
)
def test_what_is_wrong_is_said(good: Path, tmp_path: Path, at: int, bytes_: bytes, says: str) -> None:
    whole = good.read_bytes()
    with pytest.raises(BackendStartError, match=f"^model 'm': it.* {says}"):
        check_files([changed(tmp_path, whole[:at] + bytes_ + whole[at + len(bytes_) :])], "model 'm'")


def test_a_vocabulary_with_a_token_twice_would_end_the_process(good: Path, tmp_path: Path) -> None:
    whole, the = good.read_bytes(), (3).to_bytes(8, "little") + b"the"
    and_ = (3).to_bytes(8, "little") + b"and"
    assert whole.count(the) == whole.count(and_) == 1
    with pytest.raises(BackendStartError, match="its vocabulary has the token 'the' twice"):
        check_files([changed(tmp_path, whole.replace(and_, the))], "model 'm'")


def test_of_several_files_the_damaged_one_is_named(good: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendStartError, match=r"^model 'm': bad\.gguf: it is corrupted or incomplete"):
        check_files([good, changed(tmp_path, good.read_bytes()[:5000])], "model 'm'")


# --- memory --------------------------------------------------------------------


def settings(**options: object) -> LlamaCppSettings:
    return LlamaCppSettings.model_validate({"model": "m.gguf", **options})


def test_the_kv_cache_is_two_numbers_for_each_token_layer_and_head(good: Path) -> None:
    file = read_gguf(good)
    kv_heads = file.values["llama.attention.head_count_kv"]
    assert isinstance(kv_heads, int)
    per_token = LAYERS * kv_heads * (WIDTH // HEADS) * 2
    assert kv_cache_bytes(file, settings(slots=4, context_length=256)) == 4 * 256 * per_token * 2
    assert kv_cache_bytes(file, settings(slots=4, context_length=999_999)) == 4 * 1024 * per_token * 2
    assert kv_cache_bytes(file, settings(context_length=256, unified_kv=True, kv_size=512)) == 512 * per_token * 2
    q8 = settings(slots=1, context_length=256, cache_type_k="q8_0", cache_type_v="q8_0")
    assert kv_cache_bytes(file, q8) == int(256 * per_token * 8.5 / 8)


def test_layers_that_are_not_alike_are_added_up(good: Path) -> None:
    file = read_gguf(good)
    uneven = file._replace(arrays=file.arrays | {"llama.attention.head_count_kv": (1, 3)})
    assert kv_cache_bytes(uneven, settings(slots=1, context_length=256)) == 256 * 4 * (WIDTH // HEADS) * 2 * 2


@pytest.mark.parametrize("key", ["ssm.conv_kernel", "attention.sliding_window", "attention.kv_lora_rank"])
def test_of_caches_of_another_kind_nothing_is_said(good: Path, key: str) -> None:
    file = read_gguf(good)
    other = file._replace(kinds=file.kinds | {f"llama.{key}": 4})
    assert kv_cache_bytes(other, settings()) == 0


def test_a_model_that_reads_both_ways_has_none(tmp_path: Path) -> None:
    assert kv_cache_bytes(read_gguf(write_decoder(tmp_path, causal=False)), settings()) == 0


def model(kind: int, gib: int) -> GgufFile:
    return GgufFile({}, {}, {}, {}, [Tensor("w", (gib * 2**30 * 32 // 18, 1), kind, 0)])


def test_a_model_that_needs_more_than_is_free_is_refused_with_both_numbers(
    good: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: 8 * 2**30)
    check_memory([model(2, 7)], settings(), repacks=True)
    assert caplog.text == ""
    with pytest.raises(BackendStartError, match=r"needs 9\.0 GiB of memory .* and 8\.0 GiB are free"):
        check_memory([model(2, 9)], settings(), repacks=True)
    caplog.set_level(logging.WARNING)
    check_memory([model(2, 9)], settings(), repacks=False)
    assert "read from the disk" in caplog.text
    monkeypatch.setattr(preflight, "available_memory", lambda: 10_000)
    with pytest.raises(BackendStartError, match="for the KV cache"):
        check_memory([read_gguf(good)], settings(), repacks=False)


def test_a_containers_limit_counts_without_what_it_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_CGROUP", tmp_path)
    machine = preflight.available_memory()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 200000\ninactive_file 100000\n")
    assert preflight.available_memory() == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory() > 1_000_000 and machine > 1_000_000


# --- through the backend -------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("damage", ["cut", "architecture", "magic"])
async def test_a_model_that_cannot_be_loaded_is_one_line(good: Path, tmp_path: Path, damage: str) -> None:
    from backends.llamacpp.backend import LlamaCppBackend

    whole = good.read_bytes()
    data, says = {
        "cut": (whole[:-20_000], "corrupted or incomplete"),
        "architecture": (whole.replace(b"llama", b"lxama"), "unknown model architecture: 'lxama'"),
        "magic": (b"nope" + whole[4:], "is not a GGUF file"),
    }[damage]
    path = changed(tmp_path, data)
    with pytest.raises(BackendStartError, match=says) as caught:
        await LlamaCppBackend(settings(model=str(path))).start()
    assert str(caught.value).startswith(f"model {str(path)!r}: ") and "\n" not in str(caught.value)
