"""Request bodies that come compressed."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable, Sequence

import pytest
import zstandard

from deployments.content_encoding import codings, decoded
from deployments.http import build_app
from deployments.middleware import ASGIApp
from deployments.settings import GatewaySettings
from protocols.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from tests.deployments.support import HELLO, Exchange, ScriptedPool, chat_body

LIMIT = 2**20
CHAT = "/v1/chat/completions"


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def zstd_in_pieces(data: bytes) -> bytes:
    """A frame that does not say how long it is."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return b"".join(compressor.compress(data[i : i + 100]) for i in range(0, len(data), 100)) + compressor.flush()


CODECS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd),
    ("zstd", zstd_in_pieces),
]
each_codec = pytest.mark.parametrize(("name", "compress"), CODECS)


@each_codec
@pytest.mark.parametrize("size", [0, 1, 1000, LIMIT])
def test_what_was_compressed_comes_back(name: str, compress: Callable[[bytes], bytes], size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert decoded(compress(data), [name], LIMIT) == data


@each_codec
def test_one_byte_more_than_the_limit_is_too_large(name: str, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(PayloadTooLarge):
        decoded(compress(bytes(LIMIT + 1)), [name], LIMIT)


@each_codec
def test_a_bomb_is_refused_before_it_is_large(name: str, compress: Callable[[bytes], bytes]) -> None:
    bomb = compress(bytes(256 * 2**20))
    tracemalloc.start()
    with pytest.raises(PayloadTooLarge):
        decoded(bomb, [name], LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * 2**20


@each_codec
def test_a_body_that_ends_early_is_refused(name: str, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(InvalidRequest, match="ends in the middle"):
        decoded(compress(random.Random(1).randbytes(5000))[:-9], [name], LIMIT)


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("body", [b'{"model": "m"}', b"\xff" * 300])
def test_a_body_that_is_not_compressed_is_refused(name: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"{name}"):
        decoded(body, [name], LIMIT)


@pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_several_members_are_one_body(name: str, compress: Callable[[bytes], bytes]) -> None:
    assert decoded(compress(b"ab" * 200) + compress(b"cd"), [name], LIMIT) == b"ab" * 200 + b"cd"


def test_a_window_larger_than_http_allows_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with pytest.raises(InvalidRequest):
        decoded(compressor.compress(bytes(100)) + compressor.flush(), ["zstd"], LIMIT)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (b"", []),
        (b"identity", []),
        (b"GZIP", ["gzip"]),
        (b"x-gzip", ["x-gzip"]),
        (b" zstd ,gzip", ["zstd", "gzip"]),
        (b"identity, deflate", ["deflate"]),
    ],
)
def test_codings_of_a_header(header: bytes, names: Sequence[str]) -> None:
    assert codings(header) == names


def test_codings_are_undone_from_the_last_to_the_first() -> None:
    assert decoded(gzip.compress(zstd(b"abc")), ["zstd", "gzip"], LIMIT) == b"abc"


def test_a_coding_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedMediaType, match="'br' cannot be read: use gzip, deflate, zstd."):
        codings(b"gzip, br")


# --- over HTTP ------------------------------------------------------------


def app(**settings: int) -> ASGIApp:
    return build_app(ScriptedPool(HELLO), GatewaySettings(**settings), echo_request_id=False)


async def post(body: bytes, encoding: bytes, path: str = CHAT, **settings: int) -> Exchange:
    return await Exchange(app(**settings), "POST", path, body, [(b"content-encoding", encoding)]).done()


@each_codec
async def test_B87_a_compressed_request_is_answered(name: str, compress: Callable[[bytes], bytes]) -> None:
    answer = await post(compress(chat_body(stream=False)), name.encode())
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "Hello"


async def test_a_large_compressed_request_is_answered() -> None:
    """It is decompressed on another thread."""
    noise = random.Random(1).randbytes(100_000).hex()
    answer = await post(gzip.compress(chat_body(stream=False, user=noise)), b"gzip")
    assert answer.status == 200


async def test_B87_an_unknown_coding_is_415_and_says_which_are_known() -> None:
    answer = await post(chat_body(), b"br")
    assert answer.status == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert answer.json["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("path", "code"), [(CHAT, "payload_too_large"), ("/completion", 413), ("/tokenize", 413)])
async def test_B87_a_bomb_is_413_in_the_routes_own_words(path: str, code: object) -> None:
    answer = await post(gzip.compress(bytes(10_000)), b"gzip", path, max_body_bytes=1000)
    assert answer.status == 413
    assert answer.json["error"]["code"] == code
    assert answer.json["error"]["message"] == "The decompressed request body is larger than 1000 bytes."
