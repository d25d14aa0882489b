"""The HTTP side over a scripted pool: routes and errors through httpx, everything about timing driven by hand."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from deployments.http import HttpApp, build_app
from deployments.middleware import ASGIApp, Message
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.errors import (
    BackendLost,
    ClientTooSlow,
    ContextOverflow,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.events import (
    Finished,
    Frame,
    Progress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from protocols.sse import KEEPALIVE
from tests.deployments.support import (
    HELLO,
    STARTED,
    Exchange,
    ScriptedPool,
    Step,
    chat_body,
    eventually,
    finished,
    settle,
    sse_events,
    sse_text,
    text,
)

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
MODELS = (ModelEntry("a", 1), ModelEntry("org/model", 2))


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


# --- routes -----------------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_404_and_says_what_there_is() -> None:
    response = await get("/v1/nothing")
    assert response.status_code == 404
    assert error(response)["code"] == "not_found"
    routes = ", ".join(HttpApp(ScriptedPool(), GatewaySettings())._routes)
    assert error(response)["message"] == f"There is no /v1/nothing here. Routes: {routes}."


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/chat", "/V1/models", "//health", "/metrics"])
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


# --- request bodies ---------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_pool_as_it_was_meant() -> None:
    exchange, pool = begin(HELLO, chat_body(max_tokens=5, temperature=0))
    await exchange.done()
    (received,) = pool.requests
    assert (received.model, received.max_tokens, received.sampling.temperature) == ("m", 5, 0)


async def test_a_body_may_come_in_pieces() -> None:
    pool = ScriptedPool(HELLO)
    exchange = Exchange(app(pool), "POST", CHAT, body=None)
    body = chat_body()
    for start in range(0, len(body), 10):
        exchange.upload(body[start : start + 10], more=True)
        await settle()
    assert pool.requests == []
    exchange.upload(b"")
    await exchange.done()
    assert sse_text(exchange.body) == "Hello"


async def test_a_body_of_exactly_the_limit_is_accepted() -> None:
    body = chat_body(stream=False)
    assert (await post(HELLO, body, max_body_bytes=len(body))).status_code == 200


async def test_a_larger_body_is_413() -> None:
    body = chat_body(stream=False)
    response = await post(HELLO, body, max_body_bytes=len(body) - 1)
    assert response.status_code == 413
    assert error(response)["code"] == "payload_too_large"
    assert str(len(body) - 1) in error(response)["message"]


async def test_a_body_that_is_too_large_is_refused_before_it_is_whole() -> None:
    pool = ScriptedPool(HELLO)
    exchange = Exchange(app(pool, max_body_bytes=10), "POST", CHAT, body=None)
    for _ in range(3):
        exchange.upload(b"xxxx", more=True)
    await exchange.done()
    assert exchange.status == 413
    assert exchange.complete
    assert pool.requests == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff", b'{"model": "m", "messages": [}'])
async def test_a_body_that_is_no_json_object_is_400(body: bytes) -> None:
    response = await post(HELLO, body)
    assert response.status_code == 400
    assert error(response)["type"] == "invalid_request_error"
    assert error(response)["message"].startswith("Expected a JSON object, but the body is ")


async def test_a_wrong_field_is_400_and_names_its_path() -> None:
    response = await post(HELLO, chat_body(messages=[{"role": "user", "content": 5}]))
    assert response.status_code == 400
    assert error(response)["param"] == "messages[0].content"


async def test_a_client_that_leaves_while_sending_its_body_is_not_answered() -> None:
    pool = ScriptedPool(HELLO)
    exchange = Exchange(app(pool), "POST", CHAT, body=None)
    exchange.upload(b'{"model"', more=True)
    exchange.disconnect()
    await exchange.done()
    assert exchange.sent == []
    assert pool.requests == []


# --- answers ----------------------------------------------------------------------------------------------------------


SCRIPTS: dict[str, list[Frame]] = {
    "one frame": [Frame((*STARTED.events, TextDelta("Hello"), *finished().events), (1,))],
    "many frames": [STARTED, *(text(f"{word} ", i) for i, word in enumerate("a b c d é".split())), finished()],
    "empty": [STARTED, finished()],
    "events without bytes": [STARTED, Frame((Progress(1, 0, 3, 0.1),)), Frame((), (1,)), text("a", 2), finished()],
    "reasoning": [STARTED, Frame((ReasoningDelta("hm"),), (1,)), text("42", 2), finished()],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_a_streamed_and_a_whole_answer_are_the_same_answer(script: list[Frame]) -> None:
    streamed = await post(script, chat_body(stream=True, stream_options={"include_usage": True}))
    whole = await post(script, chat_body(stream=False))
    (choice,) = whole.json()["choices"]
    chunks = [json.loads(event.data) for event in sse_events(streamed.content)[:-1]]
    assert sse_text(streamed.content) == choice["message"]["content"]
    reasoning = [c["delta"].get("reasoning_content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(reasoning) == (choice["message"].get("reasoning_content") or "")
    assert chunks[-1]["usage"] == whole.json()["usage"]
    assert {chunk["model"] for chunk in chunks} == {whole.json()["model"]} == {"m"}


async def test_a_stream_of_tool_calls_is_the_same_answer_too() -> None:
    script = [
        STARTED,
        Frame((ToolCallStarted(0, "call_a", "f"), ToolCallDelta(0, '{"a":')), (1,)),
        Frame((ToolCallDelta(0, "1}"), ToolCallEnded(0), Finished("tool_calls", Usage(3, 2))), (2,)),
    ]
    streamed = sse_events((await post(script, chat_body(stream=True))).content)
    (call,) = (await post(script, chat_body(stream=False))).json()["choices"][0]["message"]["tool_calls"]
    deltas = [
        part["function"].get("arguments", "")
        for event in streamed[:-1]
        for choice in json.loads(event.data)["choices"]
        for part in choice["delta"].get("tool_calls", [])
    ]
    assert "".join(deltas) == call["function"]["arguments"] == '{"a":1}'


async def test_a_stream_is_not_to_be_cached_or_collected() -> None:
    response = await post(HELLO, chat_body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


async def test_every_frame_is_sent_when_it_comes() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    exchange, _ = begin([STARTED, gates[0], text("Hel", 1), gates[1], text("lo", 2), gates[2], finished()])
    for part, gate in zip(["assistant", "Hel", "lo"], gates, strict=True):
        await eventually(lambda part=part: len(exchange.sent) > 1 and part in exchange.sent[-1]["body"].decode())  # type: ignore[misc]
        assert exchange.sent[-1]["more_body"]
        gate.set()
    await exchange.done()
    assert exchange.complete
    assert sse_text(exchange.body) == "Hello"


async def test_answers_have_ids_of_their_own() -> None:
    bodies = [(await post(HELLO, chat_body(stream=False))).json() for _ in range(3)]
    assert len({body["id"] for body in bodies}) == 3
    chunks = [json.loads(event.data) for event in sse_events((await post(HELLO, chat_body())).content)[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1


# --- errors before the answer has begun -------------------------------------------------------------------------------

EARLY: list[ServingError] = [
    ModelNotFound("The model 'm' does not exist.", param="model"),
    ContextOverflow.of(9, 8),
    Overloaded("Too many requests.", retry_after_s=1.0),
    Unavailable("It failed to start."),
    BackendLost("The replica was lost."),
    DeadlineExceeded("Too late."),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("early", EARLY, ids=lambda error: error.kind)
async def test_a_failure_before_the_first_frame_is_a_real_status(early: ServingError, stream: bool) -> None:
    response = await post([early], chat_body(stream=stream))
    assert response.status_code == early.status
    assert error(response)["message"] == early.message
    assert {name: error(response)[name] for name in early.details} == early.details


@pytest.mark.parametrize(("after_s", "header"), [(1.0, "1"), (0.2, "1"), (4.6, "5"), (30.0, "30"), (None, None)])
async def test_retry_after_is_in_whole_seconds(after_s: float | None, header: str | None) -> None:
    response = await post([Overloaded("Later.", retry_after_s=after_s)], chat_body())
    assert response.headers.get("retry-after") == header


async def test_a_whole_answer_that_fails_midway_is_a_real_status() -> None:
    response = await post([STARTED, text("Hel"), BackendLost("The replica was lost.")], chat_body(stream=False))
    assert response.status_code == 503
    assert error(response)["code"] == "backend_lost"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_unexpected_exception_is_500_and_stays_in_the_log(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    response = await post([ZeroDivisionError("secret detail")], chat_body(stream=stream))
    assert response.status_code == 500
    assert error(response)["message"] == InternalError.PUBLIC_MESSAGE
    assert "secret detail" not in response.text
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
    assert response.headers["x-request-id"] in record.getMessage()


async def test_a_pool_that_breaks_the_order_of_events_is_500(caplog: pytest.LogCaptureFixture) -> None:
    for stream in (True, False):
        response = await post([STARTED, STARTED, finished()], chat_body(stream=stream), headers_after_s=1000)
        if stream:
            assert json.loads(sse_events(response.content)[-2].data)["error"]["message"] == InternalError.PUBLIC_MESSAGE
        else:
            assert response.status_code == 500
    assert "IllegalEvent" in caplog.text


async def test_a_prompt_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = chat_body(messages=[{"role": "user", "content": "private words"}])
    await post([ZeroDivisionError("boom")], body)
    await post([STARTED, BackendLost("lost")], body)
    await post(HELLO, body)
    assert "boom" in caplog.text
    assert "private words" not in caplog.text


# --- when headers go out ----------------------------------------------------------------------------------------------


async def test_headers_wait_for_the_first_frame() -> None:
    gate = asyncio.Event()
    exchange, pool = begin([gate, *HELLO])
    await eventually(lambda: pool.open)
    await settle()
    assert exchange.sent == []
    gate.set()
    await exchange.done()
    assert exchange.status == 200
    assert sse_text(exchange.body) == "Hello"


async def test_after_a_while_headers_and_keep_alives_come_first() -> None:
    gate = asyncio.Event()
    exchange, _ = begin([gate, *HELLO], headers_after_s=0.01, keepalive_s=0.01)
    await eventually(lambda: exchange.body.count(KEEPALIVE) >= 3)
    assert exchange.status == 200
    assert exchange.body.replace(KEEPALIVE, b"") == b""
    gate.set()
    await exchange.done()
    assert sse_text(exchange.body) == "Hello"


async def test_headers_may_go_out_at_once() -> None:
    exchange, _ = begin([asyncio.Event()], headers_after_s=0)
    await eventually(lambda: exchange.body == KEEPALIVE)
    assert exchange.status == 200
    exchange.disconnect()
    await exchange.done()


async def test_a_whole_answer_has_no_keep_alives() -> None:
    gate = asyncio.Event()
    exchange, pool = begin([gate, *HELLO], chat_body(stream=False), headers_after_s=0, keepalive_s=0.001)
    await eventually(lambda: pool.open)
    await asyncio.sleep(0.02)
    assert exchange.sent == []
    gate.set()
    assert (await exchange.done()).json["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("late", EARLY, ids=lambda error: error.kind)
async def test_a_failure_after_the_headers_is_an_event_of_the_stream(late: ServingError) -> None:
    gate = asyncio.Event()
    exchange, _ = begin([gate, late], headers_after_s=0)
    await eventually(lambda: exchange.sent)
    gate.set()
    await exchange.done()
    assert exchange.status == 200
    assert exchange.complete
    failed, end = sse_events(exchange.body)
    assert json.loads(failed.data)["error"]["message"] == late.message
    assert end.data == "[DONE]"


async def test_a_failure_in_the_middle_comes_after_the_text_that_was_there() -> None:
    response = await post([STARTED, text("Hel"), Unavailable("The model is going down.")], chat_body())
    assert response.status_code == 200
    *chunks, failed, end = sse_events(response.content)
    assert "Hel" in chunks[-1].data
    assert json.loads(failed.data)["error"]["message"] == "The model is going down."
    assert end.data == "[DONE]"


async def test_an_unexpected_exception_in_the_middle_is_an_event_without_detail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = await post([STARTED, text("Hel"), ZeroDivisionError("secret detail")], chat_body())
    *_, failed, end = sse_events(response.content)
    assert json.loads(failed.data)["error"]["message"] == InternalError.PUBLIC_MESSAGE
    assert end.data == "[DONE]"
    assert "secret detail" not in response.text
    assert "secret detail" in caplog.text


async def test_silence_in_the_middle_is_filled_with_keep_alives() -> None:
    gate = asyncio.Event()
    exchange, _ = begin([STARTED, text("Hel", 1), gate, text("lo", 2), finished()], keepalive_s=0.01)
    await eventually(lambda: exchange.body.count(KEEPALIVE) >= 3)
    assert exchange.body.index(b"Hel") < exchange.body.index(KEEPALIVE)
    gate.set()
    await exchange.done()
    assert sse_text(exchange.body) == "Hello"


async def test_keep_alives_do_not_wait_for_headers_that_are_out() -> None:
    """`headers_after_s` is how long a status is held back. It says nothing about silence after that."""
    gate = asyncio.Event()
    exchange, _ = begin([STARTED, gate, *HELLO[1:]], headers_after_s=1000, keepalive_s=0.01)
    await eventually(lambda: KEEPALIVE in exchange.body, within_s=3)
    gate.set()
    await exchange.done()


async def test_a_client_says_how_long_a_silence_may_be() -> None:
    body = chat_body(sse_ping_interval=1)
    exchange, _ = begin([STARTED, asyncio.Event()], body, headers_after_s=1000, keepalive_s=1000)
    await eventually(lambda: KEEPALIVE in exchange.body)
    exchange.disconnect()
    await exchange.done()


@pytest.mark.parametrize("never", [-1, 0])
async def test_a_client_may_want_no_keep_alives(never: int) -> None:
    gate = asyncio.Event()
    body = chat_body(sse_ping_interval=never)
    exchange, _ = begin([gate, *HELLO], body, headers_after_s=0, keepalive_s=0.001)
    await eventually(lambda: exchange.status == 200)
    await asyncio.sleep(0.02)
    gate.set()
    await exchange.done()
    assert KEEPALIVE not in exchange.body and sse_text(exchange.body) == "Hello"


async def test_a_stream_without_silence_has_no_keep_alives() -> None:
    exchange, _ = begin(HELLO, headers_after_s=5, keepalive_s=5)
    await exchange.done()
    assert KEEPALIVE not in exchange.body


async def test_nothing_is_sent_after_the_end() -> None:
    exchange, _ = begin(HELLO, headers_after_s=0.001, keepalive_s=0.001)
    await exchange.done()
    count = len(exchange.sent)
    await asyncio.sleep(0.02)
    assert len(exchange.sent) == count
    assert [message["more_body"] for message in exchange.sent[1:]].count(False) == 1


async def test_a_keep_alive_never_comes_before_the_headers() -> None:
    """The client reads slowly: the headers are still being sent when the next keep-alive is due."""
    gate = asyncio.Event()
    exchange, _ = begin([gate, *HELLO], headers_after_s=0, keepalive_s=0.001)
    exchange.reading.clear()
    await eventually(lambda: exchange.sent)
    gate.set()
    await asyncio.sleep(0.01)
    assert [message["type"] for message in exchange.sent] == ["http.response.start"]
    exchange.reading.set()
    await exchange.done()
    assert [message["type"] for message in exchange.sent].count("http.response.start") == 1
    assert sse_text(exchange.body) == "Hello"


async def test_keep_alives_do_not_pile_up_for_a_client_that_does_not_read() -> None:
    exchange, _ = begin([asyncio.Event()], headers_after_s=0, keepalive_s=0.001)
    exchange.reading.clear()
    await eventually(lambda: exchange.sent)
    for _ in range(10):
        await asyncio.sleep(0.002)
        beats = [t for t in asyncio.all_tasks() if getattr(t.get_coro(), "__name__", "") == "_put"]
        assert len(beats) == 1
    exchange.disconnect()
    await exchange.done()


@pytest.mark.parametrize("asked", [{}, {"sse_ping_interval": -1}])
async def test_a_client_that_takes_nothing_for_too_long_is_cut_off_and_its_generation_ends(asked: Any) -> None:
    gate = asyncio.Event()
    body = chat_body(**asked)
    exchange, pool = begin([STARTED, gate, text("a"), asyncio.Event()], body, keepalive_s=0.01, stalled_client_s=0.05)
    await eventually(lambda: exchange.sent)
    exchange.reading.clear()
    gate.set()
    await exchange.done()
    assert pool.open == 0
    assert exchange.sent[-1].get("more_body") is not False


# --- clients that leave -----------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_mid_stream_ends_the_generation() -> None:
    exchange, pool = begin([STARTED, text("Hel"), asyncio.Event()])
    await eventually(lambda: b"Hel" in exchange.body)
    assert pool.open == 1
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0
    assert not exchange.complete


async def test_a_client_that_leaves_before_the_first_frame_ends_the_generation() -> None:
    exchange, pool = begin([asyncio.Event()])
    await eventually(lambda: pool.open)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0
    assert exchange.sent == []


async def test_a_client_that_leaves_during_keep_alives_ends_the_generation() -> None:
    exchange, pool = begin([asyncio.Event()], headers_after_s=0, keepalive_s=0.001)
    await eventually(lambda: exchange.body.count(KEEPALIVE) >= 2)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0
    count = len(exchange.sent)
    await asyncio.sleep(0.02)
    assert len(exchange.sent) == count


async def test_a_client_that_leaves_before_its_whole_answer_ends_the_generation() -> None:
    exchange, pool = begin([STARTED, text("Hel"), asyncio.Event()], chat_body(stream=False))
    await eventually(lambda: pool.open)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0
    assert exchange.sent == []


async def test_a_client_that_leaves_while_it_is_written_to_ends_the_generation() -> None:
    exchange, pool = begin(HELLO)
    exchange.reading.clear()
    await eventually(lambda: exchange.sent)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0


async def test_a_client_that_leaves_while_a_keep_alive_is_written_to_it_ends_the_generation() -> None:
    exchange, pool = begin([asyncio.Event()], headers_after_s=0)
    exchange.reading.clear()
    await eventually(lambda: exchange.sent)
    exchange.disconnect()
    await exchange.done()
    assert pool.open == 0


async def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    exchange, _ = begin([asyncio.Event()])
    await settle()
    exchange.disconnect()
    await exchange.done()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_server_that_is_stopped_cancels_its_requests() -> None:
    """Cancelled from outside, not by the client: the cancellation goes through."""
    exchange, pool = begin([asyncio.Event()])
    await eventually(lambda: pool.open)
    exchange.task.cancel()
    await asyncio.wait([exchange.task])
    assert exchange.task.cancelled()
    assert pool.open == 0


async def test_a_server_that_is_stopped_just_as_the_client_leaves_is_stopped() -> None:
    exchange, pool = begin([asyncio.Event()])
    await eventually(lambda: pool.open)
    exchange.disconnect()
    exchange.task.cancel()
    await asyncio.wait([exchange.task])
    assert exchange.task.cancelled()
    assert pool.open == 0


async def test_a_client_that_is_too_slow_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """No proper end, so that the server closes the connection and the client knows that something is missing."""
    exchange, pool = begin([STARTED, text("Hel"), ClientTooSlow("It does not read.")])
    await exchange.done()
    assert b"[DONE]" not in exchange.body
    assert not exchange.complete
    assert pool.open == 0
    assert "It does not read." in caplog.text


async def test_the_app_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    scripts: list[Sequence[Step]] = [HELLO, [STARTED, BackendLost("lost")], [Overloaded("full")]]
    for script in scripts:
        exchange, _ = begin(script, headers_after_s=0, keepalive_s=0.001)
        await exchange.done()
    await settle()
    assert asyncio.all_tasks() == before


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
        "/ /health /api/hello /models /completion /completions /infill /chat/completions /embedding /embeddings "
        "/rerank /reranking /tokenize /detokenize /apply-template /props /slots /slots/{id} /lora-adapters"
    )
