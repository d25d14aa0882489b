"""What a request says it is a part of, in any dialect: the router gets the same name for the same session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.http import build_app
from deployments.settings import GatewaySettings
from protocols.affinity import affinity
from tests.deployments.support import HELLO, Exchange, ScriptedPool

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": CHAT,
    "/completion": {"prompt": "Hi"},
    "/chat/completions": CHAT,
}


async def names(path: str, headers: Sequence[tuple[bytes, bytes]] = (), **fields: Any) -> set[str | None]:
    pool = ScriptedPool(HELLO)
    app = build_app(pool, GatewaySettings(), echo_request_id=False)
    body = {"model": "m", **BODIES[path], **fields}
    assert (await Exchange(app, "POST", path, json.dumps(body).encode(), headers).done()).status == 200
    return {request.affinity for request in pool.requests}


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_names_the_session(path: str) -> None:
    assert await names(path) == {None}
    assert await names(path, prompt_cache_key="k") == {affinity("k")}
    assert await names(path, [(b"x-session-id", b"s")], prompt_cache_key="k") == {affinity("s")}


@pytest.mark.parametrize(
    "header", ["x-claude-code-session-id", "x-session-affinity", "x-session-id", "session-id", "thread-id"]
)
async def test_the_headers_of_real_clients(header: str) -> None:
    assert await names("/v1/messages", [(header.encode(), "é".encode())]) == {affinity("Ã©")}
    assert await names("/v1/messages", [(header.encode(), b"")]) == {None}


async def test_a_session_goes_before_its_threads() -> None:
    assert await names("/v1/responses", [(b"thread-id", b"t"), (b"session-id", b"s")]) == {affinity("s")}


async def test_anthropics_metadata_names_the_user_and_hides_it() -> None:
    user = '{"device_id": "d", "session_id": "s"}'
    (name,) = await names("/v1/messages", metadata={"user_id": user})
    assert name == affinity(user)
    assert name is not None and len(name) == 32 and user not in name
    assert await names("/v1/messages", metadata={"user_id": user}, prompt_cache_key="k") == {affinity("k")}
    assert await names("/v1/messages", metadata={"user_id": None}) == {None}


def test_the_first_hint_there_is_gives_the_name() -> None:
    assert affinity() is affinity(None, "") is None
    assert affinity(None, "", "a", "b") == affinity("a") == "ca978112ca1bbdcafac231b39a23dc4d"
    assert affinity("a") != affinity("b")
