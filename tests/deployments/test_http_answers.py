"""What comes in as a body and what goes out as an answer, whole or streamed, or as an error."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from protocols.errors import (
    BackendLost,
    InternalError,
    Overloaded,
    ServingError,
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
from tests.deployments.http_support import CHAT, EARLY, app, begin, error, post
from tests.deployments.support import (
    HELLO,
    STARTED,
    Exchange,
    ScriptedPool,
    chat_body,
    eventually,
    finished,
    settle,
    sse_events,
    sse_text,
    text,
)

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
