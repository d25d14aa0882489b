"""A request as a ladder of hashes: each rung stands for everything before one position of the prompt."""

from __future__ import annotations

import msgspec

from protocols.request import Request

MAX_RUNGS = 24


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


def prefix_key(request: Request) -> PrefixKey:
    """The key of `request`. The same conversation has the same rungs in every dialect and in every process."""
    raise NotImplementedError


def bare_key(size: int) -> PrefixKey:
    """A key without rungs, for calls that compute `size` bytes and share nothing."""
    raise NotImplementedError
