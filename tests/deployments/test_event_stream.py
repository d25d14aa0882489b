"""Server-sent events: what is written where nobody can wait, and how an answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.event_stream import EventStream
from deployments.http_answers import ClientGone
from deployments.middleware import Message
from deployments.settings import GatewaySettings
from protocols.events import Event, Failed, Finished, Frame, ReasoningDelta, TextDelta
from tests.deployments.support import WITHIN_S, finished, settle, text

FINISHED = finished()


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
