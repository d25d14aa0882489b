"""Looks into an adapter's GGUF before llama.cpp does, for what would end the process there.

llama.cpp reports most of what can be wrong with an adapter, but takes the types of some values for granted, and of all
weights: it asserts the former and cannot multiply with whole numbers. A file that is cut or no GGUF is left to it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF's types of values that have a fixed size, in bytes."""

_EXPECTED = {
    "general.type": _STRING,
    "general.architecture": _STRING,
    "adapter.type": _STRING,
    "adapter.lora.alpha": _FLOAT32,
}
_NO_WEIGHTS = range(24, 29)
"""ggml's types of whole numbers, and of 64-bit floats."""


class _NotUnderstood(Exception):
    """Cut short, damaged, or newer than this."""


def check_adapter_file(path: Path) -> None:
    """`ValueError` says in one line why llama.cpp must not see the file."""
    try:
        with path.open("rb") as file:
            _check(file)
    except (struct.error, _NotUnderstood):
        return


def _check(file: BinaryIO) -> None:
    if file.read(4) != b"GGUF":
        raise _NotUnderstood
    version, tensors, values = _read(file, "<IQQ")
    if version not in (2, 3):
        raise _NotUnderstood
    for _ in range(values):
        key = _string(file)
        (kind,) = _read(file, "<I")
        if _EXPECTED.get(key, kind) != kind:
            raise ValueError(f"its value {key} is of the wrong type ({kind})")
        _skip(file, kind)
    for _ in range(tensors):
        name = _string(file)
        (dimensions,) = _read(file, "<I")
        *_, kind, _ = _read(file, f"<{_few(dimensions)}QIQ")
        if kind in _NO_WEIGHTS:
            raise ValueError(f"its tensor {name} is of a type ({kind}) that cannot be applied")


def _read(file: BinaryIO, format: str) -> tuple[int, ...]:
    return struct.unpack(format, file.read(struct.calcsize(format)))


def _string(file: BinaryIO) -> str:
    (size,) = _read(file, "<Q")
    if size > 1 << 24:
        raise _NotUnderstood
    return file.read(size).decode("utf-8", "replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _string(file)
    elif kind == _ARRAY:
        element, count = _read(file, "<IQ")
        if element in _SIZES:
            file.seek(_SIZES[element] * count, 1)
        else:
            for _ in range(count):
                _skip(file, element)
    elif kind in _SIZES:
        file.seek(_SIZES[kind], 1)
    else:
        raise _NotUnderstood


def _few(dimensions: int) -> int:
    if dimensions > 4:
        raise _NotUnderstood
    return dimensions
