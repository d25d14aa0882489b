"""The table through Ray's metrics, with Ray's own recording taken note of."""

from __future__ import annotations

import pytest
from ray.util.metrics import Counter, Gauge, Histogram, Metric

from deployments import metrics
from deployments.metrics import TABLE, Sample
from deployments.ray_metrics import RayMetrics

Recorded = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    values: Recorded = []

    def record(self: Metric, value: float, tags: dict[str, str]) -> None:
        self._validate_tags(tags)
        values.append((self.info["name"], value, tags))

    monkeypatch.setattr(Metric, "_record", record)
    return values


def test_every_metric_is_known_to_ray_as_what_it_is() -> None:
    sink = RayMetrics()
    known = {**sink._counters, **sink._gauges, **sink._histograms}
    kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    for metric in TABLE:
        told = known[metric.name]
        assert type(told) is kinds[metric.kind]
        assert (told.info["description"], told.info["tag_keys"]) == (metric.help, metric.labels)
        assert told.info.get("boundaries", []) == list(metric.buckets)


def test_counters_and_histograms_take_values(recorded: Recorded) -> None:
    sink = RayMetrics()
    sink.add(metrics.OUTPUT_TOKENS, ("m", "d"), 3)
    sink.add(metrics.OUTPUT_TOKENS, ("m", "d"), 0)
    sink.add(metrics.HIT_RATIO, ("m", "d"), 0)
    sink.add(metrics.OUTPUT_TOKENS, ("m", "d"), 4)
    of = {"model": "m", "dialect": "d"}
    assert recorded == [("tokenyard_prefix_hit_ratio", 0, of)]
    sink.show([])
    assert recorded[1:] == [("tokenyard_output_tokens_total", 7, of)]
    sink.show([])
    assert len(recorded) == 2


def test_a_gauge_that_is_no_more_becomes_0_once(recorded: Recorded) -> None:
    sink = RayMetrics()
    sink.show([Sample(metrics.ACTIVE, ("a", "d"), 1), Sample(metrics.ACTIVE, ("b", "d"), 2)])
    recorded.clear()
    sink.show([Sample(metrics.ACTIVE, ("b", "d"), 3)])
    sink.show([Sample(metrics.ACTIVE, ("b", "d"), 4)])
    values = [(tags["model"], value) for _, value, tags in recorded]
    assert values == [("b", 3), ("a", 0.0), ("b", 4)]
