"""The table of `metrics.py` through Ray, which exports it on every node beside its own, with `ray_` before a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ray.util import metrics as ray

from deployments.metrics import TABLE, Metric, Sample


class RayMetrics:
    """A `Sink`, for one process. Ray tells those of a cluster apart by labels of its own."""

    def __init__(self) -> None:
        self._counters: dict[str, ray.Counter] = {}
        self._gauges: dict[str, ray.Gauge] = {}
        self._histograms: dict[str, ray.Histogram] = {}
        self._shown: set[tuple[str, tuple[str, ...]]] = set()
        for metric in TABLE:
            name, text, labels = metric.name, metric.help, metric.labels
            match metric.kind:
                case "counter":
                    self._counters[name] = ray.Counter(name, text, labels)
                case "gauge":
                    self._gauges[name] = ray.Gauge(name, text, labels)
                case "histogram":
                    self._histograms[name] = ray.Histogram(name, text, list(metric.buckets), labels)
                case _:
                    assert_never(metric.kind)

    def add(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        tags = dict(zip(metric.labels, labels, strict=True))
        if metric.kind == "histogram":
            self._histograms[metric.name].observe(value, tags)
        elif value > 0:  # Ray refuses to add nothing
            self._counters[metric.name].inc(value, tags)

    def show(self, gauges: Sequence[Sample]) -> None:
        """What is not among `gauges` any more becomes 0: Ray forgets a value only with the process that said it."""
        for gauge in gauges:
            self._gauges[gauge.metric.name].set(gauge.value, dict(zip(gauge.metric.labels, gauge.labels, strict=True)))
        shown = {(gauge.metric.name, gauge.labels) for gauge in gauges}
        for name, labels in self._shown - shown:
            metric = next(metric for metric in TABLE if metric.name == name)
            self._gauges[name].set(0.0, dict(zip(metric.labels, labels, strict=True)))
        self._shown = shown
