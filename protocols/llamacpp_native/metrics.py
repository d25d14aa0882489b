"""llama.cpp's own metrics of one model, in Prometheus's format, by the names its dashboards and scalers look for."""

from __future__ import annotations

from collections.abc import Sequence
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


Item = tuple[str, Literal["counter", "gauge"], str, float]
"""Name, type, help and value."""


def metrics(replicas: Sequence[BackendStats], totals: Totals) -> list[Item]:
    """`replicas` are counted together. Rates are means over all that was computed, where llama.cpp's are since the last
    look at them: here several may be looking.
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
        ("prompt_tokens_seconds", "gauge", "Prompt tokens per second.", _rate(totals.prompt_tokens, totals.prompt_s)),
        ("predicted_tokens_seconds", "gauge", "Tokens per second.", _rate(totals.output_tokens, totals.output_s)),
        ("requests_processing", "gauge", "Requests that run.", total("running")),
        ("requests_deferred", "gauge", "Requests that wait for a slot.", total("waiting")),
        ("kv_cache_usage_ratio", "gauge", "Share of the KV cache in use.", _kv_use(replicas)),
        ("kv_cache_tokens", "gauge", "Tokens in the KV cache.", total("kv_tokens_used")),
    ]


def text(replicas: Sequence[BackendStats], totals: Totals) -> bytes:
    lines = []
    for name, kind, help_text, value in metrics(replicas, totals):
        lines += [
            f"# HELP llamacpp:{name} {help_text}",
            f"# TYPE llamacpp:{name} {kind}",
            f"llamacpp:{name} {value:.10g}",
        ]
    return "\n".join([*lines, ""]).encode()


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0


def _kv_use(replicas: Sequence[BackendStats]) -> float:
    capacity = sum(stats.kv_tokens_capacity for stats in replicas)
    return sum(stats.kv_tokens_used for stats in replicas) / capacity if capacity else 0.0
