"""A Grafana dashboard. Its variable `prefix` says whose names are meant: Ray's (`ray_`), or a gateway's own (none)."""

from __future__ import annotations

import json
from typing import Any, Literal

from deployments import metrics
from deployments.metrics import Metric

GrafanaUnit = Literal["short", "reqps", "s", "percentunit", "ops"]

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
"""Of a panel; Grafana's grid is 24 wide."""

_OF = '{model=~"$model"}'


def name(metric: Metric, suffix: str = "") -> str:
    return f"${{prefix}}{metric.name}{suffix}"


def rate(metric: Metric, by: str, suffix: str = "") -> str:
    return f"sum by ({by}) (rate({name(metric, suffix)}{_OF}[$__rate_interval]))"


def quantile(share: float, metric: Metric, by: str = "model") -> str:
    return f"histogram_quantile({share}, {rate(metric, f'le, {by}', '_bucket')})"


def total(metric: Metric, by: str = "model") -> str:
    return f"sum by ({by}) ({name(metric)}{_OF})"


def share(part: Metric, whole: Metric) -> str:
    return f"{total(part)} / {total(whole)}"


Target = tuple[str, str]
"""A query, and the legend of its lines."""


def panels() -> list[tuple[str, GrafanaUnit, list[Target]]]:
    outcome = "{{model}} {{outcome}}"
    by_gateway = f"max by (model, state) ({name(metrics.REPLICAS)}{_OF})"
    hits = f"{rate(metrics.CACHED_TOKENS, 'model')} / {rate(metrics.PROMPT_TOKENS, 'model')}"

    def quantiles(metric: Metric) -> list[Target]:
        return [(quantile(0.5, metric), "{{model}} p50"), (quantile(0.95, metric), "{{model}} p95")]

    return [
        ("Requests", "reqps", [(rate(metrics.REQUESTS, "model, outcome"), outcome)]),
        ("Requests by dialect", "reqps", [(rate(metrics.REQUESTS, "dialect"), "{{dialect}}")]),
        ("Rejections", "reqps", [(rate(metrics.REJECTIONS, "model, reason"), "{{model}} {{reason}}")]),
        ("Time to first token", "s", quantiles(metrics.FIRST_TOKEN)),
        ("Time between tokens", "s", quantiles(metrics.INTER_TOKEN)),
        ("Wait for a slot", "s", quantiles(metrics.QUEUE_WAIT)),
        ("Whole requests", "s", quantiles(metrics.DURATION)),
        ("Prompt tokens per second", "ops", [(rate(metrics.PROMPT_TOKENS, "model"), "{{model}}")]),
        ("Output tokens per second", "ops", [(rate(metrics.OUTPUT_TOKENS, "model"), "{{model}}")]),
        ("Prompt tokens from the cache", "percentunit", [(hits, "{{model}}")]),
        ("Cached share of a prompt", "percentunit", [(quantile(0.5, metrics.HIT_RATIO), "{{model}} p50")]),
        ("Moves to another replica", "reqps", [(rate(metrics.MOVES, "model"), "{{model}}")]),
        ("Active streams", "short", [(total(metrics.ACTIVE), "{{model}}")]),
        ("Replicas", "short", [(by_gateway, "{{model}} {{state}}")]),
        ("Waiting in engines", "short", [(total(metrics.WAITING), "{{model}}")]),
        ("Slots in use", "percentunit", [(share(metrics.SLOTS_BUSY, metrics.SLOTS), "{{model}}")]),
        ("KV cache in use", "percentunit", [(share(metrics.KV_TOKENS_USED, metrics.KV_TOKENS), "{{model}}")]),
    ]


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": "tokenyard",
        "title": "Tokenyard",
        "tags": ["tokenyard"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(source)},
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": source,
                "gridPos": {
                    "x": number % COLUMNS * WIDTH,
                    "y": number // COLUMNS * HEIGHT,
                    "w": WIDTH,
                    "h": HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + index), "datasource": source, "expr": expr, "legendFormat": legend}
                    for index, (expr, legend) in enumerate(targets)
                ],
            }
            for number, (title, unit, targets) in enumerate(panels())
        ],
    }


def _variables(source: dict[str, str]) -> list[dict[str, Any]]:
    prefix = [{"text": "in a cluster", "value": "ray_"}, {"text": "of one gateway", "value": ""}]
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {
            "name": "prefix",
            "type": "custom",
            "label": "Metrics",
            "query": ", ".join(f"{option['text']} : {option['value']}" for option in prefix),
            "options": [{**option, "selected": index == 0} for index, option in enumerate(prefix)],
            "current": prefix[0],
        },
        {
            "name": "model",
            "type": "query",
            "label": "Model",
            "datasource": source,
            "query": f"label_values({name(metrics.REPLICAS)}, model)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"
