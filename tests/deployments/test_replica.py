"""The shell around a backend: where frames go, and that no request's failure is an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from backends.fake import FakeFault, FakeSettings
from deployments.asks import Asks
from deployments.channel import ChannelHub, ReturnAddress
from deployments.replica import HANDED_OVER, Replica, ReplicaMetadata, decode_answer, decode_frame
from deployments.routing.ask import VERSION, Ask, AskReply
from deployments.routing.hint import RoutingHint
from deployments.routing.key import bare_key, prefix_key
from deployments.routing.policy import PolicyOptions
from deployments.settings import HotSettings, ModelSettings
from protocols.calls import EmbeddingRequest, Tokenize
from protocols.errors import (
    BackendLost,
    ContextOverflow,
    InternalError,
    NotSupported,
    ReplicaStopping,
    ServingError,
    Unavailable,
)
from protocols.events import Failed, Frame
from protocols.request import Request, TextPrompt
from tests.deployments.support import WITHIN_S, eventually, request, tokens

encode = msgspec.msgpack.encode
HINT = RoutingHint(bare_key(1))


Start = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def started() -> AsyncIterator[Start]:
    """Starts replicas over the fake backend, and closes them."""
    replicas: list[Replica] = []

    async def start(**backend: Any) -> Replica:
        replicas.append(Replica(ModelSettings(backend=FakeSettings(**backend)), "127.0.0.1"))
        await replicas[-1].start()
        return replicas[-1]

    yield start
    for replica in replicas:
        await replica.aclose()


async def connect(hub: ChannelHub, replica: Replica) -> None:
    metadata = ReplicaMetadata.from_plain(replica.record_replica_metadata())
    assert metadata is not None
    hub.set_replicas("m", {"r": metadata.channel})
    await eventually(lambda: replica._channel.link(hub.gateway))


async def test_how_long_an_engine_may_stall_can_be_changed(monkeypatch: pytest.MonkeyPatch, started: Start) -> None:
    given: list[Callable[[], float]] = []

    async def watch(_: object, stall_timeout_s: Callable[[], float]) -> None:
        given.append(stall_timeout_s)

    monkeypatch.setattr("deployments.replica.watch", watch)
    replica = await started()
    await eventually(lambda: given)
    (stall_timeout_s,) = given
    default = stall_timeout_s()
    replica.change(HotSettings(stall_timeout_s=default + 1))
    assert stall_timeout_s() == default + 1
    replica.change(HotSettings())
    assert stall_timeout_s() == default


def generate(
    replica: Replica, wanted: Request, gateway: str = "nobody", stream: int = 1
) -> AsyncGenerator[bytes, None]:
    return replica.generate(encode(wanted), HINT, encode(ReturnAddress(gateway, stream)))


def error_of(item: bytes) -> ServingError:
    (failed,) = decode_frame(item).events
    assert isinstance(failed, Failed)
    return ServingError.from_info(failed.error)


async def test_without_a_connection_frames_are_the_items_of_the_call(started: Start) -> None:
    replica = await started(tokens=5)
    frames = [decode_frame(item) async for item in generate(replica, request())]
    assert len(tokens(frames)) == 5


async def test_with_a_connection_frames_go_over_it(started: Start, hub: ChannelHub) -> None:
    replica = await started(tokens=5)
    await connect(hub, replica)
    received: list[Frame] = []
    with hub.open() as inbox:
        assert [item async for item in generate(replica, request(), hub.gateway, inbox.stream)] == [HANDED_OVER]
        async with asyncio.timeout(WITHIN_S):
            while not inbox.drained:
                received.append(await inbox.get())
    assert len(tokens(received)) == 5


@pytest.mark.parametrize(("known", "stream"), [(True, 0), (False, 1)])
async def test_a_gateway_that_wants_no_channel_or_has_none_gets_items(
    started: Start, hub: ChannelHub, known: bool, stream: int
) -> None:
    replica = await started(tokens=5)
    await connect(hub, replica)
    items = [item async for item in generate(replica, request(), hub.gateway if known else "other", stream)]
    assert len(tokens(map(decode_frame, items))) == 5


async def test_a_stream_ends_with_its_connection(hub: ChannelHub, started: Start) -> None:
    """What was pushed before may be lost with it, so the stream cannot go on elsewhere."""
    replica = await started(inter_token_s=0.001)
    await connect(hub, replica)
    link = replica._channel.link(hub.gateway)
    assert link is not None
    with hub.open() as inbox:
        items = generate(replica, request(max_tokens=10_000), hub.gateway, inbox.stream)
        first = asyncio.ensure_future(anext(items))
        await eventually(lambda: inbox.replica)
        assert not first.done()
        link.transport.abort()
        async with asyncio.timeout(WITHIN_S):
            assert isinstance(error_of(await first), BackendLost)
            assert [item async for item in items] == []
    assert replica.stats().running == 0


async def test_a_connection_that_breaks_before_the_first_frame_harms_nothing(hub: ChannelHub, started: Start) -> None:
    replica = await started(tokens=5, slots=1, inter_token_s=0.001)
    await connect(hub, replica)
    link = replica._channel.link(hub.gateway)
    assert link is not None
    async with aclosing(generate(replica, request(max_tokens=10_000))) as holder:
        await anext(holder)
        waiting = asyncio.ensure_future(anext(items := generate(replica, request(), hub.gateway, 1)))
        await eventually(lambda: replica.stats().waiting == 1)
        link.transport.abort()
        await eventually(lambda: not link.open)
    async with asyncio.timeout(WITHIN_S):
        frames = [decode_frame(await waiting), *[decode_frame(item) async for item in items]]
    assert len(tokens(frames)) == 5


async def test_a_backends_error_is_the_last_frame(started: Start) -> None:
    replica = await started(context_length=4)
    (item,) = [item async for item in generate(replica, request(text="one two three four five"))]
    error = error_of(item)
    assert isinstance(error, ContextOverflow)
    assert error.details == {"n_prompt_tokens": 6, "n_ctx": 4}


async def test_a_clients_own_mistake_is_no_warning(started: Start, caplog: pytest.LogCaptureFixture) -> None:
    replica = await started(context_length=4)
    assert [item async for item in generate(replica, request(text="one two three four five"))]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_any_other_error_is_logged_with_the_requests_id(started: Start, caplog: pytest.LogCaptureFixture) -> None:
    replica = await started(fail_at=FakeFault(kind="unavailable"))
    assert [item async for item in generate(replica, request())]
    assert "request r1: unavailable" in caplog.text


async def test_a_backend_that_breaks_is_an_internal_error_whose_detail_stays_here(
    started: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = await started()

    async def broken(_: Request, sink: object) -> AsyncGenerator[Frame, None]:
        raise ZeroDivisionError("secret detail")
        yield

    replica._backend.generate = broken  # type: ignore[assignment, method-assign]
    (item,) = [item async for item in generate(replica, request())]
    assert isinstance(error_of(item), InternalError)
    assert b"secret" not in item
    assert "secret detail" in caplog.text


async def test_closing_the_call_frees_the_slot(started: Start) -> None:
    replica = await started(inter_token_s=0.001)
    async with aclosing(generate(replica, request(max_tokens=1000))) as items:
        await anext(items)
        assert replica.stats().running == 1
    assert replica.stats().running == 0


async def test_metadata_says_where_it_listens_and_what_it_holds(started: Start) -> None:
    replica = await started(slots=3, context_length=99)
    metadata = ReplicaMetadata.from_plain(replica.record_replica_metadata())
    assert metadata is not None
    assert metadata.channel.host == "127.0.0.1"
    assert (metadata.card.slots, metadata.card.context_length, metadata.card.engine) == (3, 99, "fake")
    reader, writer = await asyncio.open_connection(metadata.channel.host, metadata.channel.port)
    writer.close()


async def test_its_book_is_kept_from_what_passes(started: Start, hub: ChannelHub) -> None:
    replica = await started(slots=2, inter_token_s=0.001)
    hint = RoutingHint(prefix_key(request(text="word " * 500)))
    await connect(hub, replica)
    asks = Asks(hub, PolicyOptions())

    async def asked() -> AskReply:
        async with asyncio.timeout(WITHIN_S):
            while not (replies := (await asks.ask("m", ["r"], Ask(VERSION, hint.key.rungs), 0.003)).replies):
                pass
        return replies["r"]

    before = await asked()
    assert (before.depth, before.ongoing) == (0, 0)
    items = replica.generate(encode(request(text="word " * 500, max_tokens=50)), hint, encode(ReturnAddress("x", 0)))
    async with aclosing(items):
        await anext(items)
        during = await asked()
        assert (during.depth, during.ongoing) == (len(hint.key.rungs), 1)
        assert during.generation == before.generation
    assert (await asked()).ongoing == 0
    stats = await replica.record_routing_stats()
    assert (stats["v"], stats["g"], stats["n"]) == (VERSION, before.generation, 0)


async def test_a_question_is_on_the_book_while_it_is_answered(started: Start) -> None:
    replica = await started()
    wanted = EmbeddingRequest("r1", "m", (TextPrompt("one two"),))
    assert decode_answer(wanted, [await replica.call(encode(wanted), HINT)])
    refused = Tokenize("r1", "m", ("text",))
    with pytest.raises(NotSupported):
        decode_answer(refused, [await replica.call(encode(refused), HINT)])
    assert (await replica.record_routing_stats())["n"] == 0


async def test_health_is_the_backends(started: Start) -> None:
    replica = await started()
    await replica.check_health()
    await replica.aclose()
    with pytest.raises(ServingError):
        await replica.check_health()


async def test_a_replica_that_closes_hands_over_what_runs(started: Start, hub: ChannelHub) -> None:
    """Over the channel: the last frame says that it stops, and nothing of what came before is missing."""
    replica = await started(tokens=10_000, inter_token_s=0.001)
    await connect(hub, replica)
    with hub.open() as inbox:
        call = asyncio.ensure_future(anext(generate(replica, request(), hub.gateway, inbox.stream)))
        frames = [await inbox.get() for _ in range(3)]
        await replica.aclose()
        async with asyncio.timeout(WITHIN_S):
            while not (frames[-1].events and isinstance(frames[-1].events[-1], Failed)):
                frames.append(await inbox.get())
        assert await call == HANDED_OVER
    failed = frames[-1].events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(ServingError.from_info(failed.error), ReplicaStopping)
    assert tokens(frames)


async def test_an_engine_that_died_is_unavailable_and_no_hand_over(started: Start) -> None:
    replica = await started()
    await replica._backend.aclose()
    (item,) = [item async for item in generate(replica, request())]
    assert type(error_of(item)) is Unavailable
