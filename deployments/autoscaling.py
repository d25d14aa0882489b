"""How many replicas a model needs, from what it is short of. Serve's count of requests says little about a model: one
request may bring ten tokens or a hundred thousand.

Each shortage is a number of replicas; the largest counts. Sums are over the replicas that run, every figure is its mean
over Serve's `look_back_period_s`, and slots, KV cache and rates are those of an average replica:

    slots    requests, running or waiting anywhere / (slots of a replica * slot_use)
    prompts  uncached prompt tokens / (prefill tokens per second * prompt_wait_s), but at most one replica for each
             request: two compute a single long prompt no faster than one
    memory   KV tokens in use / (KV tokens of a replica * kv_use)
    decode   running requests * stream_tokens_per_s / (tokens a replica generates per second); off unless it is set

With `need` the largest and `n` the replicas asked for last, hysteresis is a band in size:

    up    to ceil(need)          if that is more than n
    down  to ceil(need / band)   if that is less than n: what remains is used to no more than `band` of its limits
    else  n

and Serve's delays in time, which come after this (`upscale_delay_s`, `downscale_delay_s`, for the last replica
`downscale_to_zero_delay_s`): the wish must have held for so long without a break. Serve then takes the wish of that
moment, which between two bursts says little; so here the wish down is the largest of the last `downscale_delay_s`, and
at least one less than n. Then come `upscaling_factor`, `downscaling_factor`, and `min_replicas` and `max_replicas`.
From no replica to the first Serve goes by itself, at once, when a request waits. A model with requests keeps one.

A replica whose report is missing, older than 60 s, of another version or no use (not numbers, negative, NaN) is left
out of the figures. Without any report requests are compared with Serve's `target_ongoing_requests`.

It runs in Serve's controller, some times a second: it imports nothing of this project, and Serve keeps what it
remembers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from backends.base import BackendStats

POLICY = "deployments.autoscaling:ShortagePolicy"

REPORT_VERSION = 1.0
STALE_S = 60.0
"""Six times what Serve takes from one report of a replica to the next."""


def report(stats: BackendStats) -> dict[str, float]:
    """What a replica tells the policy. Serve takes numbers only, and sends them every 10 s."""
    return {
        "version": REPORT_VERSION,
        "slots": float(stats.slots),
        "running": float(stats.running),
        "waiting": float(stats.waiting),
        "uncached_tokens": float(stats.uncached_tokens_queued),
        "kv_used": float(stats.kv_tokens_used),
        "kv_capacity": float(stats.kv_tokens_capacity),
        "prefill_per_s": float(stats.prefill_tokens_per_s),
        "generated_total": float(stats.generated_tokens_total),
    }


class Reading(NamedTuple):
    """One replica's report, read: requests, tokens, and tokens per second (0 where none were measured)."""

    slots: float
    running: float
    waiting: float
    uncached_tokens: float
    kv_used: float
    kv_capacity: float
    prefill_per_s: float
    generated_per_s: float


class Targets(NamedTuple):
    """What the policy aims at; the module says how. `slot_use`, `kv_use` and `band` are shares of 1."""

    slot_use: float = 0.9
    prompt_wait_s: float = 5.0
    kv_use: float = 0.9
    stream_tokens_per_s: float = 0.0
    band: float = 0.7


class Wish(NamedTuple):
    """Replicas: more are needed below `up`, fewer are enough above `down`, which is at least `up`."""

    up: int
    down: int


def wish(readings: Sequence[Reading], requests: float, queued: float, targets: Targets, fallback_target: float) -> Wish:
    """`requests` is Serve's count of all there are, `queued` of those that no replica has yet, and `fallback_target`
    how many a replica is to have where there are no readings.
    """
    requests = max(requests, queued + sum(r.running + r.waiting for r in readings))
    need = _need(readings, requests, targets) if readings else requests / fallback_target
    least = 1 if requests > 0 else 0
    return Wish(max(math.ceil(need), least), max(math.ceil(need / targets.band), least))


Peaks = list[tuple[float, int]]
"""Times and wishes down, each larger than all that came after it."""


def settled(wish: Wish, replicas: int, peaks: Peaks, now: float, window_s: float) -> tuple[int, Peaks]:
    """What to ask Serve for, given the `replicas` asked for last, and the peaks to remember."""
    peaks = [(at, down) for at, down in peaks if now - window_s < at <= now and down > wish.down]
    peaks.append((now, wish.down))
    if wish.up > replicas:
        return wish.up, peaks
    if wish.down >= replicas or replicas == 1:  # the last one goes by a delay of its own
        return min(wish.down, replicas), peaks
    return min(peaks[0][1], replicas - 1), peaks


def _need(readings: Sequence[Reading], requests: float, targets: Targets) -> float:
    """Replicas, as a fraction."""
    slots = _mean([r.slots for r in readings])
    prefill = _mean([r.prefill_per_s for r in readings if r.prefill_per_s])
    memory = _mean([r.kv_capacity for r in readings if r.kv_capacity])
    generated = _mean([r.generated_per_s for r in readings if r.generated_per_s])
    needs = [_ratio(requests, slots * targets.slot_use)]
    needs.append(min(_ratio(sum(r.uncached_tokens for r in readings), prefill * targets.prompt_wait_s), requests))
    needs.append(_ratio(sum(r.kv_used for r in readings), memory * targets.kv_use))
    needs.append(_ratio(sum(r.running for r in readings) * targets.stream_tokens_per_s, generated))
    return max(needs)


class ShortagePolicy:
    """Serve's name for it: `policy_function` of an `AutoscalingPolicy`. `policy_kwargs` are the fields of `Targets`."""

    def __init__(self, **targets: float) -> None:
        self._targets = Targets(**targets)
        for name, value in self._targets._asdict().items():
            if _number(value) is None or (value == 0 and name != "stream_tokens_per_s"):
                raise ValueError(f"policy_kwargs: {name} must be a number above 0, not {value!r}")
        if self._targets.band > 1:
            raise ValueError(f"policy_kwargs: band must be at most 1, not {self._targets.band!r}")

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        if ctx.current_num_replicas == 0:
            return ctx.target_num_replicas, {}  # one is starting, or none is wanted; Serve itself starts the first
        config, now = ctx.config, ctx.current_time
        assert config is not None and now is not None, "Serve leaves them out nowhere"
        readings = read_reports(ctx.raw_metrics or {}, ctx.running_replicas, now, config.look_back_period_s)
        requests, queued = _number(ctx.total_num_requests) or 0.0, _number(ctx.total_queued_requests) or 0.0
        wanted = wish(readings, requests, queued, self._targets, config.target_ongoing_requests)
        replicas, peaks = settled(
            wanted, ctx.target_num_replicas, ctx.policy_state.get("peaks", []), now, config.downscale_delay_s
        )
        return replicas, {"peaks": peaks}


def read_reports(
    metrics: Mapping[str, Mapping[Any, Any]], replicas: Sequence[Any], now: float, look_back_s: float
) -> list[Reading]:
    """Those of `replicas` whose reports are of use. `metrics[name][replica]` is a series of timestamps and values."""
    readings = (_reading(metrics, replica, now, look_back_s) for replica in replicas)
    return [reading for reading in readings if reading is not None]


def _reading(metrics: Mapping[str, Mapping[Any, Any]], replica: Any, now: float, look_back_s: float) -> Reading | None:
    def series(name: str) -> list[tuple[float, float]] | None:
        """None if any value is no use: a replica that errs once is not believed in the rest."""
        points = []
        for point in metrics.get(name, {}).get(replica, ()):
            at, value = _number(point.timestamp), _number(point.value)
            if at is None or value is None:
                return None
            points.append((at, value))
        if not points or abs(now - points[-1][0]) > STALE_S:
            return None
        # Compared with the replica's own last clock reading: nodes do not agree on the time.
        return [point for point in points if points[-1][0] - point[0] <= look_back_s]

    def mean(name: str) -> float | None:
        points = series(name)
        return None if points is None else _mean([value for _, value in points])

    version, rates, generated = series("version"), series("prefill_per_s"), series("generated_total")
    means = [mean(name) for name in ("slots", "running", "waiting", "uncached_tokens", "kv_used", "kv_capacity")]
    if version is None or version[-1][1] != REPORT_VERSION or rates is None or generated is None:
        return None
    slots, running, waiting, uncached, kv_used, kv_capacity = means
    if not slots or running is None or waiting is None or uncached is None or kv_used is None or kv_capacity is None:
        return None
    seconds, tokens = generated[-1][0] - generated[0][0], generated[-1][1] - generated[0][1]
    return Reading(
        slots, running, waiting, uncached, kv_used, kv_capacity, rates[-1][1], _ratio(max(tokens, 0.0), seconds)
    )


def _number(value: object) -> float | None:
    """None for what is no finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _ratio(part: float, whole: float) -> float:
    """0 where `whole` is not known."""
    return part / whole if whole > 0 else 0.0
