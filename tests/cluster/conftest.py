"""A real local Ray with Serve for each module of this folder: started the way `tokenyard serve` starts it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

DEADLINE_S = 60.0


class Deployed(msgspec.Struct):
    """A running system: where its front door is, and how to deploy another config on it."""

    url: str
    port: int
    redeploy: Callable[[dict[str, Any]], None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def app(
    name: str, target: str, args: dict[str, Any], deployments: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "import_path": f"deployments.app:{target}",
        "route_prefix": "/" if target == "gateway" else None,
        "args": args,
        "deployments": deployments or [],
    }


def fake_app(name: str, **backend: Any) -> dict[str, Any]:
    options = [{"name": "Model", "ray_actor_options": {"num_cpus": 0}}]
    return app(name, "model", {"backend": {"kind": "fake", **backend}}, options)


def config(applications: list[dict[str, Any]], port: int) -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": applications,
    }


@contextmanager
def deployed(applications: list[dict[str, Any]]) -> Iterator[Deployed]:
    """The applications, running. Skips without Ray; fails when one of them does not come up."""
    pytest.importorskip("ray.serve", reason="cluster tests need ray[serve]")
    from deployments import cluster, ray_compat
    from deployments.config import serve_part

    port = free_port()

    def deploy(raw: dict[str, Any]) -> None:
        schema = serve_part(raw)
        ray_compat.deploy(schema)
        failed = cluster.wait_until_deployed({a.name for a in schema.applications}, lambda _: None)
        assert not failed, failed

    raw = config(applications, port)
    with cluster.running_cluster(serve_part(raw), lambda _: None, address="local"):
        deploy(raw)
        yield Deployed(f"http://127.0.0.1:{port}", port, lambda apps: deploy(config(apps["applications"], port)))


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Polls until `condition` is true and returns its value; fails naming `what` it waited for."""
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"not within {deadline_s:.0f} s: {what}")
