"""What a load showed, in figures, in words and as a chart."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence

import msgspec

from deployments.bench.client import Outcome
from deployments.bench.svg import chart

PLOTTED = (1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
LEAST_PLOTTED_MS = 0.01
"""The scale is logarithmic, and pieces that are read together have no time between them."""
LATE_S = 0.02
"""Requests sent this much after they were due say more of the sender than of the server."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)] if ordered else float("nan")


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        marks = [percentile(values, share) for share in (0.5, 0.9, 0.99, 1.0)]
        return cls(statistics.fmean(values), *marks)


class FailureCount(msgspec.Struct, frozen=True):
    kind: str
    count: int
    example: str
    """The message of the first."""


class Summary(msgspec.Struct, frozen=True):
    """Times are those of answered requests. Tokens are the server's counts, or pieces of output where it has none."""

    requests: int
    answered: int
    seconds: float
    """From the first request until the last one's end."""
    requests_per_s: float
    tokens: int
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    first_output: Spread | None
    between_outputs: Spread | None
    per_token: Spread | None
    """A request's time between its first and its last output, over its tokens after the first."""
    whole_answer: Spread | None
    sent_late: Spread | None
    failures: tuple[FailureCount, ...] = ()


def summary(outcomes: Sequence[Outcome]) -> Summary:
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    seconds = max((outcome.due + outcome.end for outcome in outcomes), default=0.0)
    seconds -= min((outcome.due for outcome in outcomes), default=0.0)
    tokens = sum(outcome.tokens for outcome in answered)
    failed = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    counts = collections.Counter(failure.kind for failure in failed)
    examples = {failure.kind: failure.message for failure in reversed(failed)}
    return Summary(
        requests=len(outcomes),
        answered=len(answered),
        seconds=seconds,
        requests_per_s=len(answered) / seconds if seconds else 0.0,
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in answered),
        cached_tokens=sum(outcome.cached_tokens or 0 for outcome in answered),
        first_output=Spread.of(first_outputs(answered)),
        between_outputs=Spread.of(gaps(answered)),
        per_token=Spread.of(
            [sum(outcome.gaps) / (outcome.tokens - 1) for outcome in answered if outcome.gaps and outcome.tokens > 1]
        ),
        whole_answer=Spread.of([outcome.end for outcome in answered]),
        sent_late=Spread.of([outcome.sent - outcome.due for outcome in outcomes]),
        failures=tuple(FailureCount(kind, count, examples[kind]) for kind, count in counts.most_common()),
    )


def first_outputs(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.first_output for outcome in outcomes if outcome.first_output is not None]


def gaps(outcomes: Sequence[Outcome]) -> list[float]:
    return [gap for outcome in outcomes for gap in outcome.gaps]


def words(found: Summary) -> str:
    lines = [
        f"{found.requests} requests in {found.seconds:.2f} s: {found.answered} answered, "
        f"{found.requests - found.answered} failed",
        f"{found.requests_per_s:.2f} requests/s, {found.tokens_per_s:,.1f} tokens/s, {found.tokens:,} tokens; "
        f"prompts {found.prompt_tokens:,} tokens, {found.cached_tokens:,} of them from a cache",
    ]
    rows = {
        "first output": found.first_output,
        "between outputs": found.between_outputs,
        "per token": found.per_token,
        "whole answer": found.whole_answer,
    }
    if found.answered:
        lines += ["", f"{'ms':16}" + "".join(f"{name:>10}" for name in Spread.__struct_fields__)]
    for name, spread in rows.items():
        if spread is not None:
            lines.append(f"{name:16}" + "".join(f"{value * 1e3:10,.1f}" for value in msgspec.structs.astuple(spread)))
    if found.failures:
        lines += ["", "failed:"]
        lines += [f"{failure.count:6}  {failure.kind}: {failure.example}"[:200] for failure in found.failures]
    if found.sent_late is not None and found.sent_late.p99 > LATE_S:
        late_ms = found.sent_late.p99 * 1e3
        lines += [
            "",
            f"Requests were sent up to {late_ms:.0f} ms late (p99): this machine cannot keep up with the load.",
        ]
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], title: str) -> str:
    """Percentiles of the times, in ms, as an SVG document."""
    answered = [outcome for outcome in outcomes if outcome.failure is None]
    values = {
        "whole answer": [outcome.end for outcome in answered],
        "first output": first_outputs(answered),
        "between outputs": gaps(answered),
    }
    lines = {
        name: [max(percentile(times, mark / 100) * 1e3, LEAST_PLOTTED_MS) for mark in PLOTTED]
        for name, times in values.items()
        if times
    }
    return chart(title, [f"p{mark}" if mark < 100 else "max" for mark in PLOTTED], lines, log=True)
