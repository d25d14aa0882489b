"""What is measured in a run."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.router.fleet import Fleet, Floats, Ints, Served
from benchmarks.router.workloads import Request, Workload

WINDOW_S = 10.0
AFTER_S = 60.0
"""Seconds after a change of the fleet in which its effects are measured."""
NOTICEABLE_S = 0.005
"""Differences of less are none: what a replica's answer is old, and its prefill's rounding."""


class Result(msgspec.Struct, frozen=True):
    """`hit`: cached over all prompt tokens. `bound`: that of an infinite cache shared by all.

    `spurious`: share of requests that left a replica with more of their prompt although their first token would have
    been no later there. `avoidable`: prompt tokens computed though another replica had them, over all. `justified`: the
    share of requests with such tokens that still got their first token sooner. `skew`: standard deviation over mean of
    what replicas computed; `skew_10s` the mean of the same in windows of 10 s. `follow_up_hit`: cached over cacheable
    tokens of second and later turns. `rerouted`: share of follow-ups that leave a replica which is still there, in the
    minute after a change less that in the minute before. `hit_after`: cached over cacheable in the minute after.
    """

    requests: int
    bound: float
    hit: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    skew: float
    skew_10s: float
    spurious: float
    avoidable: float
    justified: float
    follow_up_hit: float
    rerouted: float
    hit_after: float
    cut: int
    sent_again: int

    @property
    def share(self) -> float:
        """Of the bound; 1 where nothing can be had."""
        return self.hit / self.bound if self.bound else 1.0


class Recorder:
    def __init__(self, fleet: Fleet, workload: Workload, changes: Sequence[float]) -> None:
        count, windows = len(workload.requests), int(workload.span_s / WINDOW_S) + 1
        self._fleet = fleet
        self._workload = workload
        self._changes = changes
        self._ttft = np.full(count, np.nan)
        self._cached = np.zeros(count)
        self._replica = np.full(count, -1)
        self._spurious = np.zeros(count, np.bool_)
        self._avoidable = np.zeros(count)
        self._justified = np.zeros(count, np.bool_)
        self._computed = np.zeros((windows, len(fleet.replicas)))
        self._outcomes = np.zeros(count, np.int64)
        self._cut = 0
        self._sent_again = 0

    def chosen(self, request: Request, replica: int, resident: Ints, waits: Floats, now: float) -> None:
        """Judged with the truth of this moment: what each replica has, and when it would begin."""
        fleet, index = self._fleet, request.index
        ttft = waits + (request.tokens - resident) / fleet.rates
        warmer = fleet.alive & (resident > resident[replica])
        best = int(resident[fleet.alive].max())
        self._avoidable[index] = best - resident[replica]
        if warmer.any():
            best_warm = float(ttft[warmer].min())
            self._spurious[index] = best_warm < ttft[replica] - NOTICEABLE_S
            self._justified[index] = ttft[replica] < best_warm
        self._replica[index] = replica
        window = min(int(now / WINDOW_S), len(self._computed) - 1)
        self._computed[window, replica] += request.tokens - resident[replica]

    def completed(self, request: Request, served: Served) -> None:
        self._outcomes[request.index] += 1
        self._cached[request.index] = served.cached_tokens
        self._ttft[request.index] = served.first_token_at - request.at

    def cut(self, request: Request, served: Served) -> None:
        """It had its first token; the rest of the answer is lost."""
        self.completed(request, served)
        self._cut += 1

    def sent_again(self) -> None:
        self._sent_again += 1

    def result(self) -> Result:
        requests = self._workload.requests
        assert (self._outcomes == 1).all(), "every request ends once"
        assert not self._fleet.running.any() and not self._fleet.queued_tokens.any()
        cacheable = np.array([request.cacheable for request in requests], float)
        follow_up = np.array([request.parent is not None for request in requests])
        avoidable = self._avoidable > 0
        p50, p90, p99 = np.quantile(self._ttft, [0.5, 0.9, 0.99])
        computed = self._computed.sum(axis=0)
        busy = self._computed[self._computed.sum(axis=1) > 0]
        return Result(
            requests=len(requests),
            bound=self._workload.bound,
            hit=float(self._cached.sum()) / self._workload.tokens,
            ttft_mean_s=float(self._ttft.mean()),
            ttft_p50_s=float(p50),
            ttft_p90_s=float(p90),
            ttft_p99_s=float(p99),
            skew=float(computed.std() / computed.mean()),
            skew_10s=float((busy.std(axis=1) / busy.mean(axis=1)).mean()),
            spurious=float(self._spurious.mean()),
            avoidable=float(self._avoidable.sum()) / self._workload.tokens,
            justified=_ratio(self._justified.sum(), avoidable.sum()),
            follow_up_hit=_ratio(self._cached[follow_up].sum(), cacheable[follow_up].sum()),
            rerouted=self._rerouted(),
            hit_after=self._hit_after(cacheable),
            cut=self._cut,
            sent_again=self._sent_again,
        )

    def _rerouted(self) -> float:
        """Mean over the changes."""
        extra = []
        for at in self._changes:
            before, after = (self._moved(at, at + start) for start in (-AFTER_S, 0.0))
            extra.append(after - before)
        return float(np.mean(extra)) if extra else 0.0

    def _moved(self, change_at: float, start: float) -> float:
        """Of the follow-ups in the minute from `start`, the share that left a replica that survived the change."""
        moved = stayed = 0
        for request in self._workload.requests:
            if request.parent is None or not start < request.at <= start + AFTER_S:
                continue
            parent = self._workload.requests[request.parent]
            was, is_ = self._replica[parent.index], self._replica[request.index]
            if parent.at > change_at or not self._fleet.alive[was]:
                continue
            moved += was != is_
            stayed += was == is_
        return _ratio(moved, moved + stayed)

    def _hit_after(self, cacheable: Floats) -> float:
        at = np.array([request.at for request in self._workload.requests])
        after = np.zeros(len(at), np.bool_)
        for change in self._changes:
            after |= (at > change) & (at <= change + AFTER_S)
        return _ratio(self._cached[after].sum(), cacheable[after].sum())


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
