"""The routes of Anthropic Messages over a scripted pool: what clients check first, keep-alives, counting, wording."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.http import build_app
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.anthropic_messages.encode import PING
from protocols.errors import ContextOverflow, ModelNotFound, Overloaded, ServingError, Unavailable
from protocols.request import ChatPrompt
from tests.deployments.support import HELLO, STARTED, Exchange, ScriptedPool, Step, eventually, finished, text
from tests.protocols.anthropic_messages import checker
from tests.protocols.anthropic_messages.test_captures import CLAUDE_CODE, OTHERS, bodies

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
OLD = (b"anthropic-version", b"2023-06-01")
NEW = (b"anthropic-version", b"2026-10-21")
Headers = Sequence[tuple[bytes, bytes]]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


def begin(
    pool: ScriptedPool, path: str, raw: bytes = b"", headers: Headers = (OLD,), method: str = "POST", **settings: Any
) -> Exchange:
    """Without keep-alives, unless a test asks for them."""
    quiet = {"headers_after_s": 1000, "keepalive_s": 1000}
    app = build_app(pool, GatewaySettings(**quiet | settings), echo_request_id=True)
    return Exchange(app, method, path, raw, headers)


async def post(script: Sequence[Step], raw: bytes, path: str = MESSAGES, headers: Headers = (OLD,)) -> Exchange:
    return await begin(ScriptedPool(script), path, raw, headers).done()


async def get(path: str, headers: Headers = (OLD,), method: str = "GET", ids: str = "abc") -> Exchange:
    pool = ScriptedPool(models=[ModelEntry(id, 1_700_000_000) for id in ids])
    return await begin(pool, path, headers=headers, method=method).done()


# --- messages ------------------------------------------------------------


@pytest.mark.parametrize("version", [OLD, NEW], ids=["2023-06-01", "2026-10-21"])
@pytest.mark.parametrize("key", [(b"x-api-key", b"k"), (b"authorization", b"Bearer k")], ids=["x-api-key", "bearer"])
async def test_every_version_and_key_header_gets_the_same_answer(
    version: tuple[bytes, bytes], key: tuple[bytes, bytes]
) -> None:
    exchange = await post(HELLO, body(temperature=0.7, top_k=5), headers=[version, key])
    assert exchange.status == 200
    assert exchange.json["content"] == [{"type": "text", "text": "Hello"}]


async def test_a_stream_is_sent_as_one_whatever_the_client_says_it_accepts() -> None:
    accepts = (b"accept", b"application/json")
    exchange = await post(HELLO, body(stream=True), f"{MESSAGES}?beta=true", [OLD, accepts])
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert checker.message(exchange.body)["content"] == [{"type": "text", "text": "Hello"}]


@pytest.mark.parametrize("name", CLAUDE_CODE + OTHERS)
async def test_recorded_requests_are_answered(name: str) -> None:
    for recorded in bodies(name):
        path = MESSAGES if "max_tokens" in recorded else COUNT
        exchange = await post(HELLO, json.dumps(recorded).encode(), path)
        assert exchange.status == 200
        if recorded.get("stream"):
            assert checker.message(exchange.body)["stop_reason"] == "end_turn"


async def test_B95_silence_is_filled_with_pings() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    pool = ScriptedPool([gates[0], STARTED, gates[1], text("Hello", 1), finished()])
    exchange = begin(pool, MESSAGES, body(stream=True), headers_after_s=0, keepalive_s=0.001)
    for gate in gates:
        before = len(exchange.body)
        await eventually(lambda before=before: exchange.sent and PING in exchange.body[before:])  # type: ignore[misc]
        gate.set()
    await exchange.done()
    assert exchange.body.startswith(PING)
    assert checker.message(exchange.body)["content"] == [{"type": "text", "text": "Hello"}]


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (ContextOverflow.of(9, 8), 400, "invalid_request_error"),
        (ModelNotFound("No model", param="model"), 404, "not_found_error"),
        (Overloaded("Full", retry_after_s=3.0), 429, "rate_limit_error"),
        (Unavailable("Loading", retry_after_s=3.0), 529, "overloaded_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize("stream", [True, False])
async def test_B78_errors_have_anthropics_shape_before_the_first_frame(
    path: str, stream: bool, error: Exception, status: int, type_: str
) -> None:
    exchange = await post([error], body(stream=stream), path)
    assert (exchange.status, exchange.headers["content-type"]) == (status, "application/json")
    assert exchange.json["type"] == "error"
    assert exchange.json["error"]["type"] == type_
    assert b"secret" not in exchange.body
    if isinstance(error, ServingError) and error.retry_after_s:
        assert exchange.headers["retry-after"] == "3"


@pytest.mark.parametrize("echo", [True, False])
async def test_the_request_id_is_in_every_answer_and_every_error(echo: bool) -> None:
    named = (OLD, (b"x-request-id", b"abc"))
    stalled: list[Step] = [STARTED, text("Hel", 1), Unavailable("Gone.")]
    cases: list[tuple[Sequence[Step], str, str, int, bool]] = [
        (HELLO, "POST", MESSAGES, 200, False),
        (HELLO, "POST", COUNT, 200, False),
        (HELLO, "GET", "/v1/models", 200, False),
        (stalled, "POST", MESSAGES, 200, True),
        ([Overloaded("Full")], "POST", MESSAGES, 429, True),
        ([ZeroDivisionError("secret")], "POST", COUNT, 500, True),
        (HELLO, "GET", MESSAGES, 405, True),
        (HELLO, "GET", "/v1/nothing", 404, True),
    ]
    for script, method, path, status, fails in cases:
        app = build_app(ScriptedPool(script), GatewaySettings(), echo_request_id=echo)
        exchange = await Exchange(app, method, path, body(stream=script is stalled), named).done()
        assert (exchange.status, exchange.headers["request-id"]) == (status, "abc")
        if fails:
            error = checker.begun(exchange.body)[1] if script is stalled else exchange.json
            assert (error["type"], error["request_id"]) == ("error", "abc")


STRICT: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1},
    "top_k": {"top_k": 5},
    "messages[0].content[0].citations": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "citations": [{"cited_text": "x"}]}]}]
    },
}


@pytest.mark.parametrize("param", STRICT)
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_what_the_new_version_refuses_is_refused_where_an_operator_wants_it(path: str, param: str) -> None:
    for strict, version, status in ((True, NEW, 400), (True, OLD, 200), (False, NEW, 200), (True, None, 200)):
        headers = () if version is None else (version,)
        exchange = await begin(
            ScriptedPool(HELLO), path, body(**STRICT[param]), headers, anthropic_strict=strict
        ).done()  # fmt: skip
        assert exchange.status == status
        if status == 400:
            assert exchange.json["error"]["type"] == "invalid_request_error"
            assert param in exchange.json["error"]["message"]
            assert exchange.json["request_id"] == exchange.headers["request-id"]


# --- counting ------------------------------------------------------------


async def test_B20_tokens_are_counted_without_generating() -> None:
    pool = ScriptedPool(HELLO)
    counted = await begin(pool, COUNT, body()).done()
    assert (counted.status, counted.json) == (200, {"input_tokens": 3})
    assert pool.requests == []
    await begin(pool, MESSAGES, body()).done()
    assert [request.prompt for request in pool.counted] == [request.prompt for request in pool.requests]


async def test_B14_a_changing_billing_header_changes_neither_prompt() -> None:
    pool = ScriptedPool(HELLO)
    for value in ("a", "b"):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cch={value};"}
        raw = body(system=[header, {"type": "text", "text": "Be brief."}])
        await begin(pool, MESSAGES, raw).done()
        await begin(pool, COUNT, raw).done()
    prompts = [request.prompt for request in (*pool.requests, *pool.counted)]
    assert len(prompts) == 4
    assert all(prompt == prompts[0] for prompt in prompts)
    assert isinstance(prompts[0], ChatPrompt)
    assert prompts[0].messages[0].text == "Be brief."


async def test_a_client_that_leaves_gets_no_count() -> None:
    pool = ScriptedPool([asyncio.Event(), *HELLO])
    exchange = begin(pool, COUNT, body())
    await eventually(lambda: pool.counted)
    exchange.disconnect()
    await exchange.done()
    assert exchange.sent == []


async def test_what_is_wrong_with_a_question_is_said_as_of_a_message() -> None:
    for path in (MESSAGES, COUNT):
        exchange = await post(HELLO, body(messages=[{"role": "user", "content": 5}]), path)
        assert exchange.status == 400
        assert exchange.json["error"] == {
            "type": "invalid_request_error",
            "message": "Invalid 'messages[0].content': expected a string or a list, got 5.",
        }


# --- what clients look for ------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/api/hello"])
async def test_B85_somebody_is_here(path: str) -> None:
    assert (await get(path, (), "HEAD")).status == 200
    assert (await get(path, (), "POST")).status == 405


async def test_B86_models_are_in_anthropics_shape_for_who_speaks_it() -> None:
    exchange = await get("/v1/models?limit=1000")
    assert exchange.json == {
        "data": [
            {
                "type": "model",
                "id": id,
                "display_name": id,
                "created_at": "2023-11-14T22:13:20Z",
                "lifecycle": "active",
            }
            for id in "abc"
        ],
        "has_more": False,
        "first_id": "a",
        "last_id": "c",
    }
    assert (await get("/v1/models/b")).json == exchange.json["data"][1]
    assert (await get("/v1/models", ())).json["object"] == "list"
    assert (await get("/v1/models/b", ())).json["object"] == "model"


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ("", "abc", False),
        ("limit=2", "ab", True),
        ("limit=3", "abc", False),
        ("after_id=a", "bc", False),
        ("after_id=a&limit=1", "b", True),
        ("after_id=c", "", False),
        ("before_id=c", "ab", False),
        ("before_id=c&limit=1", "b", True),
        ("before_id=a", "", False),
    ],
)
async def test_models_are_paged(query: str, ids: str, more: bool) -> None:
    page = (await get(f"/v1/models?{query}")).json
    assert "".join(model["id"] for model in page["data"]) == ids
    assert page["has_more"] is more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=99999", "after_id=z", "before_id=z"])
async def test_a_wrong_page_is_400(query: str) -> None:
    exchange = await get(f"/v1/models?{query}")
    assert exchange.status == 400
    assert exchange.json["error"]["type"] == "invalid_request_error"
    assert query.split("=")[0] in exchange.json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/nothing", (NEW,), 404),
        ("GET", "/v1/models/z", (NEW,), 404),
        ("POST", "/v1/models", (NEW,), 405),
        ("GET", MESSAGES, (), 405),
        ("POST", "/v1/messages/batches", (), 404),
    ],
)
async def test_B78_whoever_speaks_anthropic_is_answered_in_it(
    method: str, path: str, headers: Headers, status: int
) -> None:
    exchange = await get(path, headers, method)
    assert exchange.status == status
    assert exchange.json["type"] == "error"
    assert exchange.json["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
