"""A prompt of hash blocks as the key that production makes of a text: rungs at the same places, in tokens."""

from __future__ import annotations

import hashlib

from benchmarks.router.workloads import Request
from deployments.routing.ask import VERSION
from deployments.routing.key import PrefixKey, rung_positions

GEOMETRIC = tuple(int(128 * 1.25**step) for step in range(31))


def key_of(request: Request, block_tokens: int, *, messages: bool = True) -> PrefixKey:
    """Only whole blocks can be told apart, so each rung is moved down to the end of a block.

    Without `messages` rungs are where they would be in one long text.
    """
    whole = min(len(request.blocks), request.tokens // block_tokens)
    ends = [end * block_tokens for end in request.message_ends] if messages else []
    places, trunk = rung_positions(ends, whole * block_tokens, GEOMETRIC)
    steady = {places[n] // block_tokens for n in trunk}
    blocks = sorted({place // block_tokens for place in places} - {0})
    return PrefixKey(
        VERSION,
        tuple(_rung(request.blocks[block - 1]) for block in blocks),
        tuple(block * block_tokens for block in blocks),
        tuple(n for n, block in enumerate(blocks) if block in steady),
        request.tokens,
        in_tokens=True,
    )


def _rung(block: int) -> int:
    return int.from_bytes(hashlib.blake2b(block.to_bytes(8, "big"), digest_size=8).digest(), "little")
