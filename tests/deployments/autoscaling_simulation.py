"""A model under load, second by second: replicas that compute prompts and answers, and Serve's side of scaling them.

Serve's own code applies delays, factors and bounds (`_apply_autoscaling_config`, and the clip its controller does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import msgspec
from ray.serve import autoscaling_policy
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from backends.base import BackendStats
from deployments.autoscaling import ShortagePolicy, report

DEPLOYMENT = DeploymentID(name="Model", app_name="m")
REPORT_EVERY_S = 10
SAMPLE_EVERY_S = 6


def replica_id(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)


def context(
    config: AutoscalingConfig,
    metrics: dict[str, dict[ReplicaID, list[TimeStampedValue]]],
    *,
    now: float,
    running: Sequence[ReplicaID],
    target: int,
    requests: float,
    queued: float = 0.0,
    state: dict[str, Any] | None = None,
) -> AutoscalingContext:
    """What Serve 2.60 hands to a policy."""
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name="Model",
        app_name="m",
        current_num_replicas=len(running),
        target_num_replicas=target,
        running_replicas=list(running),
        total_num_requests=requests,
        total_queued_requests=queued,
        aggregated_metrics=lambda: _not_asked_for(),
        raw_metrics=metrics,
        capacity_adjusted_min_replicas=config.min_replicas,
        capacity_adjusted_max_replicas=config.max_replicas,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now,
        config=config,
    )


def _not_asked_for() -> Any:
    raise AssertionError("Serve's aggregation fails on values that are not numbers")


class Job(msgspec.Struct):
    """A request: tokens still to compute and to generate, and when it came and got its slot."""

    arrived: float
    prompt: float
    answer: float
    started: float | None = None


class SimulatedReplica:
    def __init__(self, name: str, ready_at: float, slots: int, prefill_per_s: float, decode_per_s: float) -> None:
        self.id = replica_id(name)
        self.ready_at = ready_at
        self.draining = False
        self.jobs: list[Job] = []
        self.generated = 0.0
        self.series: dict[str, list[TimeStampedValue]] = {}
        self.slots, self._prefill_per_s, self._decode_per_s = slots, prefill_per_s, decode_per_s

    def compute(self) -> None:
        """One second: prompts take turns, first come first served; every other stream decodes."""
        budget = self._prefill_per_s
        for job in self.jobs:
            if job.prompt > 0:
                done = min(job.prompt, budget)
                job.prompt -= done
                budget -= done
            else:
                job.answer -= self._decode_per_s
                self.generated += self._decode_per_s
        self.jobs = [job for job in self.jobs if job.prompt > 0 or job.answer > 0]

    def sample(self, now: float, look_back_s: float) -> None:
        stats = BackendStats(
            slots=self.slots,
            running=len(self.jobs),
            waiting=0,
            uncached_tokens_queued=int(sum(job.prompt for job in self.jobs)),
            prefill_tokens_per_s=self._prefill_per_s,
            generated_tokens_total=int(self.generated),
        )
        for name, value in report(stats).items():
            points = [p for p in self.series.get(name, []) if p.timestamp > now - look_back_s]
            self.series[name] = [*points, TimeStampedValue(now, value)]


class Outcome(msgspec.Struct, frozen=True):
    """`changes` are (second, replicas before, replicas after); waits are seconds from arrival to a slot."""

    changes: list[tuple[float, int, int]]
    waits: list[float]
    unserved: int

    @property
    def ups(self) -> int:
        return sum(after > before for _, before, after in self.changes)

    @property
    def downs(self) -> int:
        return sum(after < before for _, before, after in self.changes)


def simulate(
    arrivals: Iterable[Job],
    config: AutoscalingConfig,
    set_clock: Callable[[float], None],
    *,
    seconds: int = 3600,
    slots: int = 8,
    prefill_per_s: float = 1000.0,
    decode_per_s: float = 20.0,
    start_s: float = 30.0,
) -> Outcome:
    """`set_clock` makes Serve's clock show what it is given. New replicas take `start_s` to load their model."""
    decide = autoscaling_policy._apply_autoscaling_config(ShortagePolicy())
    target = config.initial_replicas if config.initial_replicas is not None else config.min_replicas
    names: Iterator[str] = (f"r{i}" for i in range(10_000))

    def new(ready_at: float) -> SimulatedReplica:
        return SimulatedReplica(next(names), ready_at, slots, prefill_per_s, decode_per_s)

    replicas = [new(0) for _ in range(target)]
    published: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    queue: deque[Job] = deque()
    totals: deque[float] = deque(maxlen=int(config.look_back_period_s))
    waits: list[float] = []
    changes: list[tuple[float, int, int]] = []
    state: dict[str, Any] = {}
    coming = deque(arrivals)
    for second in range(seconds):
        now = float(second)
        set_clock(now)
        while coming and coming[0].arrived <= now:
            queue.append(coming.popleft())
        running = [r for r in replicas if r.ready_at <= now and not r.draining]
        while queue and (free := [r for r in running if len(r.jobs) < r.slots]):
            job = queue.popleft()
            waits.append(now - job.arrived)
            min(free, key=lambda r: len(r.jobs)).jobs.append(job)
        for replica in replicas:
            replica.compute()
        replicas = [r for r in replicas if r.jobs or not r.draining]
        if second % SAMPLE_EVERY_S == 0:
            for replica in running:
                replica.sample(now, config.look_back_period_s)
        if second % REPORT_EVERY_S == 0:
            published = {}
            for replica in running:
                for name, points in replica.series.items():
                    published.setdefault(name, {})[replica.id] = list(points)
        totals.append(len(queue) + sum(len(r.jobs) for r in running))
        ctx = context(
            config,
            published,
            now=now,
            running=[r.id for r in running],
            target=target,
            # From zero, the gateway's count comes at once; else it is a mean.
            requests=sum(totals) / len(totals) if running else len(queue),
            queued=float(len(queue)),
            state=state,
        )
        wanted, state = decide(ctx)
        wanted = max(config.min_replicas, min(config.max_replicas, wanted))
        if wanted != target:
            changes.append((now, target, wanted))
            alive = [r for r in replicas if not r.draining]
            for _ in range(wanted - target):
                replicas.append(new(now + start_s))
            for replica in alive[wanted:]:
                replica.draining = True
            target = wanted
    unserved = len(queue) + sum(len(r.jobs) for r in replicas)
    return Outcome(changes, waits, unserved)


def load(
    seed: int, rate: Callable[[float], float], seconds: int = 3500, prompt: int = 600, answer: int = 200
) -> list[Job]:
    """Requests at `rate(t)` per second, evenly drawn, of exponential lengths around `prompt` and `answer` tokens."""
    random = Random(seed)
    jobs = []
    for second in range(seconds):
        expected = rate(second)
        count = int(expected) + (random.random() < expected - int(expected))
        for _ in range(count):
            jobs.append(Job(second, max(random.expovariate(1 / prompt), 1), max(random.expovariate(1 / answer), 1)))
    return jobs
