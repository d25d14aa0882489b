"""`tokenyard serve` as a person runs it: its own process, a signal to stop it, nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.cluster.conftest import app, config, fake_app, free_port

pytestmark = pytest.mark.cluster


def write(folder: Path, raw: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(json.dumps(raw))
    return path


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deployments.cli", "serve", str(path), "--ray", "local", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the line with `text`; fails with all of it if the process ends before."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"ended without {text!r}:\n{seen}")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(("front", "stop"), [("python", signal.SIGINT), ("haproxy", signal.SIGTERM)])
def test_it_serves_and_a_signal_leaves_nothing_behind(tmp_path: Path, front: str, stop: signal.Signals) -> None:
    port = free_port()
    apps = [app("gateway", "gateway", {}), fake_app("m", inter_token_s=0.001)]
    process = start(write(tmp_path, config(apps, port)), "--front", front)
    try:
        printed = read_until(process, "Ctrl-C stops it.")
        assert f"http://127.0.0.1:{port}/v1" in printed and "m" in printed and "curl" in printed
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            chunks = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=20, stream=True
            )
            pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        assert len(pieces) > 1
        started = descendants(process)
        assert started
    finally:
        rest = end(process, stop)
    assert "Traceback" not in rest and "stopped" in rest
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_a_model_that_cannot_start_is_named_and_the_others_answer(tmp_path: Path) -> None:
    port = free_port()
    broken = app("broken", "model", {"backend": {"kind": "llamacpp", "model": str(tmp_path / "missing.gguf")}})
    apps = [app("gateway", "gateway", {}), fake_app("m"), broken]
    process = start(write(tmp_path, config(apps, port)))
    try:
        printed = read_until(process, "Ctrl-C stops it.")
        assert "broken failed to start" in printed and "missing.gguf" in printed
        question = {"model": "broken", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=question)
        assert answer.status_code == 503 and "broken" in answer.json()["error"]["message"]
        question["model"] = "m"
        assert httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=question).status_code == 200
    finally:
        end(process, signal.SIGINT)


def end(process: subprocess.Popen[str], stop: signal.Signals) -> str:
    """Stops it and returns what it still had to say. Kills it if it does not stop, so that no test leaves it behind."""
    process.send_signal(stop)
    try:
        return process.communicate(timeout=90)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        began = time.monotonic()
        process = start(write(tmp_path, config([app("gateway", "gateway", {})], port)))
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and f"Port {port}" in printed and "pid" in printed
    assert "Traceback" not in printed and time.monotonic() - began < 30
