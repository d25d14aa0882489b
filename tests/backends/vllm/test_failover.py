"""A replica that is killed under its streams, on a real Ray: they go on at the other one, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from protocols.sse import SseParser
from tests.backends.vllm.checkpoint import made
from tests.cluster.conftest import Deployed, app, deployed, wait_for

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.cluster]

PROMPTS = ("Tell me a story about a fox.", "List the rivers of Europe.", "Explain how bread is made.", "Who are you?")
TOKENS = 120
KILL_AT = 30
"""Tokens that every stream has had by then."""
NEAR_TIE = 0.01
"""Logarithms of probabilities: what rounding can turn over in float32, in batches of other sizes."""


class Token(msgspec.Struct, frozen=True):
    data: bytes
    logprob: float
    others: dict[bytes, float]


class Stream(msgspec.Struct):
    tokens: list[Token] = []
    text: str = ""
    reason: str | None = None
    completion_tokens: int = 0
    done: bool = False


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    backend = {"kind": "vllm", "model": str(made()), "device": "cpu", "dtype": "float32", "cpus": 0.5}
    backend |= {"slots": 4, "context_length": 512, "kv_cache_mib": 256, "block_size": 32}
    options = [{"name": "Model", "autoscaling_config": None, "num_replicas": 2}]
    with deployed([app("gateway", "gateway", {}), app("m", "model", {"backend": backend}, options)]) as running:
        wait_for(lambda: [model["id"] for model in _get(running, "/v1/models")["data"]] == ["m"], "the model is listed")
        yield running


def _get(system: Deployed, path: str) -> Any:
    return httpx.get(system.url + path).raise_for_status().json()


def streamed(system: Deployed, prompt: str, on_token: Callable[[], None] = lambda: None) -> Stream:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 5}
    body |= {"stream_options": {"include_usage": True}}
    got, parser = Stream(), SseParser()
    with httpx.stream("POST", f"{system.url}/v1/chat/completions", json=body, timeout=240) as response:
        assert response.status_code == 200, response.read()
        for chunk in response.iter_bytes():
            for event in parser.feed(chunk):
                assert not got.done
                if event.data == "[DONE]":
                    got.done = True
                    continue
                for _ in range(_take(got, json.loads(event.data))):
                    on_token()
    return got


def _take(got: Stream, chunk: Any) -> int:
    """How many tokens there were in it."""
    if chunk.get("usage"):
        got.completion_tokens = chunk["usage"]["completion_tokens"]
    if not chunk["choices"]:
        return 0
    (choice,) = chunk["choices"]
    got.text += choice["delta"].get("content") or ""
    got.reason = choice["finish_reason"] or got.reason
    entries = (choice.get("logprobs") or {}).get("content") or []
    for entry in entries:
        others = {bytes(other["bytes"]): other["logprob"] for other in entry["top_logprobs"]}
        got.tokens.append(Token(bytes(entry["bytes"]), entry["logprob"], others))
    return len(entries)


def assert_same(got: Stream, expected: Stream) -> None:
    """To the last token, or up to one where two were as likely: from there on the texts are different ones."""
    for ours, theirs in zip(got.tokens, expected.tokens, strict=True):
        if ours.data != theirs.data:
            assert theirs.logprob - theirs.others.get(ours.data, float("-inf")) < NEAR_TIE, (ours, theirs)
            return
    assert got.text == expected.text


def processes() -> dict[int, list[psutil.Process]]:
    """Those of each replica's engine, by the replica's own process id."""
    from deployments import cluster

    return {pid: psutil.Process(pid).children(recursive=True) for pid in cluster.replica_pids()["m"].values()}


def cpu_s(engine: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in engine))


def moves(system: Deployed) -> float:
    lines = httpx.get(f"{system.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tokenyard_moves_total{"))


def test_streams_outlive_the_replica_that_ran_them(system: Deployed) -> None:
    expected = [streamed(system, prompt) for prompt in PROMPTS]
    engines = processes()
    assert len(engines) == 2
    assert all(engines.values()), "an engine is a process of its own"
    before = {pid: cpu_s(engine) for pid, engine in engines.items()}
    counts, lock, killed = [0] * len(PROMPTS), threading.Lock(), list[int]()

    def count(number: int) -> None:
        with lock:
            counts[number] += 1
            if not killed and min(counts) >= KILL_AT:
                killed.append(max(engines, key=lambda pid: cpu_s(engines[pid]) - before[pid]))
                os.kill(killed[0], signal.SIGKILL)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        got = list(pool.map(lambda n: streamed(system, PROMPTS[n], lambda: count(n)), range(len(PROMPTS))))
    assert killed
    assert moves(system) >= 1, "a stream was on the replica that was killed"
    for stream, undisturbed in zip(got, expected, strict=True):
        assert (stream.reason, stream.completion_tokens, stream.done) == ("length", TOKENS, True)
        assert len(stream.tokens) == TOKENS, "nothing is lost, nothing comes twice"
        assert b"".join(token.data for token in stream.tokens).decode("utf-8", "replace") == stream.text
        assert_same(stream, undisturbed)
    wait_for(lambda: not any(process.is_running() for process in engines[killed[0]]), "its engine's processes are gone")
