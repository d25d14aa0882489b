"""Medians, their spread, the tables and the bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from benchmarks.relay.load import LoadResult
from benchmarks.relay.measures import DIALECTS, Measured, name
from benchmarks.relay.systems import BARE, HAPROXY, PEER, PEER_DIRECT, STEP_S

Results = Mapping[str, Sequence[Measured]]
"""By system, each repeat."""


class Figure(msgspec.Struct, frozen=True):
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        values = [value for value in values if not math.isnan(value)]
        return cls(statistics.median(values), min(values), max(values)) if values else None


class Found:
    """What to look figures up in: None is what was not measured."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def load(self, system: str, load: str, value: Callable[[LoadResult], float]) -> Figure | None:
        runs = [run.loads[load] for run in self._results.get(system, ()) if load in run.loads]
        return Figure.of([value(run) for run in runs])

    def system(self, system: str, value: Callable[[Measured], float | None]) -> Figure | None:
        values = [value(run) for run in self._results.get(system, ())]
        return Figure.of([found for found in values if found is not None])


def cpu(result: LoadResult) -> float:
    return result.server_cpu_s_per_1000_tokens


def tokens_per_s(result: LoadResult) -> float:
    return result.tokens_per_s


COLUMNS: dict[str, tuple[Callable[[LoadResult], float], str]] = {
    "tokens/s": (tokens_per_s, ",.0f"),
    "requests/s": (lambda r: r.requests_per_s, ",.1f"),
    "TTFT p50, ms": (lambda r: r.ttft_p50_ms, ",.0f"),
    "p99": (lambda r: r.ttft_p99_ms, ",.0f"),
    "gap p50, ms": (lambda r: r.gap_p50_ms, ",.0f"),
    "gap p99": (lambda r: r.gap_p99_ms, ",.0f"),
    "token after its step p50, ms": (lambda r: r.lateness_p50_ms, ".1f"),
    "late tokens": (lambda r: r.late_tokens, ".0f"),
    "CPU s per million tokens": (lambda r: 1000 * cpu(r), ",.0f"),
    "lost tokens": (lambda r: r.lost_tokens, ".0f"),
}


def tables(results: Results) -> str:
    found = Found(results)
    loads = dict.fromkeys(load for runs in results.values() for run in runs for load in run.loads)
    parts = [_of_systems(found, list(results)), _idle_streams(found, results)]
    for load in loads:
        lines = [f"### {load}", "", f"| system | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
        for system in results:
            if found.load(system, load, tokens_per_s) is not None:
                cells = [shown(found.load(system, load, value), form) for value, form in COLUMNS.values()]
                lines.append(f"| {system} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(measured: Measured) -> str:
    """One line for whoever waits."""
    load = measured.loads[name("paced", "chat", 128)]
    return (
        f"128 streams of 20 tokens/s: {1000 * cpu(load):,.0f} us of CPU per token, "
        f"TTFT p50 {load.ttft_p50_ms:,.0f} ms, gap p99 {load.gap_p99_ms:,.0f} ms"
    )


def _of_systems(found: Found, systems: Sequence[str]) -> str:
    columns: dict[str, tuple[Callable[[Measured], float | None], str]] = {
        "added per request, ms": (lambda m: m.added_ms.get("small"), ".1f"),
        "prompt of 100 KB": (lambda m: m.added_ms.get("100 KB"), ".1f"),
        "of 1 MB": (lambda m: m.added_ms.get("1 MB"), ".1f"),
        "idle CPU, cores": (lambda m: m.idle_cpu, ".2f"),
        "memory per idle stream, KB": (lambda m: m.idle_stream_kb, ".0f"),
    }
    lines = [f"| system | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for system in systems:
        cells = [shown(found.system(system, value), form) for value, form in columns.values()]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _idle_streams(found: Found, results: Results) -> str:
    """Where the memory of idle streams is. A process with less than 0.1 KB of a stream is left out."""
    lines = ["| process | memory per idle stream, KB |", "|---|---|"]
    for system, runs in results.items():
        for process in dict.fromkeys(process for run in runs for process in run.idle_stream_kb_by_process):
            figure = found.system(system, partial(_held, process=process))
            if figure is not None and abs(figure.median) >= 0.1:
                lines.append(f"| {system}: {process} | {shown(figure, '.1f')} |")
    return "\n".join(lines)


def _held(measured: Measured, process: str) -> float | None:
    return measured.idle_stream_kb_by_process.get(process)


def shown(figure: Figure | None, form: str) -> str:
    if figure is None:
        return "–"
    median, low, high = (format(value, form) for value in msgspec.structs.astuple(figure))
    return median if low == high else f"{median} ({low}–{high})"


# --- pass bars --------------------------------------------------------------------------------------------------------


class Bar(msgspec.Struct, frozen=True):
    """`value` is None where something was not measured."""

    text: str
    value: float | None
    limit: float
    at_most: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "pass" if (self.value <= self.limit if self.at_most else self.value >= self.limit) else "FAIL"


def ratio(over: Figure | None, under: Figure | None) -> float | None:
    return None if over is None or under is None or under.median == 0 else over.median / under.median


def bars(results: Results) -> list[Bar]:
    """Ratios are of medians."""
    found = Found(results)
    at = name("paced", "chat", 128)
    step_ms = STEP_S["paced"] * 1e3

    def ttft(result: LoadResult) -> float:
        return result.ttft_p50_ms

    def over(system: str, load: str, value: Callable[[LoadResult], float]) -> float | None:
        return ratio(found.load(HAPROXY, load, value), found.load(system, load, value))

    gap = found.load(HAPROXY, at, lambda r: r.gap_p99_ms)
    late = found.load(HAPROXY, name("slow", "chat", 512), lambda r: r.late_tokens)
    idle = found.system(HAPROXY, lambda m: m.idle_stream_kb)
    fast = name("unlimited", "chat", 32)
    wanted = [
        Bar("CPU per token over Ray Serve LLM's, 128 paced streams", over(PEER, at, cpu), 1 / 6),
        Bar("CPU per token over its direct streaming's", over(PEER_DIRECT, at, cpu), 1 / 2),
        Bar("CPU per token over the bare streamer's", over(BARE, at, cpu), 3.0),
        Bar("TTFT p50 over Ray Serve LLM's", over(PEER, at, ttft), 1 / 5),
        Bar("gap p99 over the engine's step", None if gap is None else gap.median / step_ms, 1.3),
        Bar("tokens late, 512 streams of 5 tokens/s, in any repeat", None if late is None else late.high, 0),
        Bar("tokens/s over Ray Serve LLM's, unlimited, 32 streams", over(PEER, fast, tokens_per_s), 2.0, at_most=False),
        Bar("tokens/s over the bare streamer's", over(BARE, fast, tokens_per_s), 0.5, at_most=False),
        Bar("KB of memory per idle stream", None if idle is None else idle.median, 50.0),
    ]
    chat = found.load(HAPROXY, at, cpu)
    for dialect in DIALECTS[1:]:
        cost = ratio(found.load(HAPROXY, name("paced", dialect, 128), cpu), chat)
        wanted.append(Bar(f"CPU per token of {dialect} over chat's", cost, 1.5))
    for size, limit in (("100 KB", 3.0), ("1 MB", 30.0)):
        added = found.system(HAPROXY, partial(_added, size=size))
        wanted.append(Bar(f"ms more for a prompt of {size}", None if added is None else added.median, limit))
    return wanted


def _added(measured: Measured, size: str) -> float | None:
    times = measured.added_ms
    return times[size] - times["small"] if size in times else None


def bar_table(wanted: Sequence[Bar]) -> str:
    lines = ["| bar | value | limit | |", "|---|---|---|---|"]
    for bar in wanted:
        value = "–" if bar.value is None else f"{bar.value:.3g}"
        lines.append(f"| {bar.text} | {value} | {'≤' if bar.at_most else '≥'} {bar.limit:.3g} | {bar.verdict} |")
    return "\n".join(lines)
