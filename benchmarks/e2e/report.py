"""Figures of a run, their medians, the table, the bars and the plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.e2e.systems import LLAMA_SERVER, OURS
from benchmarks.relay.report import Bar, Figure, shown
from benchmarks.router_live.workload import Turn
from deployments.bench.report import percentile
from deployments.bench.svg import chart

TTFT_LIMITS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Run(msgspec.Struct, frozen=True):
    """One system, once. Times are of answered requests."""

    requests: int
    failed: int
    seconds: float
    """From the first request until the last answer's end."""
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttfts_s: tuple[float, ...]
    cpu_s: float
    """Of all the server's processes."""

    @classmethod
    def of(cls, turns: Sequence[Turn], cpu_s: float) -> Run:
        answered = [turn for turn in turns if not turn.failed]
        return cls(
            len(turns),
            len(turns) - len(answered),
            max(turn.ended_s for turn in turns) - min(turn.began_s for turn in turns),
            sum(turn.answer_tokens for turn in answered),
            sum(turn.prompt_tokens for turn in answered),
            sum(turn.cached_tokens for turn in answered),
            tuple(turn.ttft_s for turn in answered),
            cpu_s,
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def ttft_s(self, share: float) -> float:
        return percentile(self.ttfts_s, share)

    def goodput(self, limit_s: float) -> float:
        """Requests per second that had their first token within `limit_s`."""
        return sum(ttft <= limit_s for ttft in self.ttfts_s) / self.seconds


Results = Mapping[str, Sequence[Run]]
"""By system, each repeat."""


def median(results: Results, system: str, value: Callable[[Run], float]) -> float:
    return statistics.median(value(run) for run in results[system])


def table(results: Results, limit_s: float) -> str:
    columns: dict[str, tuple[Callable[[Run], float], str]] = {
        "tokens/s": (lambda r: r.tokens_per_s, ".1f"),
        "TTFT p50, s": (lambda r: r.ttft_s(0.5), ".2f"),
        "p99": (lambda r: r.ttft_s(0.99), ".2f"),
        f"requests/s with TTFT ≤ {limit_s:g} s": (lambda r: r.goodput(limit_s), ".2f"),
        "prompt tokens found cached, %": (lambda r: 100 * r.cached_tokens / max(r.prompt_tokens, 1), ".1f"),
        "CPU s per 1,000 tokens": (lambda r: 1000 * r.cpu_s / max(r.tokens, 1), ".1f"),
        "failed": (lambda r: r.failed, ".0f"),
    }
    lines = [f"| system | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for system, runs in results.items():
        cells = [shown(Figure.of([value(run) for run in runs]), form) for value, form in columns.values()]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bars(results: Results) -> list[Bar]:
    """Ratios of medians, each over the llama-server that does best in it."""
    theirs = [system for system in results if system.startswith(LLAMA_SERVER)]

    def over(value: Callable[[Run], float], best: Callable[[Sequence[float]], float]) -> float | None:
        if OURS not in results or not theirs:
            return None
        return median(results, OURS, value) / best([median(results, system, value) for system in theirs])

    return [
        Bar("tokens/s over llama-server's", over(lambda r: r.tokens_per_s, max), 1.0, at_most=False),
        Bar("TTFT p50 over llama-server's", over(lambda r: r.ttft_s(0.5), min), 1.0),
        Bar("TTFT p99 over llama-server's", over(lambda r: r.ttft_s(0.99), min), 1.0),
    ]


def goodput_plot(results: Results) -> str:
    lines = {
        system: [statistics.median(run.goodput(limit) for run in runs) for limit in TTFT_LIMITS_S]
        for system, runs in results.items()
    }
    labels = [f"{limit:g} s" for limit in TTFT_LIMITS_S]
    return chart("Requests per second with their first token within …", labels, lines)


def ttft_plot(results: Results) -> str:
    marks = (10, 25, 50, 75, 90, 95, 99)
    lines = {}
    for system, runs in results.items():
        ttfts = [ttft for run in runs for ttft in run.ttfts_s if not math.isnan(ttft)]
        lines[system] = [percentile(ttfts, mark / 100) for mark in marks]
    return chart("Time to the first token, s", [f"p{mark}" for mark in marks], lines, log=True)
