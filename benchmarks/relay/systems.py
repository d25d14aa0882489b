"""What is measured: ours behind each front, the bare streamer, and Ray Serve LLM on both of its paths."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, assert_never

import msgspec

from benchmarks.processes import child, wait_for_http, wait_for_output
from benchmarks.relay import environment

ROOT = Path(__file__).parents[2]
PORT = 8000
SETTLE_S = 15.0
"""Ray is busy for about this long after a deployment."""

Speed = Literal["paced", "slow", "unlimited", "idle"]
Speeds = tuple[Speed, ...]
STEP_S: dict[Speed, float] = {"paced": 0.05, "slow": 0.2, "unlimited": 0.0, "idle": 3600.0}
"""Seconds between an engine's tokens."""

HAPROXY = "Tokenyard, HAProxy"
PYTHON_PROXY = "Tokenyard, Python proxy"
BARE = "bare streamer"
PEER = "Ray Serve LLM"
PEER_DIRECT = "Ray Serve LLM, direct streaming"


class System(msgspec.Struct, frozen=True):
    name: str
    kind: Literal["ours", "bare", "peer", "peer direct"] = "ours"
    front: Literal["haproxy", "python"] = "haproxy"
    step_channel: bool = True
    """These two are of ours."""

    @property
    def ours(self) -> bool:
        return self.kind == "ours"

    @property
    def on_ray_serve_llm(self) -> bool:
        return self.kind in ("peer", "peer direct")

    def request(self, speed: Speed) -> tuple[str, dict[str, object]]:
        """The model to ask for an engine of this speed, and what the body has besides."""
        return (speed, {}) if self.ours else ("fake", {"vllm_xargs": {"step_s": STEP_S[speed]}})


SYSTEMS = (
    System(BARE, "bare"),
    System(HAPROXY),
    System(PEER, "peer"),
    System(PEER_DIRECT, "peer direct"),
    System(PYTHON_PROXY, front="python"),
)
FALLBACKS = (
    System(f"{HAPROXY}, channel off", step_channel=False),
    System(f"{PYTHON_PROXY}, channel off", front="python", step_channel=False),
)


def parts(system: System) -> tuple[Speeds, ...]:
    """What a system is started for at a time. Ours needs a replica for each speed, the others have one for all: where
    the cost of a token is measured, ours has one too.
    """
    return (("paced",), ("idle", "slow", "unlimited")) if system.ours else (tuple(STEP_S),)


def config(port: int, speeds: Speeds, step_channel: bool = True) -> dict[str, Any]:
    """A gateway, and a model for each speed: a fake engine's is in its config."""
    gateway = {
        "name": "gateway",
        "route_prefix": "/",
        "import_path": "deployments.app:gateway",
        "args": {"step_channel": step_channel},
    }
    models = [
        {
            "name": speed,
            "route_prefix": None,
            "import_path": "deployments.app:model",
            "args": {
                "backend": {"kind": "fake", "slots": 600, "inter_token_s": STEP_S[speed], "context_length": 2**20},
                "max_queued_requests": 1024,  # as many as are sent at once
            },
            "deployments": [{"name": "Model", "ray_actor_options": {"num_cpus": 0.25}}],
        }
        for speed in speeds
    ]
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [gateway, *models],
    }


class Running(msgspec.Struct, frozen=True):
    system: System
    speeds: Speeds
    url: str
    pid: int
    """Of the process that all others of the server descend from."""


@contextmanager
def running(system: System, speeds: Speeds, port: int, settle_s: float) -> Iterator[Running]:
    """A fresh server for these speeds, with a Ray of its own where it needs one."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        python, variables = sys.executable, {"PYTHONPATH": str(ROOT)}
        match system.kind:
            case "bare":
                app = ["benchmarks.relay.bare_streamer:app", "--port", str(port)]
                command = ["-m", "uvicorn", *app, "--no-access-log", "--log-level", "warning"]
            case "peer" | "peer direct":
                python = str(environment.python())
                direct = ["--direct"] if system.kind == "peer direct" else []
                command = ["-m", "benchmarks.relay.ray_serve_llm", str(port), *direct]
            case "ours":
                path = Path(folder) / "relay.yaml"
                path.write_text(json.dumps(config(port, speeds, system.step_channel)))
                command = ["-m", "deployments.cli", "serve", str(path), "--front", system.front, "--ray", "local"]
            case _:
                assert_never(system.kind)
        with child([python, *command], variables) as server:
            if system.ours:
                wait_for_output("Tokenyard is ready", server)
            else:
                wait_for_http(f"{url}/v1/models", server)
            time.sleep(0.0 if system.kind == "bare" else settle_s)
            yield Running(system, speeds, url, server.pid)
