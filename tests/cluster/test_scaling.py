"""Scaling on a real Ray: Serve's controller runs the policy, on what replicas report."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deployments.autoscaling import POLICY
from tests.cluster.conftest import Deployed, app, config, deployed, fake_app, wait_for

pytestmark = pytest.mark.cluster


WAITING = 32
"""Requests that may wait for a model."""


def scaled(name: str, scaling: dict[str, Any], **backend: Any) -> dict[str, Any]:
    options = {"name": "Model", "ray_actor_options": {"num_cpus": 0}, "autoscaling_config": scaling}
    return app(name, "model", {"backend": {"kind": "fake", **backend}, "aliases": [f"{name}-alias"]}, [options])


def applications() -> list[dict[str, Any]]:
    policy = {"policy": {"policy_function": POLICY, "policy_kwargs": {"slot_use": 0.5}}, "look_back_period_s": 11}
    zero = {"min_replicas": 0, "max_replicas": 1, "downscale_to_zero_delay_s": 1}
    # Serve's own count would never ask for a second replica: a replica is to have 1,000 requests.
    grows = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "target_ongoing_requests": 1000}
    return [
        app("gateway", "gateway", {"catalog_poll_s": 0.5, "headers_after_s": 0.1, "max_queued_requests": WAITING}),
        scaled("sleeper", zero | policy),
        scaled("grower", grows | policy, slots=4, inter_token_s=0.05),
        fake_app("narrow", slots=4, inter_token_s=0.01),
    ]


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    with deployed(applications()) as running:
        wait_for(
            lambda: models(running) == ["grower", "grower-alias", "narrow", "sleeper", "sleeper-alias"],
            "the gateway lists the models",
        )
        yield running


def models(system: Deployed) -> list[str]:
    try:
        return [model["id"] for model in httpx.get(f"{system.url}/v1/models").json()["data"]]
    except (httpx.HTTPError, KeyError, ValueError):
        return []


def running(model: str) -> int:
    from ray import serve

    states: dict[Any, int] = dict(serve.status().applications[model].deployments["Model"].replica_states)
    return states.get("RUNNING", 0)


def body(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}


def test_a_sleeping_model_is_listed_wakes_for_a_request_and_sleeps_again(system: Deployed) -> None:
    assert running("sleeper") == 0
    assert {"sleeper", "sleeper-alias"} <= set(models(system))
    assert running("sleeper") == 0, "being listed wakes nobody"
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body("sleeper-alias", 2), timeout=60)
    assert answer.status_code == 200
    assert running("sleeper") == 1
    wait_for(lambda: running("sleeper") == 0, "it sleeps again")


def test_who_wakes_a_model_is_told_that_something_happens(system: Deployed) -> None:
    """A client that waits for a replica to start has its headers and keep-alives meanwhile."""
    wait_for(lambda: running("sleeper") == 0, "it sleeps")
    chunks: list[bytes] = []
    with httpx.stream(
        "POST", f"{system.url}/v1/chat/completions", json=body("sleeper", 3) | {"stream": True}, timeout=60
    ) as response:
        assert response.status_code == 200
        assert running("sleeper") == 0, "the headers did not wait for it"
        chunks.extend(response.iter_raw())
    assert b"[DONE]" in b"".join(chunks)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_more_requests_than_may_wait_are_refused_in_words(system: Deployed, dialect: str) -> None:
    """500 at once, of which 32 may wait: each has its answer, or is told when to come again. Memory stays."""
    from deployments import cluster

    path = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}[dialect]

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=500)
        async with httpx.AsyncClient(base_url=system.url, timeout=120, limits=limits) as client:
            return list(await asyncio.gather(*(client.post(path, json=body("narrow", 10)) for _ in range(500))))

    def gateway_bytes() -> int:
        (pid,) = cluster.replica_pids()["gateway"].values()
        return int(psutil.Process(pid).memory_info().rss)

    for _ in range(3):  # until the process has the memory that such a burst takes
        asyncio.run(ask_all())
    before = gateway_bytes()
    for _ in range(2):
        answers = asyncio.run(ask_all())
        assert {answer.status_code for answer in answers} == {200, 429}
        assert sum(answer.status_code == 200 for answer in answers) >= WAITING
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                error = answer.json()["error"]
                assert error["type"] == {"chat": "rate_limit_error", "messages": "rate_limit_error"}[dialect]
                assert "waiting" in error["message"]
    assert gateway_bytes() - before < 20 * 2**20


def test_deploying_shows_what_it_will_do_and_does_it(system: Deployed, tmp_path: Path) -> None:
    import ray

    def deploy(apps: list[dict[str, Any]], *options: str, answer: str = "") -> str:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config(apps, system.port)))
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "deployments.cli", "deploy", str(path), "--ray", address, *options]
        return subprocess.run(command, input=answer, capture_output=True, text=True, timeout=60).stdout

    apps = applications()
    assert deploy(apps).splitlines()[-1] == "Nothing changes."
    apps[1]["deployments"][0]["max_ongoing_requests"] = 50
    apps.append(fake_app("another"))
    refused = deploy(apps, answer="n\n")
    assert "change   sleeper  (deployments[Model].max_ongoing_requests)" in refused
    assert "start    another" in refused and "keep     grower" in refused
    assert "another" not in models(system)
    deploy(apps, "--yes")
    wait_for(lambda: "another" in models(system), "the new model is listed")
    assert "stop     another" in deploy(applications(), "--yes")
    wait_for(lambda: "another" not in models(system), "it is gone")


def test_a_model_short_of_slots_gets_another_replica(system: Deployed) -> None:
    """3 streams of 4 slots, of which half are to be used."""
    with httpx.Client(timeout=60) as client:
        opened = []
        for _ in range(3):
            request = client.build_request(
                "POST", f"{system.url}/v1/chat/completions", json=body("grower", 20_000) | {"stream": True}
            )
            opened.append(client.send(request, stream=True))
        wait_for(lambda: running("grower") == 2, "a second replica runs")
        for response in opened:
            response.close()
