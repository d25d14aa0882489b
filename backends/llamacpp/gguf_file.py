"""Reads what a GGUF file says about itself, before llama.cpp does: one whose vocabulary is damaged ends the process
there, and of others this says more about what is wrong.

The format, version 3 (2 is the same): `GGUF`, version, counts of tensors and of values; the values, each a key, a type
and what it is; the tensors, each a name, its dimensions, type and place; then, aligned, the tensors' data.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

Scalar = int | float | bool | str

STRING, ARRAY, FLOAT32 = 8, 9, 6
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of values that have a fixed size."""

_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}
"""ggml's types of weights: numbers in a block, and its bytes."""

_TOKENS = "tokenizer.ggml.tokens"
_SMALL_ARRAY = 1024
_MOST_DIMENSIONS = 4


class DamagedFile(ValueError):
    """One line about what is wrong with the file."""


class Tensor(NamedTuple):
    """`offset` counts from where the data begins. `size` is in bytes; None for a type newer than this."""

    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int

    @property
    def size(self) -> int | None:
        if self.kind not in _BLOCKS:
            return None
        numbers, size = _BLOCKS[self.kind]
        total = 1
        for dimension in self.dimensions:
            total *= dimension
        return -(-total // numbers) * size


class GgufFile(NamedTuple):
    """`kinds` are the types of all values; of arrays, those of up to 1024 numbers are read, and the lengths of all."""

    kinds: dict[str, int]
    values: dict[str, Scalar]
    arrays: dict[str, tuple[float, ...]]
    lengths: dict[str, int]
    tensors: list[Tensor]


def read_gguf(path: Path) -> GgufFile:
    """`DamagedFile` if it is none, is cut off, or places a tensor outside of itself."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except (struct.error, UnicodeDecodeError):
        raise DamagedFile("it is corrupted or incomplete: what it says about itself breaks off") from None
    except ValueError as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile("it is empty") from None  # nothing to map


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> GgufFile:
        if self._data[:4] != b"GGUF":
            raise DamagedFile(f"it is not a GGUF file (it starts with {self._data[:4]!r})")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise DamagedFile(f"its GGUF version is {version}, and 2 and 3 can be read")
        tensors, values = self._number("Q"), self._number("Q")
        file = GgufFile({}, {}, {}, {}, [])
        for _ in range(self._plausible(values)):
            self._value(file)
        for _ in range(self._plausible(tensors)):
            file.tensors.append(self._tensor())
        self._check_places(file)
        return file

    def _value(self, file: GgufFile) -> None:
        key, kind = self._string(), self._number("I")
        file.kinds[key] = kind
        if kind == STRING:
            file.values[key] = self._string()
        elif kind == ARRAY:
            element, length = self._number("I"), self._plausible(self._number("Q"))
            file.lengths[key] = length
            if element == STRING:
                places = [(self._skip_string(), self._at) for _ in range(length)]
                if key == _TOKENS:
                    self._check_tokens(places)
            else:
                format = f"<{length}{self._format(element, key)}"
                if length <= _SMALL_ARRAY:
                    file.arrays[key] = struct.unpack_from(format, self._data, self._at)
                self._skip(struct.calcsize(format))
        else:
            file.values[key] = self._number(self._format(kind, key))

    def _tensor(self) -> Tensor:
        name, dimensions = self._string(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise DamagedFile(f"it is corrupted: its tensor {name!r} has {dimensions} dimensions")
        *sizes, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._data, self._at)
        self._skip(8 * dimensions + 12)
        return Tensor(name, tuple(sizes), kind, offset)

    def _check_places(self, file: GgufFile) -> None:
        alignment = file.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise DamagedFile(f"it is corrupted: its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        for tensor in file.tensors:
            end = begin + tensor.offset + (tensor.size or 0)
            if end > len(self._data):
                raise DamagedFile(
                    f"it is corrupted or incomplete: its tensor {tensor.name!r} ends at byte {end:,}, "
                    f"the file at {len(self._data):,}"
                )

    def _check_tokens(self, places: list[tuple[int, int]]) -> None:
        """llama.cpp asserts that no two are the same, and names empty ones by itself."""
        texts = [self._data[begin:end] for begin, end in places if begin != end]
        if len(set(texts)) != len(texts):
            (text, _), *_ = Counter(texts).most_common(1)
            raise DamagedFile(
                f"it is corrupted: its vocabulary has the token {text.decode('utf-8', 'replace')!r} twice"
            )

    def _number(self, format: str) -> int:
        """Of whatever type `format` says; those that matter are whole."""
        (value,) = struct.unpack_from(f"<{format}", self._data, self._at)
        self._at += struct.calcsize(f"<{format}")
        number: int = value
        return number

    def _string(self) -> str:
        at = self._skip_string()
        return self._data[at : self._at].decode("utf-8", "replace")

    def _skip_string(self) -> int:
        """Returns where its text begins."""
        size = self._number("Q")
        at = self._at
        self._skip(size)
        return at

    def _skip(self, size: int) -> None:
        self._at += self._plausible(size)

    def _plausible(self, count: int) -> int:
        """A count of things that take a byte at least."""
        left = len(self._data) - self._at
        if count > left:
            raise DamagedFile(f"it is corrupted or incomplete: {count:,} things in its last {left:,} bytes")
        return count

    def _format(self, kind: int, key: str) -> str:
        if kind not in _FORMATS:
            raise DamagedFile(f"it is corrupted: its value {key!r} is of an unknown type ({kind})")
        return _FORMATS[kind]
