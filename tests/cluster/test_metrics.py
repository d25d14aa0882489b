"""The metrics of a cluster: through Ray's own export, and what a gateway tells of replicas in other processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Deployed, app, deployed, fake_app, wait_for

pytestmark = pytest.mark.cluster

MESSAGES = [{"role": "user", "content": "hello markedprompt"}]


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    twins = fake_app("twins", slots=2, tokens=5)
    twins["deployments"][0]["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
    asleep = fake_app("asleep")
    asleep["deployments"][0]["autoscaling_config"] = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_enable_metrics_collection", "1")  # by default what is started here collects none
        with deployed([app("gateway", "gateway", {"catalog_poll_s": 0.2}), twins, asleep]) as running:
            seen = ["asleep", "ready"]
            wait_for(lambda: [model["state"] for model in models(running)] == seen, "the gateway sees the models")
            yield running


def models(system: Deployed) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = httpx.get(f"{system.url}/api/status", timeout=30).json()["models"]
    return shown


def ray_samples() -> dict[str, float]:
    """What Ray exports of ours on this machine: name, model and outcome or state, and the sum over processes."""
    import ray

    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_tokenyard_"):
                labels = [sample.labels[name] for name in ("model", "outcome", "state") if name in sample.labels]
                name = " ".join([sample.name.removeprefix("ray_tokenyard_"), *labels])
                found[name] = found.get(name, 0.0) + sample.value
    return found


def ask(system: Deployed) -> None:
    body = {"model": "twins", "messages": MESSAGES}
    assert httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


def test_the_status_has_all_replicas_and_wakes_none(system: Deployed) -> None:
    wait_for(lambda: models(system)[1]["running"] == 2, "the gateway knows of both, as it does a second later")
    asleep, twins = models(system)
    assert (asleep["state"], asleep["replicas"], asleep["running"]) == ("asleep", [], 0)
    assert twins["state"] == "ready"
    assert [replica["slots"] for replica in twins["replicas"]] == [2, 2]
    assert len({replica["name"] for replica in twins["replicas"]}) == 2
    assert "llamacpp:requests_processing 0\n" in httpx.get(f"{system.url}/metrics?model=twins", timeout=30).text


def test_ray_exports_what_gateways_count_and_replicas_have(system: Deployed) -> None:
    for _ in range(3):
        ask(system)
    wanted = {
        "requests_total twins ok": 3.0,
        "output_tokens_total twins": 15.0,
        "time_to_first_token_seconds_count twins": 3.0,
        "replicas twins running": 2.0,
        "slots twins": 4.0,
    }
    wait_for(lambda: wanted.items() <= ray_samples().items(), "Ray exports the metrics")


def test_serves_log_has_a_line_for_each_request_and_nothing_of_what_was_said(system: Deployed) -> None:
    ask(system)

    def logged() -> list[str]:
        files = Path("/tmp/ray/session_latest/logs/serve").glob("replica_gateway*.log")
        return [line for file in files for line in file.read_text().splitlines()]

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line[line.index('{"id"') :]) for line in logged() if '"dialect":"openai_chat"' in line]

    wait_for(lines, "the request is logged")
    assert {"model": "twins", "outcome": "ok", "operation": "generate"}.items() <= lines()[-1].items()
    assert [line for line in logged() if "markedprompt" in line] == []
