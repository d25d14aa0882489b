"""The Serve config of each overlay: checked, and started on a local Ray of several nodes whose state is in Redis.

make test-k8s
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from ray.serve import Application

from deployments import config
from tests.k8s import local, render
from tests.k8s.cluster import Bundle
from tests.k8s.local import System
from tests.k8s.render import K8S, OVERLAYS

LIVE = pytest.mark.skipif(not os.environ.get("K8S_LIVE"), reason="takes minutes: make test-k8s")


@pytest.mark.parametrize("name", OVERLAYS)
def test_it_passes_our_check(name: str) -> None:
    raw = config.read(K8S / "overlays" / name / "serve.yaml")
    config.our_parts(raw)
    config.serve_part(raw)
    assert config.notes(raw) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_its_applications_can_be_imported_and_built(name: str) -> None:
    for app in Bundle(render.overlay(name)).serve["applications"]:
        module, _, builder = app["import_path"].partition(":")
        assert isinstance(getattr(import_module(module), builder)(app["args"]), Application)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with local.system(tmp_path_factory.mktemp("redis"), "kind-cpu") as running:
        yield running


def models(raw: dict[str, Any]) -> dict[str, str]:
    """Each model and the pool it has to be in."""
    apps = [app for app in raw["applications"] if "backend" in app["args"]]
    return {app["name"]: "gpu" if local.on_gpu(app) else "cpu" for app in apps}


def gateway_args(name: str) -> dict[str, Any]:
    args = next(app["args"] for app in Bundle(render.overlay(name)).serve["applications"] if app["name"] == "gateway")
    assert isinstance(args, dict)
    return args


def one_of_each(system: System) -> tuple[str, str]:
    """A model on CPUs and one on a GPU, which answer."""
    wanted = models(system.deploy("prod-mixed"))
    on_cpu, on_gpu = (next(m for m, pool in wanted.items() if pool == kind) for kind in ("cpu", "gpu"))
    assert system.answers(on_cpu) and system.answers(on_gpu)
    return on_cpu, on_gpu


@LIVE
@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.parametrize("name", ["kind-cpu", "prod-cpu", "prod-gpu", "prod-mixed"])
def test_models_land_where_they_belong_and_answer(system: System, name: str) -> None:
    wanted = models(system.deploy(name))
    for model in wanted:
        assert system.answers(model), model
    stranger = system.request("GET", "/v1/models", with_key=False)
    assert stranger.status_code == (401 if "keys" in gateway_args(name) else 200), stranger.text
    pools = system.pools()
    assert {model: set(pools[model]) for model in wanted} == {model: {pool} for model, pool in wanted.items()}
    assert set(pools["gateway"]) == {"cpu"}
    gateways = next(d for app, d in Bundle(render.overlay(name)).deployments() if app["name"] == "gateway")
    assert len(pools["gateway"]) == gateways.get("autoscaling_config", {}).get("min_replicas", 1)


@LIVE
@pytest.mark.cluster
@pytest.mark.model
def test_a_lost_GPU_node_leaves_the_models_on_CPUs_alone(system: System) -> None:
    from deployments import cluster

    on_cpu, on_gpu = one_of_each(system)
    before = cluster.replica_pids()[on_cpu]
    lost = [node for node in system.nodes.worker_nodes if node._ray_params.num_gpus]
    for node in lost:
        system.nodes.remove_node(node, allow_graceful=False)
    for _ in range(10):
        assert system.ask(on_cpu).status_code == 200
    assert cluster.replica_pids()[on_cpu] == before
    group = next(group for group in Bundle(render.overlay("prod-mixed")).groups if group["groupName"] == "gpu")
    for _ in lost:
        system.add_node(group)
    assert system.answers(on_gpu), "a new node should bring it back"
    assert cluster.replica_pids()[on_cpu] == before


@LIVE
@pytest.mark.cluster
@pytest.mark.model
def test_the_GCS_dies_and_comes_back_and_nobody_notices(system: System) -> None:
    """What `gcs-ft-redis` is for: what Ray knows is in Redis, so that a new GCS knows it too."""
    from deployments import cluster

    on_cpu, on_gpu = one_of_each(system)
    before = {name: pids for name, pids in cluster.replica_pids().items() if name in (on_cpu, "gateway")}

    stored = system.request("POST", "/v1/responses", json={"model": on_cpu, "input": "Hello", "max_output_tokens": 16})
    assert stored.status_code == 200, stored.text

    long: list[Any] = []
    stream = threading.Thread(target=lambda: long.append(system.ask(on_gpu, max_tokens=600)))
    stream.start()
    time.sleep(1)
    head = system.nodes.head_node
    head.kill_gcs_server()
    during = [system.ask(model).status_code for model in (on_cpu, on_gpu) * 3]
    head.start_gcs_server()
    stream.join()
    assert during == [200] * 6
    assert long[0].status_code == 200 and long[0].json()["usage"]["completion_tokens"] == 600

    assert system.answers(on_cpu) and system.answers(on_gpu)
    assert {name: cluster.replica_pids()[name] for name in before} == before, "no replica should have ended"
    again = system.request("GET", f"/v1/responses/{stored.json()['id']}")
    assert again.json()["output"] == stored.json()["output"]
    system.deploy("prod-cpu")  # and what is new is deployed as ever
    assert all(system.answers(model) for model in models(system.config("prod-cpu")))
