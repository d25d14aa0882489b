"""What Prometheus and Grafana are given, made of the table of metrics: `python -m deployments.dashboards` writes it."""

from __future__ import annotations

from pathlib import Path

from deployments.dashboards import alerts, document, grafana

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Each file with what it has to say."""
    return {
        FOLDER / "METRICS.md": document.text(),
        FOLDER / "grafana.json": grafana.text(),
        FOLDER / "alerts.yaml": alerts.text(),
    }
