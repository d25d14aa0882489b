"""What is found out about a model's files before they are loaded: damage, and memory that is not there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import psutil

from backends.base import BackendStartError
from backends.llamacpp.gguf_file import DamagedFile, GgufFile, read_gguf
from backends.llamacpp.settings import CacheType, LlamaCppSettings

log = logging.getLogger(__name__)

_BITS: dict[CacheType, float] = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "q5_1": 6,
    "q5_0": 5.5,
    "q4_1": 5,
    "q4_0": 4.5,
}
"""Of one number in the KV cache, its share of the scale of its block included."""

_REPACKED = frozenset({2, 8, 12, 20})
"""ggml's types that its CPU kernels rearrange: q4_0, q8_0, q4_K, iq4_nl."""


def check_files(paths: Sequence[Path], what: str) -> list[GgufFile]:
    """Headers of a model's files. `BackendStartError` for one that llama.cpp must not see."""
    files = []
    for path in paths:
        try:
            files.append(read_gguf(path))
        except DamagedFile as error:
            name = f"{path.name}: " if len(paths) > 1 else ""
            raise BackendStartError(f"{what}: {name}{error}") from None
    return files


def check_memory(files: Sequence[GgufFile], settings: LlamaCppSettings, *, repacks: bool) -> None:
    """Refuses a model on the CPU whose KV cache and rearranged weights alone are more than the memory that is free.

    Other weights are mapped: where there is no room for them they are read from the disk again, at every token; that
    is slow, and no failure. The size of the KV cache is only estimated where every layer has a plain one.
    """
    free = available_memory()
    cache = kv_cache_bytes(files[0], settings)
    tensors = [tensor for file in files for tensor in file.tensors]
    weights = sum(tensor.size or 0 for tensor in tensors)
    kept = sum(tensor.size or 0 for tensor in tensors if repacks and tensor.kind in _REPACKED)
    if cache + kept > free:
        raise BackendStartError(
            f"model {settings.model!r}: needs {_gib(cache + kept)} of memory ({_gib(kept)} for weights and "
            f"{_gib(cache)} for the KV cache), and {_gib(free)} are free: lower slots or context_length"
        )
    if cache + weights > free:
        log.warning(
            "model %r: its weights (%s) do not fit in the memory that is free (%s), and will be read from the disk "
            "again and again",
            settings.model,
            _gib(weights),
            _gib(free),
        )


def kv_cache_bytes(file: GgufFile, settings: LlamaCppSettings) -> int:
    """0 where there is none, and where it cannot be told: layers with states, a window or a compressed cache."""
    name = str(file.values.get("general.architecture"))

    def number(key: str) -> int:
        value = file.values.get(f"{name}.{key}", 0)
        return value if isinstance(value, int) else 0

    odd = ("ssm.", "attention.sliding_window", "attention.kv_lora_rank", "attention.recurrent", "wkv.", "shortconv.")
    if any(key.startswith(f"{name}.{part}") for key in file.kinds for part in odd):
        return 0
    if file.values.get(f"{name}.attention.causal") is False:  # it reads both ways, and generates nothing
        return 0
    layers, heads = number("block_count"), number("attention.head_count")
    by_layer = file.arrays.get(f"{name}.attention.head_count_kv")
    kv_heads = sum(by_layer) if by_layer else layers * (number("attention.head_count_kv") or heads)
    head = number("embedding_length") // heads if heads else 0
    keys = number("attention.key_length") or head
    values = number("attention.value_length") or head
    context = min(settings.context_length, number("context_length") or settings.context_length)
    tokens = settings.kv_size or settings.slots * context
    bits = kv_heads * (keys * _BITS[settings.cache_type_k] + values * _BITS[settings.cache_type_v])
    return int(tokens * bits / 8)


_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes this process can still take: the machine's, or what its container has left."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    if not limit.isdigit():  # "max"
        return free
    cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))  # counted as used, and given back
    return min(free, max(int(limit) - int(used) + cached, 0))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
