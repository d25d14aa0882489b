"""The HTTP side over a scripted pool: routes, models, request ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.http import HttpApp
from deployments.middleware import Message
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from tests.deployments.http_support import CHAT, MODELS, USER, app, client, error, get
from tests.deployments.support import (
    HELLO,
    Exchange,
    ScriptedPool,
    chat_body,
    eventually,
)

# --- routes -----------------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_404_and_says_what_there_is() -> None:
    response = await get("/v1/nothing")
    assert response.status_code == 404
    assert error(response)["code"] == "not_found"
    routes = ", ".join(HttpApp(ScriptedPool(), GatewaySettings())._routes)
    assert error(response)["message"] == f"There is no /v1/nothing here. Routes: {routes}."


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat", "/V1/models", "//health", "/metrics/"])
async def test_only_exact_paths_are_routes(path: str) -> None:
    exchange = await Exchange(app(), "GET", path).done()
    assert exchange.status == 404


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", CHAT, "/v1/chat/completions takes POST, not GET."),
        ("HEAD", CHAT, "/v1/chat/completions takes POST, not HEAD."),
        ("POST", "/v1/models", "/v1/models takes GET, not POST."),
        ("DELETE", "/v1/models/a", "/v1/models/a takes GET, not DELETE."),
        ("PUT", "/health", "/health takes GET, not PUT."),
    ],
)
async def test_a_wrong_method_is_405_and_says_the_right_one(method: str, path: str, message: str) -> None:
    exchange = await Exchange(app(), method, path).done()
    assert exchange.status == 405
    assert exchange.json["error"]["message"] == message
    assert exchange.json["error"]["code"] == ("method_not_supported" if path.startswith("/v1/") else 405)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/health", "/api/hello", "/models", "/v1/models", "/v1/models/a"])
async def test_B85_head_is_get_without_a_body(path: str) -> None:
    head = await get(path, "HEAD", ScriptedPool(models=MODELS))
    full = await get(path, "GET", ScriptedPool(models=MODELS))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == full.headers["content-length"] == str(len(full.content))


async def test_health_answers_without_asking_a_model() -> None:
    pool = ScriptedPool([RuntimeError("no model is asked")])
    response = await get("/health", pool=pool)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert pool.requests == []


@pytest.mark.parametrize("models", [[], [ModelEntry("a", 1, ready=False)]])
async def test_B90_nothing_is_healthy_until_a_model_can_answer(models: list[ModelEntry]) -> None:
    loading = await get("/health", pool=ScriptedPool(models=models))
    assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
    assert loading.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    assert error(await get("/v1/health", pool=ScriptedPool(models=models)))["message"] == "Loading model"
    assert [model["id"] for model in (await get("/v1/models", pool=ScriptedPool(models=models))).json()["data"]] == [
        entry.id for entry in models
    ]
    for probe in ("/", "/api/hello"):
        assert (await get(probe, "HEAD", ScriptedPool(models=models))).status_code == 200
    ready = [*models, ModelEntry("b", 1)]
    assert (await get("/health", pool=ScriptedPool(models=ready))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"x-api-key": "k"}, {"authorization": "Bearer k"}, {"x-api-key": "k", "authorization": "Bearer k"}],
    ids="-".join,
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
        ("/v1/responses", {"input": "Hi"}),
        ("/completion", {"prompt": "Hi"}),
    ],
)
async def test_B80_B81_keys_come_in_either_header_or_in_both(
    path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    """Nobody asks for one here, and clients that cannot go without send them all the same."""
    async with client(app()) as http:
        assert (await http.post(path, json={"model": "m", **body}, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_an_answer_has_the_length_it_says() -> None:
    response = await get("/v1/models")
    assert response.headers["content-length"] == str(len(response.content))


# --- models -----------------------------------------------------------------------------------------------------------


async def test_models_are_listed_in_openais_form() -> None:
    response = await get("/v1/models", pool=ScriptedPool(models=MODELS))
    assert response.json() == {
        "object": "list",
        "data": [
            {"id": "a", "object": "model", "created": 1, "owned_by": "tokenyard"},
            {"id": "org/model", "object": "model", "created": 2, "owned_by": "tokenyard"},
        ],
    }


async def test_no_models_are_an_empty_list() -> None:
    assert (await get("/v1/models", pool=ScriptedPool(models=()))).json() == {"object": "list", "data": []}


@pytest.mark.parametrize("path", ["org/model", "org%2Fmodel"])
async def test_a_model_is_found_by_an_id_with_slashes(path: str) -> None:
    response = await get(f"/v1/models/{path}", pool=ScriptedPool(models=MODELS))
    assert response.json() == {"id": "org/model", "object": "model", "created": 2, "owned_by": "tokenyard"}


@pytest.mark.parametrize("wanted", ["b", "org", "org/", "model", ""])
async def test_an_unknown_model_is_404_and_names_the_known_ones(wanted: str) -> None:
    response = await get(f"/v1/models/{wanted}", pool=ScriptedPool(models=MODELS))
    assert response.status_code == 404
    assert error(response) == {
        "message": f"The model '{wanted}' does not exist. Available: a, org/model.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_where_there_are_no_models_none_are_named() -> None:
    response = await get("/v1/models/a", pool=ScriptedPool(models=()))
    assert error(response)["message"] == "The model 'a' does not exist. Available: none."


# --- request ids ------------------------------------------------------------------------------------------------------


async def ids(given: bytes | None, echo: bool) -> tuple[str, str | None]:
    """The id the pool saw, and the one on the answer."""
    pool = ScriptedPool(HELLO)
    headers = [] if given is None else [(b"x-request-id", given)]
    exchange = Exchange(app(pool, echo_request_id=echo), "POST", CHAT, chat_body(), headers)
    await exchange.done()
    return pool.requests[0].id, exchange.headers.get("x-request-id")


async def test_the_callers_request_id_is_used_and_echoed() -> None:
    assert await ids(b"abc-1.2:3_X", echo=True) == ("abc-1.2:3_X", "abc-1.2:3_X")


@pytest.mark.parametrize("given", [None, b"", b"a b", b"x" * 129, b"a\r\nset-cookie: x", b"caf\xc3\xa9"])
async def test_a_request_id_that_is_not_sane_is_replaced(given: bytes | None) -> None:
    used, echoed = await ids(given, echo=True)
    assert used == echoed
    assert len(used) == 32 and int(used, 16) >= 0
    assert used != (await ids(given, echo=True))[0]


async def test_behind_serve_the_request_id_is_not_echoed() -> None:
    assert await ids(b"abc", echo=False) == ("abc", None)


async def test_errors_carry_the_request_id_too() -> None:
    exchange = await Exchange(app(), "GET", "/nothing", headers=[(b"x-request-id", b"abc")]).done()
    assert exchange.headers["x-request-id"] == "abc"


# --- other scopes -----------------------------------------------------------------------------------------------------


async def test_lifespan_is_answered() -> None:
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    running = asyncio.ensure_future(app()({"type": "lifespan"}, received.get, send))
    received.put_nowait({"type": "lifespan.startup"})
    await eventually(lambda: sent == ["lifespan.startup.complete"])
    assert not running.done()
    received.put_nowait({"type": "lifespan.shutdown"})
    await running
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_websockets_are_refused() -> None:
    async def unused(*_: Any) -> Any:
        raise AssertionError("nothing is read or sent")

    with pytest.raises(ValueError, match="HTTP, not websocket"):
        await app()({"type": "websocket", "headers": []}, unused, unused)


def test_every_route_is_in_the_table() -> None:
    """The text of a 404 lists them: an operator sees all there is."""
    routes = HttpApp(ScriptedPool(), GatewaySettings())._routes
    assert " ".join(routes) == (
        "/v1/chat/completions /v1/responses /v1/responses/input_tokens /v1/completions /v1/messages "
        "/v1/messages/count_tokens /v1/models /v1/embeddings /v1/rerank /v1/reranking /v1/health "
        "/ /health /api/hello /api/status /metrics /models /completion /completions /infill /chat/completions "
        "/chat/completions/input_tokens /embedding /embeddings /rerank /reranking /tokenize /detokenize "
        "/apply-template /props /slots /slots/{id} /lora-adapters"
    )
