"""Figures of conversations that are written down here."""

from __future__ import annotations

import pytest

from benchmarks.e2e.report import Run, bars, table
from benchmarks.e2e.systems import DEFAULT_ROUTING, OURS
from benchmarks.router_live.workload import Turn


def turns(*ttfts_s: float) -> list[Turn]:
    """One begins every second, and has its answer of 10 tokens 2 s after its first token."""
    return [
        Turn(0, n, float(n), ttft_s=ttft, prompt_tokens=100, cached_tokens=60, answer_tokens=10, ended_s=n + ttft + 2.0)
        for n, ttft in enumerate(ttfts_s)
    ]


def test_rates_are_over_the_time_until_the_last_answer_has_ended() -> None:
    run = Run.of(turns(0.5, 3.0, 1.0), cpu_s=6.0)

    assert run.seconds == 6.0  # the second one's: 1 + 3 + 2
    assert run.tokens_per_s == 5.0
    assert run.goodput(1.0) == pytest.approx(2 / 6)
    assert (run.ttft_s(0.5), run.ttft_s(0.99)) == (1.0, 3.0)


def test_what_failed_is_counted_and_has_no_tokens() -> None:
    broken = Turn(1, 0, 1.0, ended_s=9.0, failed="APIError", answer_tokens=5)
    run = Run.of([*turns(0.5), broken], cpu_s=1.0)

    assert (run.requests, run.failed, run.tokens) == (2, 1, 10)
    assert run.seconds == 9.0
    assert run.ttfts_s == (0.5,)


def test_bars_are_over_the_best_llama_server() -> None:
    results = {
        OURS: [Run.of(turns(1.0, 1.0), 1.0)],
        "llama-server, 3 threads": [Run.of(turns(4.0, 4.0), 1.0)],
        "llama-server, 2 threads": [Run.of(turns(2.0, 2.0), 1.0)],
        DEFAULT_ROUTING: [Run.of(turns(0.1, 0.1), 1.0)],
    }
    tokens, p50, p99 = bars(results)

    assert tokens.value == pytest.approx(5.0 / 4.0) and tokens.verdict == "pass"
    assert p50.value == p99.value == 0.5 and p50.verdict == "pass"
    assert "| llama-server, 2 threads | 4.0 | 2.00 |" in table(results, 2.0)


def test_bars_without_llama_server_are_not_measured() -> None:
    assert {bar.verdict for bar in bars({OURS: [Run.of(turns(1.0), 1.0)]})} == {"not measured"}
