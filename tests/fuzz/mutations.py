"""What goes wrong on the way: a body's values, its bytes, its coding, and what stands around it."""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from typing import Any, NamedTuple

import zstandard

from tests.fuzz.values import WORDS, hostile, plain

Path = tuple[str | int, ...]


class Mutated(NamedTuple):
    """`touched` are the paths at which a value was changed."""

    value: Any
    touched: tuple[Path, ...]
    what: tuple[str, ...]


def paths(value: Any, below: Path = ()) -> list[Path]:
    found: list[Path] = []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:8])
    for key, inner in items:
        found += [(*below, key), *paths(inner, (*below, key))]
    return found


def mutated(body: Any, rng: random.Random, times: int) -> Mutated:
    body = copy.deepcopy(body)
    touched, what = [], []
    for _ in range(times):
        known = paths(body)
        if not known:
            break
        path = rng.choice(known)
        what.append(_change(body, path, known, rng))
        touched.append(path)
    return Mutated(body, tuple(touched), tuple(what))


SPOILT = (" hostile", " in a list", " in an object")
"""How the changes are called that put another type of value where one was."""


def _change(body: Any, path: Path, known: list[Path], rng: random.Random) -> str:
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    match rng.randrange(9):
        case 0:
            del holder[key]
            return f"{path} removed"
        case 1:
            holder[key] = [holder[key]]
            return f"{path} in a list"
        case 2:
            holder[key] = {rng.choice(WORDS): holder[key]}
            return f"{path} in an object"
        case 3:
            other: Any = body
            source = rng.choice(known)
            for step in source:
                other = other[step]
            holder[key] = copy.deepcopy(other)
            return f"{path} from {source}"
        case 4 if isinstance(holder, dict):
            holder[rng.choice((*WORDS, "", "x" * 300, "é", "__proto__", "stream"))] = hostile(rng)
            return f"a key more beside {path}"
        case 5 if isinstance(holder, list):
            holder[:] = holder * rng.choice((2, 40))
            return f"{path[:-1]} repeated"
        case 6:
            holder[key] = plain(rng)
            return f"{path} of any kind"
    holder[key] = hostile(rng)
    return f"{path} hostile"


def encoded(value: Any, rng: random.Random) -> bytes:
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")


RAW: tuple[bytes, ...] = (
    *(b"", b" ", b"null", b"[]", b"{}", b"1", b'"a"', b"NaN", b"{", b"}", b"{}{}", b"{'a':1}", b"// x\n{}", b"\x00"),
    *(b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"[" * 20_000, b'{"a":' * 20_000, b"[" * 300 + b"]" * 300),
    *(b'{"model":"m","model":"m"}', b'{"a":1e999}', b'{"a":-}', b'{"a":01}', b'{"a":"\\ud800"}', b'{"a":"\\x"}'),
    *(b'{"a":' + b"9" * 5000 + b"}", b"a=1&b=2", b"--x\r\nContent-Disposition: form-data\r\n\r\n--x--"),
)
_BAD_BYTES = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\x00", b"\x1f", b'"', b"\\", b"}")


def damaged(raw: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The bytes of a body with something wrong about them, or other bytes altogether."""
    at = rng.randint(0, len(raw))
    match rng.randrange(8):
        case 0:
            return rng.choice(RAW), "other bytes"
        case 1:
            return raw[:at], f"cut at {at}"
        case 2:
            bad = rng.choice(_BAD_BYTES)
            return raw[:at] + bad + raw[at:], f"{bad!r} at {at}"
        case 3:
            return raw[:at] + raw[at + rng.randint(1, 5) :], f"bytes lost at {at}"
        case 4:
            twice = rng.choice(("model", "messages", "stream", "prompt", "input", "max_tokens", "a"))
            again = json.dumps({twice: hostile(rng)}).encode()[1:-1]
            return b"{" + again + b"," + raw[1:], f"{twice} twice"
        case 5:
            return raw.decode(errors="replace").encode("utf-16"), "UTF-16"
        case 6:
            return b"\xef\xbb\xbf" + raw, "a byte order mark"
        case _:
            return raw + rng.choice((b"x", b"{}", b"\n", b"\x00", b",")), "more behind it"


BOMB = "a bomb"
"""More bytes than the server takes, in few."""


def coded(raw: bytes, rng: random.Random) -> tuple[bytes, bytes, str]:
    """A body in some coding, the name it is given out under, and what is wrong with it, if anything is."""
    zstd = zstandard.ZstdCompressor().compress
    right: dict[bytes, bytes] = {
        b"gzip": gzip.compress(raw, 1),
        b"deflate": zlib.compress(raw, 1),
        b"zstd": zstd(raw),
        b"X-GZIP": gzip.compress(raw, 1),
        b"gzip, zstd": zstd(gzip.compress(raw, 1)),
        b"identity": raw,
        b" , gzip ": gzip.compress(raw, 1),
    }
    name = rng.choice(sorted(right))
    data = right[name]
    match rng.randrange(8):
        case 0:
            return data[: rng.randint(0, len(data))], name, "coded and cut"
        case 1:
            at = rng.randrange(len(data)) if data else 0
            return data[:at] + rng.randbytes(3) + data[at + 3 :], name, "coded and damaged"
        case 2:
            return raw, name, "not coded as it says"
        case 3:
            return data, rng.choice((b"br", b"compress", b"\xff", b"gzip;q=1", b"x" * 500)), "coding unknown"
        case 4:
            return gzip.compress(b" " * 2_000_000, 9), b"gzip", BOMB
    return data, name, ""


CONTENT_TYPES = (
    *(b"application/json", b"application/json; charset=utf-8", b"text/plain", b"application/x-www-form-urlencoded"),
    *(b"multipart/form-data; boundary=x", b"", b"\xff", b"application/json; charset=utf-16", b"a" * 500),
)
ODD_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *((b"anthropic-version", b"2023-06-01"), (b"anthropic-version", b"2026-10-21"), (b"anthropic-version", b"\xff")),
    *(
        (b"x-request-id", b"abc-1"),
        (b"x-request-id", b"\r\nx: y"),
        (b"x-request-id", b"\xff" * 200),
        (b"accept", b"*/*"),
    ),
    *((b"accept", b"text/event-stream"), (b"authorization", b"Bearer k"), (b"x-api-key", b"\x00"), (b"", b"")),
    *(
        (b"content-length", b"5"),
        (b"expect", b"100-continue"),
        (b"x-long", b"x" * 20_000),
        (b"origin", b"http://e.org"),
    ),
)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "BREW", "get", "")
QUERIES = (
    *("beta=true", "model=m", "model=", "model=other", "limit=1", "limit=0", "limit=1001", "limit=x", "limit=-1"),
    *("after_id=m", "after_id=x", "before_id=m", "limit=٣", "stream=true", "after=x", "order=asc", "order=x"),
    *(
        "action=save",
        "action=erase",
        "action=restore",
        "action=x",
        "a=1&a=2&a",
        "&&&===",
        "%",
        "%ff",
        "%00",
        "\xff",
        "a;b",
    ),
    "x=" + "y" * 20_000,
    "&".join(f"a{i}=1" for i in range(1500)),
)
