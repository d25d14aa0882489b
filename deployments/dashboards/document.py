"""The table of metrics for people."""

from __future__ import annotations

from deployments.metrics import TABLE

_HEAD = """# Metrics

Written by `python -m deployments.dashboards`, of the table in `deployments/metrics.py`.

`/metrics` of a gateway has them by these names. In a cluster, Ray exports them on every node (port 8080 by
default) with `ray_` before each name and labels of its own for the process; there each gateway counts its own requests
and each replica tells its own slots and KV cache. `/metrics?model=NAME` has llama.cpp's names for one model.

`grafana.json` is a dashboard to import, `alerts.yaml` a file of rules for Prometheus; both are for Ray's names.

| name | kind | unit | labels | what it is |
|---|---|---|---|---|
"""


def text() -> str:
    rows = [f"| `{m.name}` | {m.kind} | {m.unit} | {', '.join(m.labels)} | {m.help} |\n" for m in TABLE]
    return _HEAD + "".join(rows)
