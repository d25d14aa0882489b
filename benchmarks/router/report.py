"""Tables, pass bars and plots of what was simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from benchmarks.router.legs import BEST, Leg
from benchmarks.router.measures import Result

Results = Mapping[str, Mapping[str, Mapping[str, Result]]]
"""By leg, scenario and rule."""


def tables(leg: Leg, results: Mapping[str, Mapping[str, Result]]) -> str:
    if leg.detailed:
        return "\n\n".join(
            f"### {label} (an infinite shared cache would have {next(iter(by_rule.values())).bound:.3f})\n\n"
            + _detailed(by_rule, leg.name == "changes")
            for label, by_rule in results.items()
        )
    lines = [f"| rule | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for rule in leg.rules:
        cells = (by_rule[rule] for by_rule in results.values())
        lines.append(f"| {rule} | {' | '.join(f'{cell.share:.2f} · {cell.ttft_mean_s:.2f} s' for cell in cells)} |")
    return "Cached tokens over those of an infinite shared cache · mean TTFT.\n\n" + "\n".join(lines)


def _detailed(by_rule: Mapping[str, Result], changes: bool) -> str:
    columns: dict[str, Callable[[Result], str]] = {
        "hit": lambda r: f"{r.hit:.3f}",
        "of bound": lambda r: f"{r.share:.3f}",
        "TTFT mean": lambda r: f"{r.ttft_mean_s:.2f} s",
        "p50": lambda r: f"{r.ttft_p50_s:.2f} s",
        "p90": lambda r: f"{r.ttft_p90_s:.2f} s",
        "p99": lambda r: f"{r.ttft_p99_s:.1f} s",
        "spurious": lambda r: f"{r.spurious:.1%}",
        "avoidable": lambda r: f"{r.avoidable:.1%}",
        "justified": lambda r: f"{r.justified:.0%}",
        "skew": lambda r: f"{r.skew:.2f}",
        "in 10 s": lambda r: f"{r.skew_10s:.2f}",
        "follow-up hit": lambda r: f"{r.follow_up_hit:.3f}",
    }
    if changes:
        columns |= {
            "rerouted": lambda r: f"{r.rerouted:+.1%}",
            "hit after": lambda r: f"{r.hit_after:.3f}",
            "sent again": lambda r: f"{r.sent_again}",
            "cut": lambda r: f"{r.cut}",
        }
    lines = [f"| rule | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for rule, result in by_rule.items():
        lines.append(f"| {rule} | {' | '.join(column(result) for column in columns.values())} |")
    return "\n".join(lines)


# --- pass bars --------------------------------------------------------------


class Bar(msgspec.Struct, frozen=True):
    """A value that has to be on the right side of its limit."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"| {self.name} | {self.value:.3f} | {sign} {self.limit:g} | {'pass' if self.passed else '**FAIL**'} |"


SHARES = {"conversation": 0.88, "synthetic": 0.98, "multi": 0.985}
"""Least share of an infinite shared cache's hits."""


def bars(results: Results) -> list[Bar]:
    """Those that the simulated legs have values for."""
    out: list[Bar] = []
    workloads = results.get("workloads", {})
    gateways = results.get("gateways", {})
    if {"M=1", "M=8"} <= gateways.keys():
        eight, one = gateways["M=8"][BEST], gateways["M=1"][BEST]
        out.append(Bar("hit with 8 gateways over hit with 1", eight.hit / one.hit, 0.97, True))
    for label, by_rule in workloads.items():
        ours, oracle = by_rule[BEST], by_rule["oracle"]
        name = label.partition("@")[0]
        if name in SHARES:
            out.append(Bar(f"{label}: hit over an infinite cache's", ours.share, SHARES[name], True))
            out.append(Bar(f"{label}: mean TTFT over the oracle's", ours.ttft_mean_s / oracle.ttft_mean_s, 1.08))
            out.append(Bar(f"{label}: p99 TTFT over the oracle's", ours.ttft_p99_s / oracle.ttft_p99_s, 1.10))
            out.append(Bar(f"{label}: spurious spills", ours.spurious, 0.01))
        if name == "unique" and "shortest queue" in by_rule:
            queue = by_rule["shortest queue"].ttft_mean_s
            out.append(Bar("no reuse: mean TTFT over the shortest queue's", ours.ttft_mean_s / queue, 1.01))
    out += _asks(results.get("asks", {}))
    out += _changes(results.get("changes", {}))
    return out


def _asks(asks: Mapping[str, Mapping[str, Result]]) -> list[Bar]:
    out = []
    for label, by_rule in asks.items():
        ours, oracle, two = (by_rule[rule].ttft_mean_s for rule in (BEST, "oracle", "power of two"))
        if label.endswith(" 100% lost"):
            out.append(Bar(f"{label}: mean TTFT over the oracle's", ours / oracle, 4.0))
            out.append(Bar(f"{label}: mean TTFT over power of two's", ours / two, 0.5))
        elif label.endswith(" 10% lost"):
            out.append(Bar(f"{label}: mean TTFT over the oracle's", ours / oracle, 1.12))
    return out


def _changes(changes: Mapping[str, Mapping[str, Result]]) -> list[Bar]:
    out = []
    for label, by_rule in changes.items():
        ours = by_rule[BEST]
        if label.startswith("churn"):
            out.append(Bar("churn: follow-up hit", ours.follow_up_hit, 0.9, True))
        elif label == "all gateways restart" and "as it is" in changes:
            calm = changes["as it is"][BEST]
            out.append(Bar("gateways restart: hit over that without", ours.hit / calm.hit, 0.99, True))
            out.append(Bar("gateways restart: hit in the minute after", ours.hit_after, 0.97 * calm.share, True))
    return out
