"""Every metric there is: one table of names, labels and units, and the registry behind `/metrics` of one process.

In a cluster the same names also go out through Ray, which puts `ray_` before them (`ray_metrics.py`). There each
gateway counts its own requests, and each replica says how it is doing; sums over a cluster are Prometheus's work.
`/metrics` of one gateway of several has only what went through that one.

A label's values are few: models are those that there are, and any other name is `UNKNOWN`; dialects and outcomes are
closed sets. Nothing a client wrote becomes a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Literal, Protocol, assert_never

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["requests", "seconds", "tokens", "ratio", "replicas", "slots"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

UNKNOWN = "unknown"
"""The label of everything that asks for a model that there is not."""


class Metric(msgspec.Struct, frozen=True):
    """Counters and histograms are counted as requests end; gauges are read when somebody looks."""

    name: str
    kind: Kind
    unit: Unit
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


OF_REQUEST = ("model", "dialect")
OF_REPLICA = ("model", "replica")

_WAITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAPS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_LENGTHS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

REQUESTS = Metric(
    "tokenyard_requests_total",
    "counter",
    "requests",
    (*OF_REQUEST, "outcome"),
    "Requests that ended, by how: ok, client_gone, or the kind of their error.",
)
REJECTIONS = Metric(
    "tokenyard_rejections_total",
    "counter",
    "requests",
    (*OF_REQUEST, "reason"),
    "Requests refused with 429 or 529, by the kind of the error: a queue or a limit was full.",
)
MOVES = Metric(
    "tokenyard_moves_total",
    "counter",
    "requests",
    OF_REQUEST,
    "Times that a request went on at another replica because its own was lost.",
)
PROMPT_TOKENS = Metric(
    "tokenyard_prompt_tokens_total",
    "counter",
    "tokens",
    OF_REQUEST,
    "Tokens of prompts, with those from the cache.",
)
CACHED_TOKENS = Metric(
    "tokenyard_cached_tokens_total", "counter", "tokens", OF_REQUEST, "Tokens of prompts that came from the cache."
)
OUTPUT_TOKENS = Metric("tokenyard_output_tokens_total", "counter", "tokens", OF_REQUEST, "Tokens that were generated.")
QUEUE_WAIT = Metric(
    "tokenyard_queue_wait_seconds",
    "histogram",
    "seconds",
    OF_REQUEST,
    "From a request's arrival until it holds a slot of an engine.",
    _WAITS_S,
)
FIRST_TOKEN = Metric(
    "tokenyard_time_to_first_token_seconds",
    "histogram",
    "seconds",
    OF_REQUEST,
    "From a request's arrival to its first token.",
    _WAITS_S,
)
INTER_TOKEN = Metric(
    "tokenyard_inter_token_seconds",
    "histogram",
    "seconds",
    OF_REQUEST,
    "Mean time between the tokens of one answer, observed once for each answer of two tokens or more.",
    _GAPS_S,
)
DURATION = Metric(
    "tokenyard_request_seconds", "histogram", "seconds", OF_REQUEST, "From a request's arrival to its end.", _LENGTHS_S
)
HIT_RATIO = Metric(
    "tokenyard_prefix_hit_ratio",
    "histogram",
    "ratio",
    OF_REQUEST,
    "Share of a prompt's tokens that came from the cache.",
    _SHARES,
)
ACTIVE = Metric(
    "tokenyard_active_streams", "gauge", "requests", OF_REQUEST, "Generations that are queued or run, streamed or not."
)
REPLICAS = Metric(
    "tokenyard_replicas", "gauge", "replicas", ("model", "state"), "Replicas that are running, or starting."
)
SLOTS = Metric("tokenyard_slots", "gauge", "slots", OF_REPLICA, "Requests that can run at once.")
SLOTS_BUSY = Metric("tokenyard_slots_busy", "gauge", "slots", OF_REPLICA, "Requests that run.")
WAITING = Metric("tokenyard_requests_waiting", "gauge", "requests", OF_REPLICA, "Requests in an engine's own queue.")
KV_TOKENS = Metric("tokenyard_kv_tokens", "gauge", "tokens", OF_REPLICA, "Room of the KV cache.")
KV_TOKENS_USED = Metric("tokenyard_kv_tokens_used", "gauge", "tokens", OF_REPLICA, "What of the KV cache is in use.")

TABLE = (
    REQUESTS,
    REJECTIONS,
    MOVES,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    OUTPUT_TOKENS,
    QUEUE_WAIT,
    FIRST_TOKEN,
    INTER_TOKEN,
    DURATION,
    HIT_RATIO,
    ACTIVE,
    REPLICAS,
    SLOTS,
    SLOTS_BUSY,
    WAITING,
    KV_TOKENS,
    KV_TOKENS_USED,
)


class Sample(msgspec.Struct, frozen=True):
    """A gauge's value. `labels` are in the order of `Metric.labels`, as everywhere here."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class Sink(Protocol):
    """Where values go."""

    def add(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """To a counter, or to a histogram as one observation."""


class _Gauges(Collector):
    """All gauges as they were read last. What is gone by then, a replica above all, is gone from here too."""

    def __init__(self) -> None:
        self.samples: Sequence[Sample] = ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for metric in TABLE:
            if metric.kind == "gauge":
                family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
                for sample in self.samples:
                    if sample.metric is metric:
                        family.add_metric(sample.labels, sample.value)
                yield family


class _Part(Collector):
    """What is about `models`, or about none."""

    def __init__(self, whole: Collector, models: Set[str]) -> None:
        self._whole = whole
        self._models = models | {""}

    def collect(self) -> Iterator[Family]:
        for family in self._whole.collect():
            family.samples = [one for one in family.samples if one.labels["model"] in self._models]
            yield family


class Registry:
    """The `Sink` of `/metrics`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._adders: dict[tuple[str, tuple[str, ...]], Callable[[float], None]] = {}
        self._gauges = _Gauges()
        for metric in TABLE:
            name, text, labels = metric.name, metric.help, metric.labels
            match metric.kind:
                case "counter":
                    self._counters[name] = Counter(name, text, labels, registry=self._registry)
                case "histogram":
                    self._histograms[name] = Histogram(
                        name, text, labels, registry=self._registry, buckets=metric.buckets
                    )
                case "gauge":
                    pass
                case _:
                    assert_never(metric.kind)
        self._registry.register(self._gauges)

    def add(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        key = metric.name, labels
        adder = self._adders.get(key)
        if adder is None:  # looking one up by its labels costs more than using it
            if metric.kind == "counter":
                adder = self._counters[metric.name].labels(*labels).inc
            else:
                adder = self._histograms[metric.name].labels(*labels).observe
            self._adders[key] = adder
        adder(value)

    def text(self, gauges: Sequence[Sample], models: Set[str] | None = None) -> bytes:
        """In Prometheus's format, with the gauges as they are now: all, or those about `models` and about none."""
        self._gauges.samples = gauges
        return generate_latest(self._registry if models is None else _Part(self._registry, models))
