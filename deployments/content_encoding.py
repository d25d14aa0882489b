"""Request bodies that come compressed, made plain without ever holding more than their limit allows."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import zstandard

from protocols.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

_SLICE = 256
"""Compressed bytes taken at a time. Of the most wasteful zstd they are 8 MiB of plain text, of deflate 260 KiB."""

_ZSTD_WINDOW = 8 * 2**20
"""RFC 9659: as a content coding, zstd has a window of at most 8 MB."""


class _Decompressor(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


def _deflate(body: bytes) -> _Decompressor:
    """The coding is zlib's format, but "some non-conformant implementations send the "deflate" compressed data without
    the zlib wrapper" (RFC 9110, 8.4.1.2)."""
    wrapped = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


def _gzip(body: bytes) -> _Decompressor:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _zstd(body: bytes) -> _Decompressor:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()


_CODINGS: dict[str, Callable[[bytes], _Decompressor]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
ACCEPTED = "gzip, deflate, zstd"


def codings(header: bytes) -> list[str]:
    """The codings of a `Content-Encoding` header, in the order they were applied. Raises `UnsupportedMediaType`."""
    names = [name.strip().lower() for name in header.decode("latin-1").split(",")]
    names = [name for name in names if name not in ("", "identity")]
    for name in names:
        if name not in _CODINGS:
            raise UnsupportedMediaType(f"A body of content encoding '{name[:40]}' cannot be read: use {ACCEPTED}.")
    return names


def decoded(body: bytes, names: list[str], limit: int) -> bytes:
    """`body` without its codings. `PayloadTooLarge` as soon as there are more than `limit` bytes of it."""
    for name in reversed(names):
        body = _decoded(body, name, limit)
    return body


def _decoded(body: bytes, name: str, limit: int) -> bytes:
    decompressor = _CODINGS[name](body)
    out = bytearray()
    try:
        for start in range(0, len(body), _SLICE):
            data = body[start : start + _SLICE]
            while data:
                if decompressor.eof:  # "a series of members", and of frames: RFC 1952, RFC 8878
                    decompressor = _CODINGS[name](data)
                out += decompressor.decompress(data)
                if len(out) > limit:
                    raise PayloadTooLarge(f"The decompressed request body is larger than {limit} bytes.")
                data = decompressor.unused_data if decompressor.eof else b""
    except (zlib.error, zstandard.ZstdError):
        raise InvalidRequest(f"The body is not valid {name}, which its content encoding says it is.") from None
    if not decompressor.eof:
        raise InvalidRequest(f"The body ends in the middle of its {name} data.")
    return bytes(out)
