"""Looks into an adapter's GGUF before llama.cpp does, for what would end the process there.

llama.cpp reports most of what can be wrong with an adapter, but takes the types of some values for granted, and of all
weights: it asserts the former and cannot multiply with whole numbers.
"""

from __future__ import annotations

from pathlib import Path

from backends.llamacpp.gguf_file import FLOAT32, STRING, read_gguf

_EXPECTED = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": FLOAT32,
}
_NO_WEIGHTS = range(24, 29)
"""ggml's types of whole numbers, and of 64-bit floats."""


def check_adapter_file(path: Path) -> None:
    """`ValueError` says in one line why llama.cpp must not see the file."""
    file = read_gguf(path)
    for key, kind in file.kinds.items():
        if _EXPECTED.get(key, kind) != kind:
            raise ValueError(f"its value {key} is of the wrong type ({kind})")
    for tensor in file.tensors:
        if tensor.kind in _NO_WEIGHTS:
            raise ValueError(f"its tensor {tensor.name} is of a type ({tensor.kind}) that cannot be applied")
