"""What a network does to an answer: it comes in pieces, cut anywhere."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator

import httpx2


class Wire(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """Bytes in pieces of random size."""

    def __init__(self, raw: bytes, seed: int) -> None:
        rng = random.Random(seed)
        longest = rng.choice((1, 3, 40, 10_000))
        self._pieces = []
        while raw:
            size = rng.randint(1, longest)
            self._pieces.append(raw[:size])
            raw = raw[size:]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
