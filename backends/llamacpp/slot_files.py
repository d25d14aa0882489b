"""Files of saved slots: tokens, their keys and values, and what must be the same where they are restored.

    magic, with the version of the format     8 bytes
    size of the header                        4 bytes, little-endian
    header                                    msgpack of `Header`
    tokens                                    4 bytes each, little-endian
    state                                     llama.cpp's bytes for one sequence
    CRC-32 of all of the above                4 bytes, little-endian

llama.cpp has a format of its own, but it does not say which model it was made with, and llama.cpp believes what it
reads: a changed byte among the positions would corrupt its books, or end the process.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from backends.llamacpp.slots import Tokens
from protocols.errors import InvalidRequest

State = npt.NDArray[np.uint8]

_MAGIC = b"TYSLOT\x00\x01"
_MAX_NAME_BYTES = 255
_SAMPLES = 64
_SAMPLE_BYTES = 16_384


class Header(msgspec.Struct, frozen=True, array_like=True):
    """`model` and the names in `adapters` are fingerprints; an adapter's number depends on the settings.

    `layout` says in words what llama.cpp's states depend on besides the model. Sizes are in tokens and in bytes.
    """

    model: str
    layout: str
    adapters: tuple[tuple[str, float], ...]
    tokens: int
    state: int


class SavedSlot(msgspec.Struct, frozen=True):
    tokens: Tokens
    state: State
    adapters: tuple[tuple[str, float], ...]


def check_name(filename: str) -> None:
    """`InvalidRequest` unless `filename` names a file in the very folder, on every system."""
    try:
        size = len(filename.encode())
    except UnicodeEncodeError:  # a lone surrogate
        size = 0
    separators = any(letter in "/\\" or letter < " " or letter == "\x7f" for letter in filename)
    if not 0 < size <= _MAX_NAME_BYTES or separators or ".." in filename or filename == ".":
        raise InvalidRequest(
            f"The filename must be a name of 1 to {_MAX_NAME_BYTES} bytes without a path", param="filename"
        )


def fingerprint(path: Path) -> str:
    """Tells model files apart: a hash of the size, and of samples from beginning to end, as the whole may be large."""
    size = path.stat().st_size
    digest = blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def write(path: Path, header: Header, tokens: Tokens, state: State) -> int:
    """Returns the size of the file. There is all of it or, after an `OSError`, what was there before."""
    packed = msgspec.msgpack.encode(header)
    start = _MAGIC + len(packed).to_bytes(4, "little") + packed + tokens.astype("<i4").tobytes()
    parts: tuple[bytes | memoryview, ...] = (start, state.data)
    checksum = 0
    descriptor, unfinished = tempfile.mkstemp(prefix=".unfinished-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            for part in parts:
                checksum = crc32(part, checksum)
                file.write(part)
            file.write(checksum.to_bytes(4, "little"))
            file.flush()
            os.fsync(descriptor)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.unlink(unfinished)
        raise
    return sum(map(len, parts)) + 4


def read(path: Path, model: str, layout: str) -> tuple[SavedSlot, int]:
    """What `write` has written for the same model and layout, and the file's size; `InvalidRequest` for all else."""
    try:
        data = _content(path)
    except OSError as error:
        raise InvalidRequest(f"There is no readable file {path.name!r}", param="filename") from error
    header, start = _header(data, path.name)
    if header.model != model:
        raise InvalidRequest(f"{path.name!r} was saved with another model", param="filename")
    if header.layout != layout:
        raise InvalidRequest(f"{path.name!r} was saved with {header.layout}; here are {layout}", param="filename")
    end = start + 4 * header.tokens
    if len(data) != end + header.state + 4 or crc32(data[:-4].data) != int.from_bytes(data[-4:], "little"):
        raise InvalidRequest(f"{path.name!r} is damaged", param="filename")
    tokens = data[start:end].view("<i4").astype(np.int32)
    return SavedSlot(tokens, data[end:-4], header.adapters), len(data)


def _content(path: Path) -> State:
    """Not of a pipe or a device, which might never end, and no more of another file than shows that it is one."""
    if not path.is_file():
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        size = -1 if file.read(len(_MAGIC)) == _MAGIC else len(_MAGIC)
        file.seek(0)
        return np.fromfile(file, np.uint8, size)


def _header(data: State, name: str) -> tuple[Header, int]:
    """The header, and where it ends."""
    raw = data[: 1 << 20].tobytes()
    size = int.from_bytes(raw[8:12], "little")
    if not raw.startswith(_MAGIC):
        raise InvalidRequest(f"{name!r} is not a saved slot", param="filename")
    try:
        return msgspec.msgpack.decode(raw[12 : 12 + size], type=Header), 12 + size
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{name!r} is damaged", param="filename") from error
