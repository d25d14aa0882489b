"""What llama.cpp adds to an answer, in every dialect that carries it: `timings` and `prompt_progress`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from protocols.events import Progress, Started, Timings


class OutTimings(msgspec.Struct, frozen=True):
    """`timings`: times in milliseconds, rates in tokens per second. `draft_…` only where tokens were guessed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET

    @classmethod
    def of(cls, timings: Timings) -> OutTimings:
        # "the first generated token costs no decode step, so the rate is (predicted_n − 1)/predicted_ms"
        decoded = max(timings.predicted_n - 1, 0)
        return cls(
            cache_n=timings.cache_n,
            prompt_n=timings.prompt_n,
            prompt_ms=timings.prompt_ms,
            prompt_per_token_ms=_ratio(timings.prompt_ms, timings.prompt_n),
            prompt_per_second=_ratio(1000 * timings.prompt_n, timings.prompt_ms),
            predicted_n=timings.predicted_n,
            predicted_ms=timings.predicted_ms,
            predicted_per_token_ms=_ratio(timings.predicted_ms, decoded),
            predicted_per_second=_ratio(1000 * decoded, timings.predicted_ms) if decoded else 0.0,
            draft_n=timings.draft_n or UNSET,
            draft_n_accepted=timings.draft_n_accepted if timings.draft_n else UNSET,
        )

    @classmethod
    def so_far(cls, event: Started | Progress) -> OutTimings:
        """Of a prompt that is being computed."""
        match event:
            case Started():
                cached, computed, ms = event.cached_tokens, 0, 0.0
            case Progress():
                cached, computed, ms = event.cached, event.processed - event.cached, event.ms
        return cls.of(Timings(cached, computed, ms, predicted_n=0, predicted_ms=0.0))


def _ratio(amount: float, per: float) -> float:
    """ "a one-token generation reports 0 rates, never null/inf" """
    return amount / per if per > 0 else 0.0


class OutProgress(msgspec.Struct, frozen=True):
    """`prompt_progress`: `processed` of `total` prompt tokens, `cache` of them reused."""

    total: int
    cache: int
    processed: int
    time_ms: float

    @classmethod
    def of(cls, event: Started | Progress) -> OutProgress | None:
        """ "First report has processed == cache": that is the beginning, and no progress is told a second time."""
        if isinstance(event, Started):
            return cls(event.prompt_tokens, event.cached_tokens, event.cached_tokens, 0.0)
        return cls(event.total, event.cached, event.processed, event.ms) if event.processed > event.cached else None
