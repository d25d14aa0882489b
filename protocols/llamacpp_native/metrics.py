"""llama.cpp's own metrics of one model, in Prometheus's format, by the names its dashboards and scalers look for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from protocols.card import BackendStats


class Totals(msgspec.Struct):
    """Sums over the requests that ended: of prompts what was computed, of answers what was generated, and how long.

    `longest` is the largest number of tokens that a prompt and its answer had together.
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    output_tokens: int = 0
    output_s: float = 0.0
    longest: int = 0

    @classmethod
    def of(cls, parts: Iterable[Totals]) -> Totals:
        """All of them together."""
        whole = cls()
        for part in parts:
            whole.prompt_tokens += part.prompt_tokens
            whole.prompt_s += part.prompt_s
            whole.output_tokens += part.output_tokens
            whole.output_s += part.output_s
            whole.longest = max(whole.longest, part.longest)
        return whole


NONE = Totals()

Item = tuple[str, Literal["counter", "gauge"], str, float]
"""Name, type, help and value."""


def metrics(replicas: Sequence[BackendStats], totals: Totals, before: Totals = NONE) -> list[Item]:
    """`replicas` are counted together. Rates are means over what was computed since the totals were `before`: over all,
    where several may be looking. llama.cpp's are since the last look.
    """

    def total(field: str) -> float:
        return float(sum(getattr(stats, field) for stats in replicas))

    cached, steps = total("cached_tokens_total"), total("steps_total")
    return [
        (
            "prompt_tokens_total",
            "counter",
            "Prompt tokens processed, without those from the cache.",
            total("prompt_tokens_total") - cached,
        ),
        ("prompt_tokens_cached_total", "counter", "Prompt tokens that came from the cache.", cached),
        ("prompt_seconds_total", "counter", "Time spent on prompts, of the requests that ended.", totals.prompt_s),
        ("tokens_predicted_total", "counter", "Tokens generated.", total("generated_tokens_total")),
        (
            "tokens_predicted_seconds_total",
            "counter",
            "Time spent generating, of the requests that ended.",
            totals.output_s,
        ),
        ("n_decode_total", "counter", "Steps of the engine.", steps),
        ("n_tokens_max", "counter", "Most tokens of a prompt with its answer.", float(totals.longest)),
        ("spec_decode_num_draft_tokens_total", "counter", "Tokens guessed.", total("draft_tokens_total")),
        ("spec_decode_num_accepted_tokens_total", "counter", "Guesses that were right.", total("draft_accepted_total")),
        ("spec_decode_num_drafts_total", "counter", "Times that tokens were guessed.", total("drafts_total")),
        (
            "prompt_tokens_seconds",
            "gauge",
            "Prompt tokens per second.",
            _ratio(totals.prompt_tokens - before.prompt_tokens, totals.prompt_s - before.prompt_s),
        ),
        (
            "predicted_tokens_seconds",
            "gauge",
            "Tokens per second.",
            _ratio(totals.output_tokens - before.output_tokens, totals.output_s - before.output_s),
        ),
        ("requests_processing", "gauge", "Requests that run.", total("running")),
        ("requests_deferred", "gauge", "Requests that wait for a slot.", total("waiting")),
        (
            "n_busy_slots_per_decode",
            "gauge",
            "Requests in a step of the engine, on average.",
            _ratio(total("step_requests_total"), steps),
        ),
        (
            "kv_cache_usage_ratio",
            "gauge",
            "Share of the KV cache in use.",
            _ratio(total("kv_tokens_used"), total("kv_tokens_capacity")),
        ),
        ("kv_cache_tokens", "gauge", "Tokens in the KV cache.", total("kv_tokens_used")),
    ]


def text(replicas: Sequence[BackendStats], totals: Totals, before: Totals = NONE) -> bytes:
    lines = []
    for name, kind, help_text, value in metrics(replicas, totals, before):
        lines += [
            f"# HELP llamacpp:{name} {help_text}",
            f"# TYPE llamacpp:{name} {kind}",
            f"llamacpp:{name} {value:.10g}",
        ]
    return "\n".join([*lines, ""]).encode()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
