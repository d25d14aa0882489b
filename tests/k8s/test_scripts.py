"""The shell that the manifests bring: the Job that fetches models, and how Redis is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.k8s import render
from tests.k8s.cluster import Bundle
from tests.k8s.local import free_port
from tests.k8s.render import K8S

PREFETCH = K8S / "components" / "model-prefetch" / "prefetch.sh"


def prefetch(folder: Path, models: str, hf: str) -> subprocess.CompletedProcess[str]:
    """With a stand-in for `hf`."""
    (folder / "hf").write_text(f"#!/bin/sh\n{hf}\n")
    (folder / "hf").chmod(0o755)
    (folder / "models.txt").write_text(models)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["sh", str(PREFETCH), str(folder / "models.txt"), "/models"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_each_line_of_a_list_is_fetched(tmp_path: Path) -> None:
    log = tmp_path / "log"
    models = "# a comment\n\nA/one  main  one  a.gguf b.gguf\nB/two  abc123  two"  # no newline at the end
    done = prefetch(tmp_path, models, f'cat >/dev/null; echo "$@" >> {log}')
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == [
        "download A/one a.gguf b.gguf --revision main --local-dir /models/one",
        "download B/two --revision abc123 --local-dir /models/two",
    ]


def test_a_model_that_cannot_be_fetched_fails_the_job(tmp_path: Path) -> None:
    done = prefetch(tmp_path, "A/one main one\nB/two main two\n", "exit 3")
    assert done.returncode == 3
    assert "all models are there" not in done.stdout


@pytest.mark.parametrize("name", ["prod-cpu", "prod-gpu", "prod-mixed"])
def test_the_lists_of_the_overlays_can_be_read(name: str, tmp_path: Path) -> None:
    models = (K8S / "overlays" / name / "models.txt").read_text()
    done = prefetch(tmp_path, models, "exit 0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("->") == sum(1 for line in models.splitlines() if not line.startswith("#"))


def test_redis_starts_as_the_pod_starts_it_and_asks_for_the_password(tmp_path: Path) -> None:
    from redis import Redis
    from redis.exceptions import AuthenticationError, ConnectionError

    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on the path")
    bundle = Bundle(render.overlay("prod-cpu"))
    container = render.only(bundle.documents, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    for folder in ("run", "data"):
        (tmp_path / folder).mkdir()
    port = free_port()
    script = container["args"][0].replace("/run/redis", f"{tmp_path}/run").replace("/data", f"{tmp_path}/data")
    script = script.rstrip() + f" --port {port}"
    environment = {"PATH": os.environ["PATH"], "REDIS_PASSWORD": "a-word"}
    server = subprocess.Popen([*container["command"], script], env=environment, stdout=subprocess.DEVNULL)
    try:
        client = Redis(port=port, password="a-word")
        ends = time.monotonic() + 30
        while True:
            try:
                client.set("a", "one")
                break
            except ConnectionError:
                assert time.monotonic() < ends, "it does not answer"
                time.sleep(0.05)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        client.close()
        stranger = Redis(port=port)
        with pytest.raises(AuthenticationError):
            stranger.get("a")
        stranger.close()
        assert "a-word" not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert (tmp_path / "run" / "redis.conf").stat().st_mode & 0o077 == 0
    finally:
        server.terminate()
        server.wait(10)
