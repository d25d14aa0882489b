"""A request as a ladder of hashes: each rung stands for everything before one position of its prompt.

The prompt is written in one canonical form, whatever dialect it came in, and hashed once from its beginning; a rung is
the hash so far. It begins with the model, the adapters and the tools, so nothing is shared between different ones.
Rungs lie at the ends of messages, where conversations grow and branch, and at positions that grow geometrically, where
prompts of one long text do. The hash is the same in every process. What a chat template may not show of a message
(ids, names, the reasoning of earlier turns) is left out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, assert_never

import msgspec
from xxhash import xxh3_64

from deployments.routing.ask import VERSION
from protocols.request import (
    ChatPrompt,
    ImagePart,
    InfillPrompt,
    LoraScale,
    Message,
    MixedPrompt,
    Request,
    TextPart,
    TextPrompt,
    TokenPrompt,
    Tool,
)

MAX_RUNGS: Final = 24
FIRST_MESSAGES: Final = 3
LAST_MESSAGES: Final = 12
HASHED_BYTES: Final = 512 * 1024
"""Of a longer prompt the rest counts in `size` only: nobody notices what 512 KB cost to hash."""
UNITS_PER_TOKEN: Final = 3.6
"""Bytes of text per token, until it is learnt."""
IMAGE_BYTES: Final = 3600
"""What an image counts, in bytes of text: about 1,000 tokens. Its URL's length says nothing."""
IMAGE_HASHED: Final = 64 * 1024
TOKEN_BYTES: Final = 8

_GEOMETRIC: Final = tuple(int(512 * 1.25**i) for i in range(32))
_GEOMETRIC_TOKENS: Final = tuple(int(128 * 1.25**i) * TOKEN_BYTES for i in range(31))
_TRUNK_STRIDE: Final = 3
_TRUNK_POSITIONS: Final = 9
"""Every third geometric position is on the trunk, the first nine of them: 512 B to 108 KB."""

_ROLES: Final = {
    "system": b"\x1es\x1f",
    "developer": b"\x1es\x1f",
    "user": b"\x1eu\x1f",
    "assistant": b"\x1ea\x1f",
    "tool": b"\x1et\x1f",
}
_json = msgspec.json.Encoder(order="deterministic")


class PrefixKey(msgspec.Struct, frozen=True, array_like=True):
    """What routing knows of a request's prompt.

    `rungs`: 64-bit hashes, root first; equal rungs are equal prefixes (of the same model, adapter and tools).
    `ends`: where each rung ends, in units from the prompt's beginning. `size`: units of the whole prompt, also of what
    was not hashed. Units are UTF-8 bytes, or tokens when `in_tokens`. `trunk`: indices of the rungs that stay rungs
    however the conversation grows; owners are drawn by these. `affinity` and `adapter`: hashes, 0 for none.
    """

    version: int
    rungs: tuple[int, ...]
    ends: tuple[int, ...]
    trunk: tuple[int, ...]
    size: int
    in_tokens: bool = False
    affinity: int = 0
    adapter: int = 0


def bare_key(size: int) -> PrefixKey:
    """A key without rungs, for calls that compute `size` bytes and share nothing."""
    return PrefixKey(VERSION, (), (), (), max(size, 0))


def prefix_key(request: Request) -> PrefixKey:
    """The key of `request`. The same conversation has the same rungs in every dialect and in every process.

    Costs O(size) up to 512 KB; about 2 µs per KB and message. Never raises.
    """
    prompt = request.prompt
    adapter = _adapter(request.lora)
    match prompt:
        case ChatPrompt():
            writer, kind = _Writer(), b"text"
            tools = _tools(prompt.tools)
            writer.beside(len(tools))
            _write_messages(writer, prompt.messages)
        case TextPrompt():
            writer, kind, tools = _Writer(), b"raw", b""
            writer.text(prompt.text)
            writer.end_message()
        case InfillPrompt():
            writer, kind, tools = _Writer(), b"infill", b""
            for file in prompt.files:
                writer.raw(b"\x1e")
                writer.text(file.filename)
                writer.raw(b"\x1f")
                writer.text(file.text)
                writer.end_message()
            for text in (prompt.prefix, prompt.suffix, prompt.start):
                writer.raw(b"\x1c")
                writer.text(text)
                writer.end_message()
        case MixedPrompt():
            writer, kind, tools = _Writer(), b"mixed", b""
            for part in prompt.parts:
                writer.text(part if isinstance(part, str) else f"\x1f{part}\x1f")
            writer.end_message()
        case TokenPrompt():
            return _token_key(request, prompt, adapter)
        case _:
            assert_never(prompt)
    root = _root(kind, request.model, adapter, tools)
    ends = writer.ends
    if writer.full and (not ends or ends[-1] < HASHED_BYTES):
        ends.append(HASHED_BYTES)
    positions, trunk = rung_positions(ends, writer.length, _GEOMETRIC)
    return PrefixKey(
        VERSION,
        _rungs(root, b"".join(writer.parts), positions),
        writer.with_beside(positions),
        trunk,
        writer.size + 4 * len(request.resume),
        affinity=_affinity(root, request.affinity),
        adapter=adapter,
    )


def _token_key(request: Request, prompt: TokenPrompt, adapter: int) -> PrefixKey:
    size = len(prompt.tokens) + len(request.resume)
    try:
        data = array("q", prompt.tokens[: HASHED_BYTES // TOKEN_BYTES * 2]).tobytes()
    except OverflowError:  # no vocabulary has such a token: the engine will say so
        return PrefixKey(VERSION, (), (), (), size, in_tokens=True)
    root = _root(b"tokens", request.model, adapter, b"")
    positions, trunk = rung_positions([len(data)] if data else [], len(data), _GEOMETRIC_TOKENS)
    return PrefixKey(
        VERSION,
        _rungs(root, data, positions),
        tuple(position // TOKEN_BYTES for position in positions),
        trunk,
        size,
        in_tokens=True,
        affinity=_affinity(root, request.affinity),
        adapter=adapter,
    )


class _Writer:
    """The canonical form in pieces, up to `HASHED_BYTES`, and where its messages end."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.ends: list[int] = []
        self.length = 0
        self.size = 0
        self.full = False
        self._beside: list[tuple[int, int]] = []  # (position, units up to there that are not in `parts`)

    def raw(self, piece: bytes) -> None:
        if not self.full:
            self.parts.append(piece)
            self.length += len(piece)

    def text(self, text: str) -> None:
        room = max(HASHED_BYTES - self.length, 0)
        if self.full or len(text) > room:
            self.size += len(text)
            if not self.full:
                self.parts.append(text[:room].encode("utf-8", "surrogatepass")[:room])
                self.length, self.full = HASHED_BYTES, True
            return
        piece = text.encode("utf-8", "surrogatepass")
        self.size += len(piece)
        if len(piece) >= room:
            piece, self.full = piece[:room], True
        self.parts.append(piece)
        self.length += len(piece)

    def beside(self, units: int) -> None:
        """`units` of the prompt stand here that are hashed by other means, or by their digest."""
        if units:
            self._beside.append((self.length, units + (self._beside[-1][1] if self._beside else 0)))
            self.size += units

    def end_message(self) -> None:
        if not self.full:
            self.ends.append(self.length)

    def with_beside(self, positions: Sequence[int]) -> tuple[int, ...]:
        beside = self._beside
        if not beside:
            return tuple(positions)
        if len(beside) == 1 and not beside[0][0]:  # the tools only
            return tuple([position + beside[0][1] for position in positions])
        places = [place for place, _ in beside]
        return tuple(
            position + (beside[index - 1][1] if (index := bisect_right(places, position)) else 0)
            for position in positions
        )


def _write_messages(writer: _Writer, messages: Sequence[Message]) -> None:
    previous = ""
    for message in messages:
        # One dialect has an answer's text and its calls in one message, another in several.
        if message.role == previous == "assistant":
            if not writer.full:
                writer.ends.pop()
        else:
            writer.raw(_ROLES[message.role])
        previous = message.role
        for part in message.content:
            match part:
                case TextPart():
                    writer.text(part.text)
                case ImagePart():
                    url = part.url
                    head = url[:IMAGE_HASHED].encode("utf-8", "surrogatepass")
                    writer.raw(b"\x1c" + blake2b(head, digest_size=16, key=len(url).to_bytes(8, "little")).digest())
                    writer.beside(IMAGE_BYTES)
                case _:
                    assert_never(part)
        for call in message.tool_calls:
            writer.raw(b"\x1d")
            writer.text(call.name)
            writer.raw(b"\x1f")
            writer.text(_arguments(call.arguments))
        writer.end_message()


def _arguments(text: str) -> str:
    """Of JSON text the value counts: dialects differ in blanks."""
    try:
        return _json.encode(msgspec.json.decode(text)).decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text


def _tools(tools: Sequence[Tool]) -> bytes:
    if not tools:
        return b""
    declared: list[Any] = [(tool.name, tool.description, tool.parameters) for tool in tools]
    try:
        return _json.encode(declared)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return repr(declared).encode("utf-8", "surrogatepass")


def _adapter(lora: Sequence[LoraScale] | None) -> int:
    if not lora:
        return 0
    scales = sorted((lora_scale.id, lora_scale.scale) for lora_scale in lora if lora_scale.scale)
    return _hash(repr(scales).encode()) if scales else 0


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def _root(kind: bytes, model: str, adapter: int, tools: bytes) -> bytes:
    name = model.encode("utf-8", "surrogatepass")
    return b"%d %b %d %d %d " % (VERSION, kind, adapter, len(name), len(tools)) + name + tools


def _affinity(root: bytes, affinity: str | None) -> int:
    return 0 if affinity is None else _hash(b"affinity " + root + affinity.encode("utf-8", "surrogatepass"))


def rung_positions(ends: Sequence[int], length: int, geometric: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Where the rungs are, and which of them are the trunk.

    A rung of the trunk stays one: what it is chosen by lies before it, or right behind. Then come the newest messages,
    by which a conversation's next turn finds its last one, then the deepest of the other geometric positions.
    """
    firsts = ends[:FIRST_MESSAGES]
    bound = firsts[-1] if len(firsts) == FIRST_MESSAGES else length
    count = bisect_right(geometric, length)
    trunk = {place for place in geometric[: _TRUNK_STRIDE * _TRUNK_POSITIONS : _TRUNK_STRIDE] if place <= bound}
    trunk.update(firsts)
    chosen = set(trunk)
    for place in reversed(ends[-LAST_MESSAGES:]):
        if len(chosen) >= MAX_RUNGS:
            break
        chosen.add(place)
    for place in reversed(geometric[:count]):
        if len(chosen) >= MAX_RUNGS:
            break
        chosen.add(place)
    positions = sorted(chosen)
    return positions, tuple([index for index, place in enumerate(positions) if place in trunk])


def _rungs(root: bytes, data: bytes, positions: Sequence[int]) -> tuple[int, ...]:
    # XXH3 takes 1 µs for 32 KB, a cryptographic hash 40. Who forges equal hashes spoils his own requests' routing.
    state = xxh3_64(root)
    view = memoryview(data)
    rungs = []
    start = 0
    for end in positions:
        state.update(view[start:end])
        rungs.append(state.intdigest())
        start = end
    return tuple(rungs)
