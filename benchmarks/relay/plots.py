"""Pictures of a run: what grows with the number of streams."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.relay.load import LoadResult
from benchmarks.relay.measures import COUNTS, name
from benchmarks.relay.report import Found, Results, cpu
from deployments.bench.svg import chart

PLOTS: dict[str, tuple[str, Callable[[LoadResult], float]]] = {
    "cpu": ("Seconds of CPU per million tokens", lambda result: 1000 * cpu(result)),
    "ttft": ("Time to the first token p50, ms", lambda result: result.ttft_p50_ms),
    "gap": ("Time between two tokens p99, ms", lambda result: result.gap_p99_ms),
}
"""By the file's name: a title, and what is shown of chats of 20 tokens/s."""


def plots(results: Results) -> dict[str, str]:
    """SVG by `PLOTS`, of medians. A system of which something is missing is left out."""
    found = Found(results)
    drawn = {}
    for file, (title, value) in PLOTS.items():
        lines: dict[str, list[float]] = {}
        for system in results:
            figures = [found.load(system, name("paced", "chat", count), value) for count in COUNTS]
            medians = [figure.median for figure in figures if figure is not None and figure.median > 0]
            if len(medians) == len(COUNTS):
                lines[system] = medians
        if lines:
            drawn[file] = chart(
                f"{title}, by streams of 20 tokens/s", [f"{count}" for count in COUNTS], lines, log=True
            )
    return drawn
