"""The timing of a stream, driven by hand: headers, keep-alives, clients that are slow or leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from protocols.errors import (
    BackendLost,
    ClientTooSlow,
    InternalError,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.sse import KEEPALIVE
from tests.deployments.http_support import EARLY, begin, post
from tests.deployments.support import (
    HELLO,
    STARTED,
    Step,
    chat_body,
    eventually,
    finished,
    settle,
    sse_events,
    sse_text,
    text,
)

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
