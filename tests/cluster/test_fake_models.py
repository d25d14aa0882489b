"""The whole path on a real Ray, with backends that compute nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Deployed, app, deployed, fake_app, wait_for

pytestmark = pytest.mark.cluster

FAST: dict[str, Any] = {"slots": 64, "inter_token_s": 0.002}
SLOW: dict[str, Any] = {"slots": 8, "inter_token_s": 0.05}


def applications() -> list[dict[str, Any]]:
    gateway = app("gateway", "gateway", {"catalog_poll_s": 0.5})
    twins = fake_app("twins", slots=2, adapters=("a.gguf",))
    twins["deployments"][0]["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
    return [gateway, fake_app("fast", **FAST), fake_app("slow", **SLOW), fake_app("small", context_length=64), twins]


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    with deployed(applications()) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        wait_for(lambda: len(list(client.models.list())) == 5, "the gateway lists the models")  # one by its adapter
        yield running


@pytest.fixture(scope="module")
def client(system: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, model: str, **options: Any) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello there"}], **options
    )
    return answer.choices[0].message.content or ""


def stream(client: openai.OpenAI, model: str, **options: Any) -> str:
    chunks = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello there"}], stream=True, **options
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def stats(model: str) -> Any:
    from ray import serve

    return serve.get_deployment_handle("Model", model).stats.remote().result(timeout_s=10)


def test_streamed_and_whole_answers_are_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, "fast", max_tokens=20)
    assert whole and whole == stream(client, "fast", max_tokens=20)


def test_usage_is_reported_in_both_modes(client: openai.OpenAI) -> None:
    message: list[Any] = [{"role": "user", "content": "hello there"}]
    whole = client.chat.completions.create(model="fast", messages=message, max_tokens=5)
    chunks = list(
        client.chat.completions.create(
            model="fast",
            messages=message,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.usage is not None and whole.usage.completion_tokens == 5
    assert chunks[-1].usage == whole.usage


def test_many_streams_at_once_lose_no_token(client: openai.OpenAI) -> None:
    alone = stream(client, "fast", max_tokens=50)
    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda _: stream(client, "fast", max_tokens=50), range(32)))
    assert texts == [alone] * 32


def test_more_requests_than_slots_all_finish(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(lambda _: stream(client, "slow", max_tokens=4), range(24)))
    assert len(set(texts)) == 1 and texts[0]


def test_a_request_too_large_for_grpc_still_arrives(client: openai.OpenAI) -> None:
    text = "word " * 900_000
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="fast", messages=[{"role": "user", "content": text}], max_tokens=1)
    assert error.value.code == "context_length_exceeded"


def test_a_running_request_is_no_call_of_serves(client: openai.OpenAI) -> None:
    """It went over the step channel. A call of Serve's would be right as well, and nobody would notice but the bill."""
    import ray

    from deployments import ray_compat

    (replica,) = ray_compat.serve_details()["applications"]["slow"]["deployments"]["Model"]["replicas"]
    actor: Any = ray.get_actor(replica["actor_name"], namespace="serve")
    chunks = client.chat.completions.create(
        model="slow", messages=[{"role": "user", "content": "hello there"}], max_tokens=1000, stream=True
    )
    next(iter(chunks))
    assert stats("slow").running == 1
    wait_for(lambda: ray.get(actor.get_num_ongoing_requests.remote()) == 0, "Serve knows of no call")
    assert stats("slow").running == 1
    chunks.close()
    wait_for(lambda: stats("slow").running == 0, "the slot is free")


def test_tokens_are_counted_by_the_model(system: Deployed) -> None:
    def count(model: str, words: int) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "word " * words}]}
        return httpx.post(f"{system.url}/v1/messages/count_tokens", json=body, timeout=30)

    assert count("fast", 3).json() == {"input_tokens": 4}
    assert count("fast", 900_000).json() == {"input_tokens": 900_001}, "too large for gRPC"
    unknown = count("unknown", 1)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_a_client_that_leaves_frees_its_slot_within_a_second(system: Deployed) -> None:
    body = json.dumps(
        {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000, "stream": True}
    ).encode()
    with socket.create_connection(("127.0.0.1", system.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
        assert stats("slow").running == 1
    left = time.monotonic()
    wait_for(lambda: stats("slow").running == 0, "the slot is free", deadline_s=5)
    assert time.monotonic() - left < 1.0


def test_a_client_that_leaves_a_whole_answer_frees_its_slot(system: Deployed) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{system.url}/v1/chat/completions",
            json={"model": "slow", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000},
            timeout=0.7,
        )
    wait_for(lambda: stats("slow").running == 0, "the slot is free", deadline_s=2)


@pytest.mark.parametrize("path", ["/", "/api/hello", "/health", "/v1/models"])
def test_B85_probes_are_answered(system: Deployed, path: str) -> None:
    answer = httpx.head(f"{system.url}{path}")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_client_that_leaves_a_question_takes_it_back(system: Deployed) -> None:
    """Erasing waits for a busy slot."""
    asked = {"model": "slow", "prompt": "one two three", "n_predict": 60}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: httpx.post(f"{system.url}/completion", json=asked, timeout=30).json())
        busy = wait_for(
            lambda: [s["id"] for s in httpx.get(f"{system.url}/slots?model=slow").json() if s["is_processing"]],
            "the slot is busy",
        )
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{system.url}/slots/{busy[0]}?action=erase", json={"model": "slow"}, timeout=0.7)
        assert running.result()["id_slot"] == busy[0]
    slot = httpx.get(f"{system.url}/slots?model=slow").json()[busy[0]]
    assert (slot["is_processing"], slot["n_prompt_tokens"]) == (False, 63), "nothing was erased"
    erased = httpx.post(f"{system.url}/slots/{busy[0]}?action=erase", json={"model": "slow"}).json()
    assert erased == {"id_slot": busy[0], "n_erased": 63}


def test_all_replicas_show_their_slots_and_are_scaled(system: Deployed) -> None:
    def slots() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{system.url}/slots?model=twins").json()
        return found

    told = wait_for(lambda: len(slots()) == 4 and slots(), "both replicas are known")
    replicas = sorted({slot["replica"] for slot in told})
    assert [(slot["replica"], slot["id"]) for slot in told] == [(replica, id) for replica in replicas for id in (0, 1)]
    assert len(replicas) == 2

    adapters = f"{system.url}/lora-adapters?model=twins"
    assert httpx.post(adapters, json=[{"id": 0, "scale": 0.25}]).json() == {"success": True}
    assert {httpx.get(adapters).json()[0]["scale"] for _ in range(8)} == {0.25}
    refused = httpx.post(adapters, json=[{"id": 5, "scale": 1}])
    assert refused.status_code == 400


def test_questions_are_answered_by_a_replica(system: Deployed, client: openai.OpenAI) -> None:
    """Small answers come over gRPC, vectors by reference."""
    vectors = client.embeddings.create(model="fast", input=["one", "two three"])
    assert [len(item.embedding) for item in vectors.data] == [8, 8]
    slots = httpx.get(f"{system.url}/slots", params={"model": "slow"}).json()
    assert [slot["id"] for slot in slots] == list(range(8))
    refused = httpx.post(f"{system.url}/tokenize", json={"model": "fast", "content": "a"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")


def test_many_prompts_of_one_body_are_answered_side_by_side(system: Deployed) -> None:
    asked = {"model": "fast", "prompt": [f"prompt {i}" for i in range(20)], "n_predict": 3, "return_tokens": True}
    answers = httpx.post(f"{system.url}/completion", json=asked, timeout=30).json()
    assert [len(answer["tokens"]) for answer in answers] == [3] * 20


BAD: list[tuple[str, bytes, int, str | None]] = [
    ("malformed JSON", b'{"model": "fast", ', 400, None),
    ("not an object", b"[1]", 400, None),
    ("no model", b'{"messages": [{"role": "user", "content": "x"}]}', 400, "model"),
    ("empty messages", b'{"model": "fast", "messages": []}', 400, "messages"),
    ("wrong type", b'{"model": "fast", "messages": [{"role": "user", "content": 5}]}', 400, "messages[0].content"),
    (
        "bad temperature",
        b'{"model": "fast", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
        400,
        "temperature",
    ),
    ("unknown model", b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_a_clear_openai_error_and_the_next_request_works(
    system: Deployed, client: openai.OpenAI, body: bytes, status: int, param: str | None
) -> None:
    answer = httpx.post(f"{system.url}/v1/chat/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["param"] == param
    assert "Traceback" not in answer.text
    assert ask(client, "fast", max_tokens=2)


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "word " * 100}])
    body = error.value.body
    assert isinstance(body, dict)
    assert body["code"] == "context_length_exceeded" and body["n_ctx"] == 64 and body["n_prompt_tokens"] > 64
    assert ask(client, "small", max_tokens=2)


def test_a_model_added_to_the_config_restarts_nothing(system: Deployed, client: openai.OpenAI) -> None:
    from deployments import cluster

    before = cluster.replica_pids()
    system.redeploy({"applications": [*applications(), fake_app("added", **FAST)]})
    wait_for(lambda: "added" in [model.id for model in client.models.list()], "the added model is listed")
    assert ask(client, "added", max_tokens=2)
    after = cluster.replica_pids()
    assert {name: after[name] for name in before} == before
    system.redeploy({"applications": applications()})
    wait_for(lambda: "added" not in [model.id for model in client.models.list()], "the removed model is gone")
    with pytest.raises(openai.NotFoundError):
        ask(client, "added")


def test_a_changed_user_config_restarts_nothing(system: Deployed, client: openai.OpenAI) -> None:
    """Its names and defaults count all the same: the gateways read them."""
    from deployments import cluster

    def with_user_config(user_config: dict[str, Any]) -> dict[str, Any]:
        given = applications()
        given[1]["deployments"][0]["user_config"] = user_config
        return {"applications": given}

    def names() -> list[str]:
        return [model.id for model in client.models.list()]

    before = cluster.replica_pids()
    system.redeploy(with_user_config({"aliases": ["hot"], "defaults": {"max_tokens": 3}, "stall_timeout_s": 77}))
    wait_for(lambda: "hot" in names(), "the new name is listed")
    answer = client.chat.completions.create(model="hot", messages=[{"role": "user", "content": "hello"}])
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    system.redeploy(with_user_config({}))
    wait_for(lambda: "hot" not in names(), "the name is gone again")
    assert cluster.replica_pids() == before
    system.redeploy({"applications": applications()})


def moves(system: Deployed, model: str) -> float:
    """How many the gateway has counted."""
    families = text_string_to_metric_families(httpx.get(f"{system.url}/metrics", timeout=30).text)
    samples = [sample for family in families for sample in family.samples]
    return sum(s.value for s in samples if s.name == "tokenyard_moves_total" and s.labels["model"] == model)


def test_a_lost_replica_ends_no_answer(system: Deployed, client: openai.OpenAI) -> None:
    """It was the only one: its stream is silent until Serve has started another, and goes on there."""
    from deployments import cluster

    undisturbed = stream(client, "slow", max_tokens=60)
    (pid,) = cluster.replica_pids()["slow"].values()
    killer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert moves(system, "slow") == 0
    assert stream(client, "slow", max_tokens=60) == undisturbed
    killer.join()
    assert wait_for(lambda: moves(system, "slow"), "the move is counted") >= 1


def _answers(client: openai.OpenAI, model: str) -> bool:
    try:
        return bool(ask(client, model, max_tokens=2, timeout=20))
    except openai.APIError:
        return False


def test_with_the_step_channel_off_every_token_still_arrives(system: Deployed, client: openai.OpenAI) -> None:
    with_channel = stream(client, "fast", max_tokens=200)
    off = applications()
    off[0] = app("gateway", "gateway", {"catalog_poll_s": 0.5, "step_channel": False})
    system.redeploy({"applications": off})
    wait_for(lambda: _answers(client, "fast"), "the new gateway answers")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: stream(client, "fast", max_tokens=200), range(8)))
    assert texts == [with_channel] * 8
