"""The table of `metrics.py` through Ray, which exports it on every node beside its own, with `ray_` before a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ray.util import metrics as ray

from deployments.metrics import TABLE, Metric, Sample

_LABELS = {metric.name: metric.labels for metric in TABLE}


class RayMetrics:
    """A `Sink`, for one process. Ray tells those of a cluster apart by labels of its own."""

    def __init__(self) -> None:
        self._counters: dict[str, ray.Counter] = {}
        self._gauges: dict[str, ray.Gauge] = {}
        self._histograms: dict[str, ray.Histogram] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}  # since it was shown
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
        if metric.kind == "histogram":
            self._histograms[metric.name].observe(value, dict(zip(metric.labels, labels, strict=True)))
        else:
            # Telling Ray takes as long as a token's whole way.
            of = metric.name, labels
            self._counted[of] = self._counted.get(of, 0.0) + value

    def show(self, gauges: Sequence[Sample]) -> None:
        """The counters so far, and `gauges`. What is not among these any more becomes 0: Ray forgets a value only with
        the process that said it.
        """
        counted, self._counted = self._counted, {}
        for (name, labels), value in counted.items():
            if value > 0:  # Ray refuses to add nothing
                self._counters[name].inc(value, dict(zip(_LABELS[name], labels, strict=True)))
        for gauge in gauges:
            self._gauges[gauge.metric.name].set(gauge.value, dict(zip(gauge.metric.labels, gauge.labels, strict=True)))
        shown = {(gauge.metric.name, gauge.labels) for gauge in gauges}
        for name, labels in self._shown - shown:
            self._gauges[name].set(0.0, dict(zip(_LABELS[name], labels, strict=True)))
        self._shown = shown
