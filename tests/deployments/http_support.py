"""What the tests of the HTTP side share: the app over a scripted pool, and short ways to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from deployments.http import build_app
from deployments.middleware import ASGIApp
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.errors import (
    BackendLost,
    ContextOverflow,
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from tests.deployments.support import (
    HELLO,
    Exchange,
    ScriptedPool,
    Step,
    chat_body,
)

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
MODELS = (ModelEntry("a", 1), ModelEntry("org/model", 2))

EARLY: list[ServingError] = [
    ModelNotFound("The model 'm' does not exist.", param="model"),
    ContextOverflow.of(9, 8),
    Overloaded("Too many requests.", retry_after_s=1.0),
    Unavailable("It failed to start."),
    BackendLost("The replica was lost."),
    DeadlineExceeded("Too late."),
]


def app(pool: ScriptedPool | None = None, *, echo_request_id: bool = True, **settings: Any) -> ASGIApp:
    """Without keep-alives, unless a test asks for them."""
    quiet = {"headers_after_s": 1000, "keepalive_s": 1000}
    return build_app(pool or ScriptedPool(HELLO), GatewaySettings(**quiet | settings), echo_request_id=echo_request_id)


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def get(path: str, method: str = "GET", pool: ScriptedPool | None = None) -> httpx.Response:
    async with client(app(pool)) as http:
        return await http.request(method, path)


async def post(script: Sequence[Step], body: bytes, **settings: Any) -> httpx.Response:
    async with client(app(ScriptedPool(script), **settings)) as http:
        return await http.post(CHAT, content=body)


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return dict(body["error"])


def begin(script: Sequence[Step], body: bytes | None = None, **settings: Any) -> tuple[Exchange, ScriptedPool]:
    """A streamed request, driven by hand."""
    pool = ScriptedPool(script)
    return Exchange(app(pool, **settings), "POST", CHAT, chat_body() if body is None else body), pool
