"""Alert rules for Prometheus, on the names that Ray exports. Each says what is wrong and where to look."""

from __future__ import annotations

from typing import Any

import yaml

from deployments import metrics
from deployments.metrics import Metric

PREFIX = "ray_"

_HEAD = """# Written by `python -m deployments.dashboards`.
# The thresholds are a start: yours depend on your models and machines.
"""


def _rate(metric: Metric, where: str = "", suffix: str = "", by: str = "model") -> str:
    return f"sum by ({by}) (rate({PREFIX}{metric.name}{suffix}{where}[5m]))"


def _total(metric: Metric) -> str:
    return f"sum by (model) ({PREFIX}{metric.name})"


def _p95(metric: Metric) -> str:
    return f"histogram_quantile(0.95, {_rate(metric, suffix='_bucket', by='le, model')})"


def _rule(name: str, expr: str, lasting: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


def rules() -> list[dict[str, Any]]:
    failed = '{outcome=~"internal|backend_lost|unavailable|deadline_exceeded"}'
    starting = f'max by (model) ({PREFIX}{metrics.REPLICAS.name}{{state="starting"}})'
    running = f'max by (model) ({PREFIX}{metrics.REPLICAS.name}{{state="running"}})'
    return [
        _rule(
            "TokenyardErrors",
            f"{_rate(metrics.REQUESTS, failed)} / {_rate(metrics.REQUESTS)} > 0.05",
            "5m",
            "critical",
            "More than 5 % of the requests to {{ $labels.model }} fail.",
            "The log of the gateway names each request with its outcome; that of the replicas has the causes.",
        ),
        _rule(
            "TokenyardRejections",
            f"{_rate(metrics.REJECTIONS)} / {_rate(metrics.REQUESTS)} > 0.1",
            "10m",
            "warning",
            "More than 10 % of the requests to {{ $labels.model }} are refused.",
            "Its queue or a key's limit is full. More replicas (max_replicas) or larger limits help.",
        ),
        _rule(
            "TokenyardSlowFirstToken",
            f"{_p95(metrics.FIRST_TOKEN)} > 30",
            "10m",
            "warning",
            "The first token of {{ $labels.model }} takes more than 30 s (95th percentile).",
            "Compare with tokenyard_queue_wait_seconds: where that is as long, slots are short; else prompts are.",
        ),
        _rule(
            "TokenyardReplicasLost",
            f"{_rate(metrics.MOVES)} > 0.1",
            "5m",
            "warning",
            "Replicas of {{ $labels.model }} are lost while they answer.",
            "Clients do not notice, but something ends the replicas: out of memory, or a node that goes.",
        ),
        _rule(
            "TokenyardModelDoesNotStart",
            f"{starting} > 0 and {running} == 0",
            "15m",
            "critical",
            "{{ $labels.model }} has no replica, and one has been starting for 15 minutes.",
            "See `tokenyard status`: resources that no node has, or a model that cannot be loaded.",
        ),
        _rule(
            "TokenyardKvCacheFull",
            f"{_total(metrics.KV_TOKENS_USED)} / {_total(metrics.KV_TOKENS)} > 0.95",
            "10m",
            "warning",
            "The KV cache of {{ $labels.model }} is full.",
            "Requests are paused for others, and prompts are computed again. A larger context or more replicas help.",
        ),
    ]


def _groups() -> dict[str, Any]:
    return {"groups": [{"name": "tokenyard", "rules": rules()}]}


def text() -> str:
    """As Prometheus reads it itself."""
    return _HEAD + yaml.safe_dump(_groups(), sort_keys=False, width=1000)


def kubernetes() -> str:
    """As the Prometheus operator reads it."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tokenyard"},
        "spec": _groups(),
    }
    return _HEAD + yaml.safe_dump(rule, sort_keys=False, width=1000)
