"""One line per request, and what the metrics count of it; over scripted pools, by hand-set clocks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from deployments.middleware import KEY, REQUEST_ID
from deployments.models import ModelEntry
from deployments.request_log import Line, Record, current, line
from protocols.errors import BackendLost, InvalidRequest, Overloaded
from protocols.events import Finished, Frame, Started, TextDelta, Timings, Usage
from tests.deployments.http_support import CHAT, app, client
from tests.deployments.support import HELLO, Exchange, ScriptedPool, Step, chat_body, text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.getMessage()) for r in caplog.records if r.name == "tokenyard.request"]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tokenyard.request")


# --- a record ---------------------------------------------------------------------------------------------------------


def test_a_record_knows_when_a_slot_was_had_and_each_token_came() -> None:
    clock = Clock()
    record = Record(clock)
    clock.now += 2
    record.observe(Frame((Started(10, 4),)))
    clock.now += 1
    record.observe(text("a", 1))
    clock.now += 6
    record.observe(text("b", 2))
    record.observe(Frame((TextDelta("c"), Finished("stop", Usage(10, 4), timings=Timings(4, 6, 1500, 4, 500))), (3, 4)))
    assert (record.queue_wait_s, record.first_token_s, record.gaps_s) == (2, 3, [2])
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (10, 4, 4)
    assert (record.prefill_tokens, record.prefill_s, record.decode_s, record.longest) == (6, 1.5, 0.5, 14)


def test_a_replica_that_goes_on_starts_nothing_anew() -> None:
    """Of two requests in one call both are counted; the wait and the first token are the earlier ones."""
    clock = Clock()
    record = Record(clock)
    record.observe(Frame((Started(3, 0), TextDelta("a")), (1,)))
    clock.now += 5
    record.observe(Frame((Started(4, 1, 1), TextDelta("a", choice=1)), (1,), 1))
    assert (record.queue_wait_s, record.first_token_s) == (0, 0)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (7, 1, 2)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    record = Record(Clock())
    record.observe(text("a", 1))
    record.observe(Frame((Finished("stop", Usage(3, 1)),)))
    assert record.gaps_s == []


def test_a_line_has_only_what_applies() -> None:
    record = Record(Clock())
    record.status = 200
    assert msgspec.to_builtins(line(record, {REQUEST_ID: "r"}, "")) == {
        "id": "r",
        "status": 200,
        "outcome": "ok",
        "total_s": 0.0,
    }


def test_a_line_names_the_key_and_not_what_it_is() -> None:
    assert line(Record(), {REQUEST_ID: "r", KEY: "alice"}, "").key == "alice"


def test_nothing_in_a_line_has_room_for_what_was_said() -> None:
    """A new field of text is a decision about what may be in the log."""
    words = {field.name for field in msgspec.structs.fields(Line) if field.type is str}
    assert words == {"id", "outcome", "key", "model", "dialect", "operation", "replica"}


def test_outside_of_a_request_there_is_a_record_for_nobody() -> None:
    current().moves += 1
    assert current().moves == 0


# --- through HTTP -----------------------------------------------------------------------------------------------------


async def ask(script: Sequence[Step], body: bytes, path: str = CHAT, **headers: str) -> None:
    pool = ScriptedPool(script, [ModelEntry("m", 7), ModelEntry("alias", 7, of="m")])
    async with client(app(pool)) as http:
        await http.post(path, content=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_is_one_line(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    await ask(HELLO, chat_body(stream), **{"x-request-id": "abc"})
    (entry,) = lines(caplog)
    times = {name: entry.pop(name) for name in ("queue_wait_s", "first_token_s", "inter_token_s", "total_s")}
    assert all(seconds >= 0 for seconds in times.values())
    assert entry == {
        "id": "abc",
        "status": 200,
        "outcome": "ok",
        "model": "m",
        "dialect": "openai_chat",
        "operation": "generate",
        "prompt_tokens": 3,
        "output_tokens": 2,
        **({"stream": True} if stream else {}),
    }


async def test_a_model_is_named_by_its_id_and_one_there_is_not_by_nothing_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await ask(HELLO, chat_body(model="alias"))
    await ask(HELLO, chat_body(model="my secret"))
    assert [entry["model"] for entry in lines(caplog)] == ["m", "unknown"]


@pytest.mark.parametrize(
    ("script", "status", "outcome"),
    [
        ([InvalidRequest("no")], 400, "invalid_request"),
        ([Overloaded("full")], 429, "overloaded"),
        ([*HELLO[:2], BackendLost("gone")], 200, "backend_lost"),
        ([*HELLO[:2], RuntimeError("a bug")], 200, "internal"),
        ([RuntimeError("a bug")], 500, "internal"),
    ],
)
async def test_an_error_is_the_outcome(
    script: list[Step], status: int, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(script, chat_body())
    (entry,) = lines(caplog)
    assert (entry["status"], entry["outcome"]) == (status, outcome)


async def test_a_body_that_cannot_be_read_is_logged_under_its_dialect(caplog: pytest.LogCaptureFixture) -> None:
    await ask(HELLO, b"{", "/v1/messages")
    (entry,) = lines(caplog)
    assert (entry["dialect"], entry["outcome"]) == ("anthropic_messages", "invalid_request")
    assert "operation" not in entry and "model" not in entry


async def test_a_client_that_leaves_is_logged_with_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    exchange = Exchange(app(ScriptedPool([*HELLO[:2], asyncio.Event()])), "POST", CHAT, chat_body())
    while len(exchange.sent) < 3:
        await asyncio.sleep(0)
    exchange.disconnect()
    await exchange.done()
    (entry,) = lines(caplog)
    assert (entry["outcome"], entry["output_tokens"]) == ("client_gone", 1)


async def test_a_question_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    await ask(HELLO, b'{"content": "some text", "model": "m"}', "/tokenize")
    (entry,) = lines(caplog)
    assert (entry["operation"], entry["model"], entry["outcome"]) == ("tokenize", "m", "not_supported")


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/api/status", "/v1/models"])
async def test_those_who_look_on_are_not_in_the_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with client(app()) as http:
        await http.get(path)
    assert lines(caplog) == []


async def test_a_path_that_is_none_is_logged_without_it(caplog: pytest.LogCaptureFixture) -> None:
    async with client(app()) as http:
        await http.get("/my/secret")
    (entry,) = lines(caplog)
    assert (entry["status"], entry["outcome"]) == (404, "not_found")
    assert "secret" not in str(entry)
