"""Frames that go straight from a connection to a client, without waking who reads their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.channel import Inbox
from deployments.eager import Begun, finish
from deployments.event_stream import EventStream
from deployments.http_answers import ClientGone
from deployments.middleware import Message
from deployments.settings import GatewaySettings
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
from protocols.sink import is_middle, watched

WITHIN_S = 5.0
STARTED = Frame((Started(1, 0),))
FINISHED = Frame((Finished("stop", Usage(1, 1)),))


def text(word: str, *tokens: int, choice: int = 0) -> Frame:
    return Frame((TextDelta(word, choice=choice),), tokens, choice)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


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
    assert reader.sunk + reader.got == [text("ab", 1, 2)]
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


# --- the stream of events ---------------------------------------------------------------------------------------------


class Words:
    """An encoder that writes the text alone."""

    def feed(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return event.text.encode()
        return b"<failed>" if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return b"."


class Client:
    """Takes messages when it is `reading`; `sent` has those it was given, also if it has not taken them yet."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.reading = asyncio.Event()
        self.reading.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
        await self.reading.wait()


@pytest.fixture
def client() -> Client:
    return Client()


def stream_to(client: Client, **settings: float) -> EventStream:
    return EventStream(
        client.send, Words(), GatewaySettings(**{"headers_after_s": 1000, "keepalive_s": 1000} | settings)
    )


@pytest.fixture
async def out(client: Client) -> AsyncIterator[EventStream]:
    async with stream_to(client) as out:
        yield out


async def test_headers_are_not_for_the_sink(out: EventStream) -> None:
    assert not out.take(text("a"))
    await out.write(text("a"))
    assert out.take(text("b"))


async def test_a_write_that_need_not_wait_is_done_at_once(out: EventStream, client: Client) -> None:
    await out.write(text("a"))
    assert out.take(text("b"))
    assert out.take(text("c"))
    assert client.sent == [b"a", b"b", b"c"]


async def test_what_has_no_bytes_is_taken_and_not_sent(out: EventStream, client: Client) -> None:
    await out.write(text("a"))
    assert out.take(Frame((ReasoningDelta("hm"),)))
    assert client.sent == [b"a"]


async def test_a_write_that_waits_is_brought_to_its_end(out: EventStream, client: Client) -> None:
    await out.write(text("a"))
    client.reading.clear()
    assert out.take(text("b"))
    assert not out.take(text("c"))
    writing = asyncio.get_running_loop().create_task(out.write(text("c")))
    await settle()
    assert client.sent == [b"a", b"b"]
    client.reading.set()
    await asyncio.wait_for(writing, WITHIN_S)
    assert client.sent == [b"a", b"b", b"c"]
    assert out.take(text("d"))


async def test_a_client_that_takes_its_write_at_last_is_written_to_again(out: EventStream, client: Client) -> None:
    await out.write(text("a"))
    client.reading.clear()
    assert out.take(text("b"))
    client.reading.set()
    await settle()
    assert out.take(text("c"))
    assert client.sent == [b"a", b"b", b"c"]


async def test_nothing_overtakes_a_write_of_the_readers(out: EventStream, client: Client) -> None:
    await out.write(text("a"))
    client.reading.clear()
    writing = asyncio.get_running_loop().create_task(out.write(text("b")))
    await settle()
    assert not out.take(text("c"))
    client.reading.set()
    await asyncio.wait_for(writing, WITHIN_S)


async def test_a_client_that_never_takes_it_is_cut_off(client: Client) -> None:
    with pytest.raises(ClientGone):
        async with asyncio.timeout(WITHIN_S), stream_to(client, keepalive_s=0.01, stalled_client_s=0.05) as out:
            await out.write(text("a"))
            client.reading.clear()
            assert out.take(text("b"))
            await asyncio.sleep(WITHIN_S)
    assert client.sent == [b"a", b"b"]


async def test_a_client_that_took_it_is_not(client: Client) -> None:
    async with stream_to(client, keepalive_s=0.05, stalled_client_s=0.5) as out:
        await out.write(text("a"))
        client.reading.clear()
        assert out.take(text("b"))
        await settle()
        client.reading.set()
        await asyncio.sleep(0.8)
        assert out.take(text("c"))


async def test_an_answer_ends_behind_what_waits(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        async with stream_to(client) as out:
            await out.write(text("a"))
            client.reading.clear()
            assert out.take(text("b"))
            await out.write(FINISHED)
            asyncio.get_running_loop().call_later(0.05, client.reading.set)
        assert client.sent == [b"a", b"b", b""]


async def test_a_client_that_never_takes_the_end_is_cut_off(client: Client) -> None:
    with pytest.raises(ClientGone):
        async with asyncio.timeout(WITHIN_S), stream_to(client, keepalive_s=0.01, stalled_client_s=0.05) as out:
            await out.write(text("a"))
            client.reading.clear()
            assert out.take(text("b"))
            await out.write(FINISHED)


class Ends(Words):
    def feed(self, event: Event) -> bytes:
        return b"<end>" if isinstance(event, Finished) else super().feed(event)


async def test_the_last_words_leave_with_the_end(client: Client) -> None:
    async with EventStream(client.send, Ends(), GatewaySettings()) as out:
        await out.write(text("a"))
        await out.write(FINISHED)
        assert client.sent == [b"a"]
    assert client.sent == [b"a", b"<end>"]


async def test_the_end_of_a_choice_leaves_before_what_another_says(client: Client) -> None:
    async with EventStream(client.send, Ends(), GatewaySettings()) as out:
        await out.write(text("a"))
        await out.write(FINISHED)
        assert not out.take(text("b", choice=1))
        await out.write(text("b", choice=1))
        assert client.sent == [b"a", b"<end>b"]


# --- what is begun outside of a task ---------------------------------------------------------------------------------


async def test_what_need_not_wait_is_done() -> None:
    async def answer() -> int:
        return 7

    begun = Begun(answer())
    assert begun.done
    assert begun.value == 7
    assert await begun == 7


async def test_what_waits_is_brought_to_its_end_by_another_task() -> None:
    ready = asyncio.Event()

    async def answer() -> int:
        await ready.wait()
        await asyncio.sleep(0)
        return 7

    begun = Begun(answer())
    assert not begun.done
    task = asyncio.get_running_loop().create_task(finish(begun))
    await settle()
    ready.set()
    assert await asyncio.wait_for(task, WITHIN_S) == 7
    assert begun.value == 7


async def test_what_is_given_up_is_closed() -> None:
    closed = False

    async def answer() -> None:
        nonlocal closed
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed = True

    task = asyncio.get_running_loop().create_task(finish(Begun(answer())))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed
