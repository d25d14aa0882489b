"""How many replicas a model is to have: the formula, what it does without good numbers, and an hour of load."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve import autoscaling_policy
from ray.serve._private.common import ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from backends.base import BackendStats
from backends.fake import FakeSettings
from deployments.autoscaling import POLICY, Peaks, Reading, ShortagePolicy, Targets, Wish, report, settled, wish
from deployments.replica import Replica
from deployments.settings import ModelSettings
from tests.deployments.autoscaling_simulation import Outcome, context, load, replica_id, simulate

Clock = Callable[[float], None]
NOW = 1000.0


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    shown = [0.0]
    monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=lambda: shown[0]))

    def set_to(now: float) -> None:
        shown[0] = now

    return set_to


def reading(**values: float) -> Reading:
    plain = {"slots": 10.0, "running": 0.0, "waiting": 0.0, "uncached_tokens": 0.0, "kv_used": 0.0}
    plain |= {"kv_capacity": 10_000.0, "prefill_per_s": 100.0, "generated_per_s": 0.0}
    return Reading(**(plain | values))


def wanted(*readings: Reading, requests: float, replicas: int, queued: float = 0.0, **targets: float) -> int:
    """With nothing remembered."""
    now = wish(readings, requests, queued, Targets(**targets), fallback_target=4.0)
    return settled(now, replicas, [], NOW, window_s=300)[0]


# --- the formula ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "requests", "replicas", "says"),
    [
        ([reading(running=9)], 9, 1, 1),
        ([reading(running=10)], 10, 1, 2),
        ([reading(running=10)] * 3, 120, 3, 14),
        ([reading(running=2, uncached_tokens=499)], 2, 1, 1),
        ([reading(running=2, uncached_tokens=501)], 2, 1, 2),
        ([reading(running=1, uncached_tokens=90_000)], 1, 1, 1),
        ([reading(running=3, uncached_tokens=90_000)], 3, 1, 3),
        ([reading(running=3, uncached_tokens=90_000, prefill_per_s=0)], 3, 1, 1),
        ([reading(running=2, kv_used=9_500)], 2, 1, 2),
        ([reading(running=2, kv_used=9_500, kv_capacity=0)], 2, 1, 1),
        ([reading(waiting=12)], 0, 1, 2),
    ],
)
def test_the_largest_shortage_counts(readings: list[Reading], requests: float, replicas: int, says: int) -> None:
    assert wanted(*readings, requests=requests, replicas=replicas) == says


def test_slow_streams_are_a_shortage_where_a_speed_is_asked_for() -> None:
    slow = reading(running=8, generated_per_s=40.0)
    assert wanted(slow, requests=8, replicas=1) == 1
    assert wanted(slow, requests=8, replicas=1, stream_tokens_per_s=10.0) == 2


def test_between_up_and_down_there_is_a_band_in_which_nothing_changes() -> None:
    """Two replicas of 10 slots: more than 18 requests are too many, fewer than 6.3 fit into one."""
    sizes = {n: wanted(reading(), reading(), requests=n, replicas=2) for n in (0, 1, 6, 7, 12, 18, 19)}
    assert sizes == {0: 0, 1: 1, 6: 1, 7: 2, 12: 2, 18: 2, 19: 3}


def test_asking_again_changes_nothing() -> None:
    for requests in range(200):
        for replicas in range(12):
            once = wanted(reading(), requests=requests, replicas=replicas)
            assert wanted(reading(), requests=requests, replicas=once) == once


def test_without_readings_it_is_serves_count_that_counts() -> None:
    assert wanted(requests=9, replicas=1) == 3
    assert wanted(requests=0, replicas=3) == 0


def test_the_wish_down_is_the_largest_of_the_window() -> None:
    peaks: Peaks = []
    asked = []
    for at, down in [(0, 3), (10, 7), (20, 2), (30, 4), (250, 1), (309, 1), (311, 1), (600, 1)]:
        replicas, peaks = settled(Wish(down - 1, down), 8, peaks, at, window_s=300)
        asked.append(replicas)
    assert asked == [3, 7, 7, 7, 7, 7, 4, 1]
    assert len(peaks) == 1


def test_a_wish_down_that_was_larger_than_what_there_is_still_starts_serves_clock() -> None:
    assert settled(Wish(1, 2), 8, [(0.0, 9)], 1.0, window_s=300)[0] == 7


def test_the_last_replica_waits_for_its_own_delay_only() -> None:
    assert settled(Wish(0, 0), 1, [(0.0, 9)], 1.0, window_s=300)[0] == 0


# --- what Serve hands over -----------------------------------------------------

BUSY = BackendStats(slots=10, running=10, waiting=8, kv_tokens_capacity=1000, prefill_tokens_per_s=100.0)


def metrics(
    *replicas: ReplicaID, at: float = NOW, **changed: Any
) -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
    """Reports of busy replicas, of now and of 6 s ago."""
    values = report(BUSY) | changed
    return {
        name: {replica: [TimeStampedValue(at - 6, value), TimeStampedValue(at, value)] for replica in replicas}
        for name, value in values.items()
    }


A, B = replica_id("a"), replica_id("b")
CONFIG = AutoscalingConfig(min_replicas=0, max_replicas=100, target_ongoing_requests=1)


def decide(reports: dict[str, Any], *running: ReplicaID, requests: float = 18, target: int | None = None) -> int:
    target = len(running) if target is None else target
    ctx = context(CONFIG, reports, now=NOW, running=running, target=target, requests=requests)
    return ShortagePolicy()(ctx)[0]


def test_reports_are_used() -> None:
    assert decide(metrics(A), A) == 2
    assert decide(metrics(A, B), A, B, requests=36) == 4


BAD: dict[str, dict[str, Any]] = {
    "missing": {},
    "NaN": metrics(A, running=math.nan),
    "infinite": metrics(A, kv_used=math.inf),
    "negative": metrics(A, waiting=-1.0),
    "a string": metrics(A, uncached_tokens="many"),
    "a bool": metrics(A, slots=True),
    "None": metrics(A, prefill_per_s=None),
    "no slots": metrics(A, slots=0.0),
    "another version": metrics(A, version=2.0),
    "stale": metrics(A, at=NOW - 61),
    "a clock far ahead": metrics(A, at=NOW + 61),
    "a part of it": {"version": metrics(A)["version"], "slots": metrics(A)["slots"]},
    "of another replica": metrics(B),
    "an empty series": metrics(A) | {"running": {A: []}},
}


@pytest.mark.parametrize("reports", BAD.values(), ids=BAD)
def test_bad_reports_leave_serves_count(reports: dict[str, Any]) -> None:
    """18 requests, of which a replica is to have one."""
    assert decide(reports, A) == 18


def test_a_replica_without_a_good_report_leaves_the_others_theirs() -> None:
    mixed = metrics(A)
    for name, series in metrics(B, running=math.nan).items():
        mixed[name] |= series
    assert decide(mixed, A, B) == 2


def test_a_count_that_started_again_is_no_speed() -> None:
    fell = metrics(A)
    fell["generated_total"][A] = [TimeStampedValue(NOW - 6, 5000.0), TimeStampedValue(NOW, 10.0)]
    ctx = context(CONFIG, fell, now=NOW, running=[A], target=1, requests=18)
    assert ShortagePolicy(stream_tokens_per_s=1000.0)(ctx)[0] == 2


def test_with_none_running_what_was_asked_for_stays() -> None:
    assert decide({}, requests=0, target=1) == 1
    assert decide({}, requests=0, target=0) == 0


async def test_a_replica_reports_numbers_only() -> None:
    replica = Replica(ModelSettings(backend=FakeSettings(slots=3)), "127.0.0.1")
    told = await replica.record_autoscaling_stats()
    assert told["slots"] == 3.0 and {type(value) for value in told.values()} == {float}


@pytest.mark.parametrize(
    "wrong", [{"slot_use": 0}, {"band": 1.5}, {"prompt_wait_s": -1}, {"kv_use": "x"}, {"kv_use": math.nan}]
)
def test_targets_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ShortagePolicy(**wrong)


WITHOUT_OURS = """
import pickle, sys
class Nothing:
    def find_spec(name, *_):
        assert name.split(".")[0] not in ("deployments", "backends", "protocols"), name
sys.meta_path.insert(0, Nothing)
print(pickle.load(open("policy", "rb"))(slot_use=0.5)._targets.slot_use)
"""


def test_the_controller_needs_nothing_of_ours_to_load_it(tmp_path: Path) -> None:
    pickled = AutoscalingPolicy(policy_function=POLICY).get_serialized_policy_def()
    assert pickled is not None
    (tmp_path / "policy").write_bytes(pickled)
    done = subprocess.run([sys.executable, "-c", WITHOUT_OURS], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "0.5\n", done.stderr


# --- an hour of load -----------------------------------------------------------


def scaling(**changed: Any) -> AutoscalingConfig:
    options: dict[str, Any] = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 8}
    return AutoscalingConfig(**(options | {"upscale_delay_s": 10, "downscale_delay_s": 300} | changed))


SEEDS = pytest.mark.parametrize("seed", range(3))


@SEEDS
def test_steady_load_settles(seed: int, set_clock: Clock) -> None:
    """About 10 busy slots; a replica has 8."""
    outcome = simulate(load(seed, lambda t: 0.5), scaling(), set_clock)
    assert outcome.ups <= 2 and outcome.downs <= 1
    assert max(outcome.waits) < 60


@SEEDS
def test_bursts_closer_together_than_the_delay_are_taken_without_flapping(seed: int, set_clock: Clock) -> None:
    outcome = simulate(load(seed, lambda t: 2.5 if t % 300 < 60 else 0.0), scaling(), set_clock)
    assert outcome.unserved == 0
    assert outcome.ups <= 5 and outcome.downs <= 3
    assert max(outcome.waits) < 60
    assert max(outcome.waits[len(outcome.waits) // 3 :]) <= 1, "the replicas of one burst are there for the next"


@SEEDS
def test_bursts_far_apart_cost_one_round_trip_each(seed: int, set_clock: Clock) -> None:
    """Six bursts; after each, the replicas go in a few steps and come back for the next."""
    outcome = simulate(load(seed, lambda t: 2.5 if t % 600 < 60 else 0.0), scaling(downscale_delay_s=60), set_clock)
    assert outcome.unserved == 0
    assert outcome.ups <= 6 * 4 and outcome.downs <= 6 * 3
    assert not undone(outcome, within_s=60)
    assert max(outcome.waits) < 90


@SEEDS
def test_long_prompts_are_what_it_scales_on(seed: int, set_clock: Clock) -> None:
    """Few requests, far from filling the slots, whose prompts alone take a replica longer than there is time."""
    asked = simulate(load(seed, lambda t: 0.08, prompt=16_000, answer=20), scaling(), set_clock, slots=64)
    assert max(after for _, _, after in asked.changes) >= 3
    assert asked.ups <= 8 and asked.downs <= 8


@SEEDS
def test_to_zero_and_back(seed: int, set_clock: Clock) -> None:
    """One request every 20 minutes."""
    config = scaling(min_replicas=0, downscale_to_zero_delay_s=120)
    outcome = simulate(load(seed, lambda t: 1.0 if t % 1200 == 100 else -1.0), config, set_clock)
    assert [(before, after) for _, before, after in outcome.changes] == [(0, 1), (1, 0)] * 3
    assert [at for at, _, after in outcome.changes if after] == [100, 1300, 2500], "at once"
    assert outcome.waits == [30.0] * 3, "as long as a replica takes to load"
    assert all(
        off - on >= 120 for (on, _, _), (off, _, _) in zip(outcome.changes[::2], outcome.changes[1::2], strict=True)
    )


def undone(outcome: Outcome, within_s: float) -> bool:
    """Whether a step down is undone within `within_s`."""
    downs = [at for at, before, after in outcome.changes if after < before]
    ups = [at for at, before, after in outcome.changes if after > before]
    return any(0 < up - down < within_s for down in downs for up in ups)
