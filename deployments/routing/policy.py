"""Which replica a request should go to: `rank` orders candidates, best first.

Shortest queue by tokens:

    cost(replica) = tokens in flight there from this gateway          [tokens]

Ties are broken by the candidates' own order, which the caller shuffles. Degraded modes: a replica nothing is known
of costs 0, like an idle one; with no knowledge at all the order is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

TYPICAL_OUTPUT_TOKENS = 256
"""Output assumed for a request without a token limit, or with a limit nobody reaches."""


class RoutingHint(msgspec.Struct, frozen=True, array_like=True):
    """What routing knows of a request, computed once in the gateway. `tokens`: its expected cost, prompt and output."""

    tokens: int


def estimate_tokens(prompt_bytes: int, max_tokens: int | None) -> int:
    """About 4 bytes of text per token, plus the output, bounded by what is typical."""
    return prompt_bytes // 4 + min(max_tokens or TYPICAL_OUTPUT_TOKENS, TYPICAL_OUTPUT_TOKENS)


def rank(candidates: Sequence[str], tokens_in_flight: Mapping[str, int]) -> list[str]:
    """`candidates` by rising cost; stable, so equals keep the caller's order."""
    return sorted(candidates, key=lambda replica: tokens_in_flight.get(replica, 0))
