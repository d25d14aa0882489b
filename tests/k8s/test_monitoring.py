"""What Prometheus and Grafana are given in a cluster: what the application writes, under names that are exported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
import yaml
from prometheus_client import CollectorRegistry
from ray.autoscaler._private.prom_metrics import AutoscalerPrometheusMetrics

from deployments import metrics
from deployments.dashboards import alerts, grafana
from tests.k8s import render
from tests.k8s.render import Document

MONITORED = ["prod-cpu", "prod-gpu", "prod-mixed"]


def exported() -> set[str]:
    """Names that a query may have: ours, as Ray exports them, and those of Ray's autoscaler."""
    suffixes = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    ours = {alerts.PREFIX + m.name + suffix for m in metrics.TABLE for suffix in suffixes[m.kind]}
    registry = CollectorRegistry()
    AutoscalerPrometheusMetrics(session_name="", registry=registry)
    return ours | {sample.name for family in registry.collect() for sample in family.samples} | {
        family.name for family in registry.collect()
    }  # fmt: skip


def dashboards(documents: list[Document]) -> Iterator[str]:
    """What Grafana's sidecar finds."""
    for document in documents:
        if document["kind"] == "ConfigMap" and document["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            yield from document["data"].values()


def queries(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        if document["kind"] == "PrometheusRule":
            for group in document["spec"]["groups"]:
                yield from (rule["expr"] for rule in group["rules"])
    for text in dashboards(documents):
        for panel in json.loads(text)["panels"]:
            yield from (target["expr"].replace("${prefix}", alerts.PREFIX) for target in panel["targets"])


def faults(documents: list[Document]) -> list[str]:
    known = exported()
    found = [
        f"{name} is exported by nobody"
        for query in queries(documents)
        for name in re.findall(r"\b(?:ray|autoscaler|tokenyard)_\w+", query)
        if name not in known
    ]
    if list(dashboards(documents)) != [grafana.text()]:
        found.append("Grafana does not find the dashboard that the application writes")
    rules = yaml.safe_load(alerts.kubernetes())["spec"]
    if rules not in [document["spec"] for document in documents if document["kind"] == "PrometheusRule"]:
        found.append("Prometheus does not have the rules that the application writes")
    return found


@pytest.mark.parametrize("name", MONITORED)
def test_an_overlay_has_dashboard_and_alerts_on_what_is_exported(name: str) -> None:
    documents = render.overlay(name)
    assert len(list(queries(documents))) > 20
    assert faults(documents) == []


def _dashboard(documents: list[Document]) -> Document:
    return render.only(documents, "ConfigMap", "tokenyard-dashboard")


def _misspell(documents: list[Document]) -> None:
    rule = render.only(documents, "PrometheusRule", "tokenyard-cluster")["spec"]["groups"][0]["rules"][1]
    rule["expr"] = rule["expr"].replace("pending_nodes", "nodes_pending")


MISTAKES: dict[str, Callable[[list[Document]], object]] = {
    "a metric that nobody exports": _misspell,
    "a dashboard without the sidecar's label": lambda d: _dashboard(d)["metadata"].pop("labels"),
    "an old dashboard": lambda d: _dashboard(d)["data"].update({"tokenyard.json": '{"panels": []}'}),
    "alerts that are left out": lambda d: d.remove(render.only(d, "PrometheusRule", "tokenyard")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    documents = render.overlay("prod-mixed")
    MISTAKES[mistake](documents)
    assert faults(documents) != []
