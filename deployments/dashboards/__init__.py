"""What Prometheus and Grafana are given, made of the table of metrics: `python -m deployments.dashboards` writes it."""

from __future__ import annotations

from pathlib import Path

from deployments.dashboards import alerts, document, grafana

FOLDER = Path(__file__).parent
KUBERNETES = FOLDER.parents[1] / "k8s" / "components" / "monitoring"
"""In a checkout. Kustomize reads nothing outside of a component's folder, so what it deploys is there as well."""


def files() -> dict[Path, str]:
    """Each file with what it has to say."""
    return {
        FOLDER / "METRICS.md": document.text(),
        FOLDER / "grafana.json": grafana.text(),
        FOLDER / "alerts.yaml": alerts.text(),
        KUBERNETES / "grafana.json": grafana.text(),
        KUBERNETES / "alerts.yaml": alerts.kubernetes(),
    }
