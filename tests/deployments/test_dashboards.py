"""What is generated of the table of metrics: up to date, whole, and about metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.dashboards import FOLDER, alerts, files, grafana
from deployments.metrics import TABLE


@pytest.mark.parametrize(("path", "text"), files().items(), ids=lambda value: getattr(value, "name", ""))
def test_the_files_are_what_the_command_writes(path: Path, text: str) -> None:
    assert path.read_text() == text, "run python -m deployments.dashboards"


def queries() -> list[str]:
    dashboard: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]] + [r["expr"] for r in rules]


def test_every_query_is_about_metrics_and_labels_that_there_are() -> None:
    known = {
        m.name + suffix: set(m.labels) | ({"le"} if suffix else set())
        for m in TABLE
        for suffix in (("_bucket",) if m.kind == "histogram" else ("",))
    }
    for query in queries():
        names = re.findall(r"tokenyard_\w+", query)
        assert names and set(names) <= known.keys(), query
        labels = set(re.findall(r"(\w+)=", query)) | {
            label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")
        }
        assert labels <= set.union(*(known[name] for name in names)), query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name.removesuffix("_bucket") for query in queries() for name in re.findall(r"tokenyard_\w+", query)}
    assert shown == {metric.name for metric in TABLE}


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in grafana.dashboard()["panels"]]
    assert len(set(places)) == len(places)
    assert all(x + w <= 24 for x, _, w, _ in places)


def test_alerts_have_what_a_person_needs_and_names_of_their_own() -> None:
    rules = alerts.rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.model }}" in rule["annotations"]["summary"] and rule["annotations"]["description"]
