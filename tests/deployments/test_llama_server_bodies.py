"""Bodies that leave out what the official APIs ask for."""

from __future__ import annotations

import json
import zlib
from typing import Any

import httpx
import pytest

from deployments.http import build_app
from deployments.llama_server.bodies import LooseBodies, completed
from deployments.settings import GatewaySettings
from tests.deployments.support import HELLO, ScriptedPool

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def client(pool: ScriptedPool, limit: int = 10_000) -> httpx.AsyncClient:
    app = LooseBodies(build_app(pool, GatewaySettings(), echo_request_id=True), "mine", limit)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "model": None}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/v1/messages", CHAT),
    ],
)
async def test_a_model_need_not_be_named(path: str, body: dict[str, Any]) -> None:
    pool = ScriptedPool(HELLO)
    async with client(pool) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "mine"


async def test_what_is_named_counts_and_packed_bodies_are_read() -> None:
    body = zlib.compress(json.dumps({**CHAT, "model": "other"}).encode())
    async with client(ScriptedPool(HELLO)) as http:
        answer = await http.post("/v1/chat/completions", content=body, headers={"content-encoding": "deflate"})
    assert answer.json()["model"] == "other"


@pytest.mark.parametrize(("body", "status"), [(b"[1]", 400), (b"{", 400), (b" " * 20_000, 413)])
async def test_what_is_wrong_is_still_said(body: bytes, status: int) -> None:
    async with client(ScriptedPool(HELLO)) as http:
        answer = await http.post("/v1/messages", content=body)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"


def test_only_what_is_missing_is_added() -> None:
    whole = b'{"model": "a", "max_tokens": 1, "x": 1e400}'
    assert completed(whole, {"model": "b", "max_tokens": 2}) == whole
    assert json.loads(completed(b'{"model": "a", "n": null}', {"model": "b", "n": 2})) == {"model": "a", "n": 2}
