"""Frames that go straight from a connection to a client, without waking who reads their stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from unittest.mock import patch

import pytest

from deployments.channel import Inbox
from deployments.http import build_app
from deployments.limits import Account
from deployments.settings import GatewaySettings, SqliteStoreSettings
from protocols.errors import BackendLost
from protocols.events import (
    Event,
    Failed,
    Finished,
    Frame,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from protocols.request import Request
from protocols.sink import Sink, is_middle, watched
from tests.deployments.key_support import ALICE, bearer, entry, write_keys
from tests.deployments.support import (
    STARTED,
    WITHIN_S,
    Exchange,
    ScriptedPool,
    chat_body,
    finished,
    settle,
    sse_events,
    sse_text,
    text,
)

FINISHED = finished()


@pytest.mark.parametrize(
    ("events", "middle"),
    [
        ((TextDelta("a"),), True),
        ((ReasoningDelta("a"),), True),
        ((ToolCallDelta(0, "{"),), True),
        ((), False),
        ((Started(1, 0),), False),
        ((Progress(1, 0, 2, 1.0),), False),
        ((ToolCallStarted(0, "c", "f"),), False),
        ((ToolCallEnded(0),), False),
        ((Finished("stop", Usage(1, 1)),), False),
        ((Failed(BackendLost("gone").info),), False),
        ((TextDelta("a"), Finished("stop", Usage(1, 1))), False),
    ],
)
def test_only_pieces_of_an_answer_are_its_middle(events: tuple[Event, ...], middle: bool) -> None:
    assert is_middle(Frame(events)) is middle


# --- the inbox --------------------------------------------------------------------------------------------------------


class Reader:
    """Reads an inbox to its end, and keeps what it got; `sunk` is what went to the sink, which takes `takes` frames."""

    def __init__(self, inbox: Inbox, takes: int = 1000) -> None:
        self.got: list[Frame] = []
        self.sunk: list[Frame] = []
        self.order: list[str] = []
        self._inbox = inbox
        self._takes = takes
        inbox.sink = self._sink
        self.task = asyncio.get_running_loop().create_task(self._read())

    def _sink(self, frame: Frame) -> bool:
        if len(self.sunk) >= self._takes:
            return False
        self.sunk.append(frame)
        self._note(frame)
        return True

    def _note(self, frame: Frame) -> None:
        self.order += [event.text for event in frame.events if isinstance(event, TextDelta)]

    async def _read(self) -> None:
        while not self._inbox.drained:
            frame = await self._inbox.get()
            self.got.append(frame)
            self._note(frame)


async def test_the_reader_sleeps_through_the_middle_of_an_answer() -> None:
    inbox = Inbox(1, choices=1, limit=100)
    reader = Reader(inbox)
    for frame in (STARTED, text("a", 1), text("b", 2), FINISHED):
        await settle()
        inbox.put(frame)
    await asyncio.wait_for(reader.task, WITHIN_S)
    assert reader.got == [STARTED, FINISHED]
    assert reader.sunk == [text("a", 1), text("b", 2)]


async def test_what_came_while_the_reader_was_busy_is_read_by_it() -> None:
    """And what follows it must not overtake it."""
    inbox = Inbox(1, choices=1, limit=100)
    reader = Reader(inbox)
    await settle()
    inbox.put(STARTED)  # wakes it; it has not run yet
    inbox.put(text("a", 1))
    inbox.put(text("b", 2))
    await settle()
    inbox.put(text("c", 3))
    inbox.put(FINISHED)
    await asyncio.wait_for(reader.task, WITHIN_S)
    assert reader.order == ["ab", "c"]
    assert reader.sunk == [text("c", 3)]


async def test_what_the_sink_refuses_goes_to_the_reader() -> None:
    inbox = Inbox(1, choices=1, limit=100)
    reader = Reader(inbox, takes=1)
    for frame in (text("a", 1), text("b", 2), text("c", 3), FINISHED):
        await settle()
        inbox.put(frame)
    await asyncio.wait_for(reader.task, WITHIN_S)
    assert reader.order == ["a", "b", "c"]
    assert reader.sunk == [text("a", 1)]


@pytest.mark.parametrize("takes", [0, 1000])
async def test_frames_that_came_together_are_one(takes: int) -> None:
    inbox = Inbox(1, choices=1, limit=100)
    reader = Reader(inbox, takes)
    await settle()
    for frame in (text("a", 1), text("b", 2)):
        inbox.add(frame)
    assert not reader.order
    inbox.deliver()
    await settle()
    assert reader.sunk + reader.got == [Frame((TextDelta("ab"),), (1, 2))]
    reader.task.cancel()


@pytest.mark.parametrize("takes", [0, 1, 1000])
async def test_frames_of_several_choices_stay_in_their_order(takes: int) -> None:
    inbox = Inbox(1, choices=2, limit=100)
    reader = Reader(inbox, takes)
    await settle()
    for frame in (text("a", 1), text("x", 2, choice=1), text("b", 3)):
        inbox.add(frame)
    inbox.deliver()
    await settle()
    assert reader.order == ["a", "x", "b"]
    reader.task.cancel()


async def test_a_failing_sink_ends_its_stream_and_nobody_elses() -> None:
    """`deliver` is called by the connection of all streams, which an exception would end."""
    inbox = Inbox(1, choices=1, limit=100)

    def failing(frame: Frame) -> bool:
        raise ValueError("no such event")

    inbox.sink = failing
    reading = asyncio.get_running_loop().create_task(inbox.get())
    await settle()
    inbox.put(text("a", 1))
    with pytest.raises(ValueError, match="no such event"):
        await asyncio.wait_for(reading, WITHIN_S)


async def test_a_closed_inbox_lets_go_of_its_sink() -> None:
    inbox = Inbox(1, choices=1, limit=100)
    with inbox:
        inbox.sink = lambda frame: True
    assert inbox.sink is None


def test_a_watcher_sees_what_was_taken_only() -> None:
    taken = iter([True, False])
    seen: list[Frame] = []
    sink = watched(lambda frame: next(taken), seen.append)
    assert sink is not None
    assert sink(text("a"))
    assert not sink(text("b"))
    assert seen == [text("a")]
    assert watched(None, seen.append) is None


# --- through all layers -----------------------------------------------------------------------------------------------


class ShortWay(ScriptedPool):
    """Gives to a sink what it can, as a gateway does."""

    def __init__(self) -> None:
        super().__init__([STARTED, *(text(f"{word} ", word) for word in range(9)), finished(tokens=9)])
        self.sunk = 0

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        async with aclosing(super().stream(request)) as frames:
            async for frame in frames:
                if sink is not None and is_middle(frame) and sink(frame):
                    self.sunk += 1
                else:
                    yield frame


WORDS = "0 1 2 3 4 5 6 7 8 "


async def test_a_client_gets_all_of_it_and_it_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenyard.request")
    pool = ShortWay()
    exchange = await Exchange(
        build_app(pool, GatewaySettings(), echo_request_id=True), "POST", "/v1/chat/completions", chat_body()
    ).done()
    assert sse_text(exchange.body) == WORDS
    assert pool.sunk == 9
    (line,) = [json.loads(record.getMessage()) for record in caplog.records if record.name == "tokenyard.request"]
    assert line["output_tokens"] == 9


async def test_a_response_is_stored_whole(tmp_path: Path) -> None:
    pool = ShortWay()
    store = SqliteStoreSettings(path=str(tmp_path / "responses"))
    app = build_app(pool, GatewaySettings(response_store=store), echo_request_id=True)
    body = json.dumps({"model": "m", "input": "Hi", "stream": True}).encode()
    exchange = await Exchange(app, "POST", "/v1/responses", body).done()
    final = json.loads(sse_events(exchange.body)[-1].data)["response"]
    stored = (await Exchange(app, "GET", f"/v1/responses/{final['id']}").done()).json
    assert stored["output"][0]["content"][0]["text"] == WORDS
    assert pool.sunk == 9


async def test_a_key_is_charged_for_all_of_it(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, tokens_per_minute=1000)])
    pool = ShortWay()
    app = build_app(pool, GatewaySettings(keys=str(keys)), echo_request_id=True)
    headers = [(name.encode(), value.encode()) for name, value in bearer(ALICE).items()]
    with patch.object(Account, "settle", autospec=True) as settle:
        await Exchange(app, "POST", "/v1/chat/completions", chat_body(), headers).done()
    assert pool.sunk == 9
    assert settle.call_args.args[2] == 3 + 9
