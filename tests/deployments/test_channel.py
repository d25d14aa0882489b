"""The step channel over real sockets: order, coalescing, loss, bounds. Every async test runs on both event loops."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from deployments import channel
from deployments.channel import ChannelAddress, ChannelHub, ChannelServer, GatewayLink, Inbox, ReplicaLink
from protocols.errors import BackendLost, ClientTooSlow, ErrorInfo, Overloaded, ReplicaStopping
from protocols.events import Failed, Frame, TextDelta
from tests.deployments.support import (
    HELLO,
    STARTED,
    WITHIN_S,
    events,
    eventually,
    finished,
    settle,
    text,
    tokens,
)

HOST = "127.0.0.1"
LIMIT = 1000


class CountingServer(ChannelServer):
    """Knows how often it was connected to."""

    def __init__(self) -> None:
        super().__init__()
        self.connections = 0

    def attach(self, link: GatewayLink) -> None:
        self.connections += 1
        super().attach(link)


@pytest.fixture(autouse=True)
def reconnect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "RECONNECT_S", (0.001,))


@pytest.fixture
async def server() -> AsyncIterator[CountingServer]:
    server = CountingServer()
    yield server
    await server.aclose()


@pytest.fixture
async def address(server: CountingServer) -> ChannelAddress:
    return await server.start(HOST)


@pytest.fixture
async def hub() -> AsyncIterator[ChannelHub]:
    hub = ChannelHub(LIMIT)
    yield hub
    await hub.aclose()


@pytest.fixture
async def link(server: CountingServer, address: ChannelAddress, hub: ChannelHub) -> GatewayLink:
    """The hub's connection to the server, seen from the server."""
    hub.set_replicas("m", {"r": address})
    return await linked(server, hub)


async def linked(server: ChannelServer, hub: ChannelHub) -> GatewayLink:
    await eventually(lambda: server.link(hub.gateway))
    link = server.link(hub.gateway)
    assert link is not None
    return link


async def get(inbox: Inbox) -> Frame:
    async with asyncio.timeout(WITHIN_S):
        return await inbox.get()


async def read_all(inbox: Inbox) -> list[Frame]:
    frames = []
    while not inbox.drained:
        frames.append(await get(inbox))
    return frames


def keepers() -> list[str]:
    names = [getattr(task.get_coro(), "__name__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name == "_keep_connected"]


def message(value: object) -> bytes:
    data = msgspec.msgpack.encode(value)
    return len(data).to_bytes(4, "little") + data


# --- frames -----------------------------------------------------------------------------------------------------------


async def test_frames_arrive_in_order(link: GatewayLink, hub: ChannelHub) -> None:
    sent = [STARTED, *(text(f"{i} ", i) for i in range(200)), finished()]
    with hub.open() as inbox:

        async def produce() -> None:
            for i, frame in enumerate(sent):
                assert link.push(inbox.stream, frame)
                if i % 7 == 0:
                    await asyncio.sleep(0)

        producing = asyncio.create_task(produce())
        received = await read_all(inbox)
        await producing
    assert events(received) == events(sent)
    assert tokens(received) == tokens(sent)


async def test_streams_do_not_mix(link: GatewayLink, hub: ChannelHub) -> None:
    with hub.open() as first, hub.open() as second:
        assert first.stream != second.stream
        for i in range(20):
            link.push(first.stream, text("a", i))
            link.push(second.stream, text("b", 100 + i))
        link.push(second.stream, finished())
        link.push(first.stream, finished())
        assert tokens(await read_all(first)) == list(range(20))
        assert tokens(await read_all(second)) == list(range(100, 120))


class RecordingTransport:
    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def envelopes(self) -> list[list[tuple[int, Frame]]]:
        """One per write. Fails unless every write is exactly one."""
        decoded = []
        for data in self.writes:
            assert int.from_bytes(data[:4], "little") == len(data) - 4
            decoded.append(msgspec.msgpack.decode(data[4:], type=list[tuple[int, Frame]]))
        return decoded


async def test_all_that_is_pushed_in_one_turn_is_one_write(link: GatewayLink, hub: ChannelHub) -> None:
    link.transport = recorded = RecordingTransport(link.transport)  # type: ignore[assignment]
    with hub.open() as first, hub.open() as second:
        pushed = [(first.stream, STARTED), (second.stream, STARTED), (first.stream, text("a", 1)), (77, text("b", 2))]
        for stream, frame in pushed:
            link.push(stream, frame)
        assert recorded.writes == []
        await asyncio.sleep(0)
        assert recorded.envelopes() == [pushed]
        link.push(second.stream, finished())
        await asyncio.sleep(0)
        assert recorded.envelopes() == [pushed, [(second.stream, finished())]]
        await read_all(second)


async def test_a_stream_nobody_waits_for_is_ignored(link: GatewayLink, hub: ChannelHub) -> None:
    with hub.open() as cancelled:
        pass
    with hub.open() as inbox:
        for stream in (cancelled.stream, 4711, inbox.stream):
            for frame in HELLO:
                link.push(stream, frame)
        assert events(await read_all(inbox)) == events(HELLO)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 10_000])
async def test_bytes_may_arrive_split_anywhere(hub: ChannelHub, size: int) -> None:
    link = ReplicaLink(hub, ChannelAddress(HOST, 1, "s"), lambda: None)
    with hub.open() as inbox:
        wire = b"".join(message([(inbox.stream, frame)]) for frame in HELLO)
        for start in range(0, len(wire), size):
            link.data_received(wire[start : start + size])
        assert events(await read_all(inbox)) == events(HELLO)


async def test_a_stream_that_is_over_is_not_kept(link: GatewayLink, hub: ChannelHub) -> None:
    """A connection lives for days: what it kept of every stream would add up."""
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        replica = inbox.replica
        assert replica is not None
        assert replica._inboxes == {inbox}
    assert replica._inboxes == set()
    assert hub.inbox(inbox.stream) is None


# --- who may connect --------------------------------------------------------------------------------------------------


async def closed_by_peer(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(WITHIN_S):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


@pytest.mark.parametrize("hello", [("wrong", "gateway"), ("", "gateway"), ["only one"], {"a": 1}, ("é", "gateway")])
async def test_a_gateway_without_the_secret_is_refused(
    server: ChannelServer, address: ChannelAddress, hello: object, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(message(hello))
    assert await closed_by_peer(reader)
    writer.close()
    assert server.link("gateway") is None
    assert "refused a connection" in caplog.text
    assert server.secret not in caplog.text


async def test_a_gateway_with_the_secret_is_known_by_its_id(server: ChannelServer, address: ChannelAddress) -> None:
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(message((address.secret, "g1")))
    await eventually(lambda: server.link("g1"))
    assert server.link("g2") is None
    writer.close()
    await eventually(lambda: server.link("g1") is None)
    assert await closed_by_peer(reader)


async def test_a_second_hello_closes_the_connection(server: ChannelServer, address: ChannelAddress) -> None:
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write(message((address.secret, "g1")) + message((address.secret, "g2")))
    assert await closed_by_peer(reader)
    writer.close()
    await eventually(lambda: server.link("g1") is None)
    assert server.link("g2") is None


async def test_a_gateway_that_comes_back_before_its_old_connection_is_gone_stays_known(
    server: ChannelServer, address: ChannelAddress
) -> None:
    (_, old), (_, new) = [await asyncio.open_connection(HOST, address.port) for _ in range(2)]
    old.write(message((address.secret, "g1")))
    await eventually(lambda: server.link("g1"))
    first = server.link("g1")
    assert first is not None
    new.write(message((address.secret, "g1")))
    await eventually(lambda: server.link("g1") is not first)
    old.close()
    await eventually(lambda: not first.open)
    second = server.link("g1")
    assert second is not None and second.open
    new.close()
    await eventually(lambda: not second.open)


async def test_every_server_has_a_secret_of_its_own() -> None:
    secrets = {ChannelServer().secret for _ in range(10)}
    assert len(secrets) == 10
    assert min(map(len, secrets)) >= 32


async def test_a_hello_that_claims_to_be_huge_closes_the_connection(
    server: ChannelServer, address: ChannelAddress
) -> None:
    reader, writer = await asyncio.open_connection(HOST, address.port)
    writer.write((channel.MAX_HELLO_BYTES + 1).to_bytes(4, "little"))
    assert await closed_by_peer(reader)
    writer.close()


class RawReplica:
    """A replica whose every byte the test decides on."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def start(self) -> ChannelAddress:
        self._server = await asyncio.start_server(lambda r, w: self.connections.put_nowait((r, w)), HOST, 0)
        return ChannelAddress(HOST, self._server.sockets[0].getsockname()[1], "s")

    async def accept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, tuple[str, str]]:
        async with asyncio.timeout(WITHIN_S):
            reader, writer = await self.connections.get()
            size = int.from_bytes(await reader.readexactly(4), "little")
            return reader, writer, msgspec.msgpack.decode(await reader.readexactly(size), type=tuple[str, str])

    def stop(self) -> None:
        self._server.close()


@pytest.fixture
async def raw() -> AsyncIterator[RawReplica]:
    raw = RawReplica()
    yield raw
    raw.stop()


@pytest.mark.parametrize(
    "garbage",
    [(channel.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"), message("no envelope"), message([[1, "no frame"]])],
    ids=["oversize", "no envelope", "no frame"],
)
async def test_a_replica_that_sends_garbage_is_a_lost_replica(
    raw: RawReplica, hub: ChannelHub, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    # An exception in a protocol reaches the loop's handler, which logs it and closes the connection.
    hub.set_replicas("m", {"r": await raw.start()})
    reader, writer, (secret, gateway) = await raw.accept()
    assert (secret, gateway) == ("s", hub.gateway)
    with hub.open() as inbox:
        writer.write(message([(inbox.stream, STARTED)]))
        assert await get(inbox) == STARTED
        writer.write(garbage)
        with pytest.raises(BackendLost):
            await get(inbox)
    assert await closed_by_peer(reader)
    writer.close()
    hub.set_replicas("m", {})
    await settle()


# --- loss -------------------------------------------------------------------------------------------------------------


async def test_a_lost_connection_fails_its_streams_after_what_had_arrived(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer
) -> None:
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        link.push(inbox.stream, text("Hel", 1))
        await eventually(lambda: inbox.replica)
        link.transport.abort()
        await eventually(lambda: server.link(hub.gateway) not in (None, link))  # the hub has seen it: it is back
        arrived = await get(inbox)
        assert events([arrived]) == events([STARTED, text("Hel", 1)])
        for _ in range(2):
            with pytest.raises(BackendLost):
                await get(inbox)


async def test_a_waiting_reader_learns_of_the_loss(link: GatewayLink, hub: ChannelHub) -> None:
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        reading = asyncio.create_task(get(inbox))
        await settle()
        link.transport.abort()
        with pytest.raises(BackendLost):
            await reading


async def test_a_lost_connection_leaves_other_streams_alone(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer
) -> None:
    """A stream that has had nothing over a connection does not depend on it; one that is over is not undone."""
    with hub.open() as bound, hub.open() as over, hub.open() as elsewhere:
        link.push(bound.stream, STARTED)
        for frame in HELLO:
            link.push(over.stream, frame)
        await get(bound)
        await eventually(lambda: over.ended)
        link.transport.abort()
        with pytest.raises(BackendLost):
            await get(bound)
        assert events(await read_all(over)) == events(HELLO)
        for frame in HELLO:
            elsewhere.put(frame)
        assert events(await read_all(elsewhere)) == events(HELLO)


async def test_nothing_can_be_pushed_into_a_lost_connection(link: GatewayLink, hub: ChannelHub) -> None:
    with hub.open() as inbox:
        assert link.push(inbox.stream, STARTED)
        await get(inbox)
        link.transport.abort()
        await eventually(lambda: not link.open)
        assert not link.push(inbox.stream, text("a"))


async def test_a_stream_never_continues_on_a_second_connection(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer
) -> None:
    """Nothing may be missing in the middle: the replica holds on to the connection it began on."""
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        link.transport.abort()
        await eventually(lambda: server.link(hub.gateway) not in (None, link))
        again = await linked(server, hub)
        assert not link.push(inbox.stream, text("lost"))
        again.push(inbox.stream, text("late"))
        with hub.open() as fresh:
            again.push(fresh.stream, STARTED)
            assert await get(fresh) == STARTED
        with pytest.raises(BackendLost):
            await get(inbox)


async def test_a_gateway_that_does_not_read_is_cut_off(
    server: ChannelServer, address: ChannelAddress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "UNREAD_LIMIT_BYTES", 2**20)
    lazy = socket.create_connection((HOST, address.port))
    try:
        lazy.sendall(message((address.secret, "lazy")))
        await eventually(lambda: server.link("lazy"))
        link = server.link("lazy")
        assert link is not None
        for _ in range(64):
            if not link.push(1, text("x" * 2**20)):
                break
            await settle()
        assert not link.open
        assert server.link("lazy") is None
        assert "lazy has not read" in caplog.text
    finally:
        lazy.close()


# --- which replicas the hub connects to -------------------------------------------------------------------------------


async def test_the_hub_reconnects_while_the_replica_is_listed(
    link: GatewayLink, hub: ChannelHub, server: CountingServer
) -> None:
    for round_ in range(2, 5):
        link.transport.abort()
        await eventually(lambda round_=round_: server.connections == round_)  # type: ignore[misc]
        link = await linked(server, hub)


async def test_the_hub_does_not_reconnect_to_a_replica_that_is_not_listed(
    link: GatewayLink, hub: ChannelHub, server: CountingServer
) -> None:
    hub.set_replicas("m", {})
    await settle()
    link.transport.abort()
    await eventually(lambda: not keepers())
    assert server.connections == 1
    assert not hub.connected


async def test_the_hub_waits_for_a_replica_that_does_not_listen_yet(
    hub: ChannelHub, server: CountingServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    hub.set_replicas("m", {"r": ChannelAddress(HOST, port, server.secret)})
    await eventually(lambda: "cannot reach" in caplog.text)
    listening = await asyncio.get_running_loop().create_server(lambda: GatewayLink(server), HOST, port)
    await linked(server, hub)
    assert caplog.text.count("cannot reach") == 1
    listening.close()


async def test_a_replica_that_never_listens_is_given_up_once_it_is_not_listed(hub: ChannelHub) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        address = ChannelAddress(HOST, probe.getsockname()[1], "s")
    hub.set_replicas("m", {"r": address})
    await eventually(keepers)
    hub.set_replicas("m", {})
    await eventually(lambda: not keepers())


async def test_a_draining_replica_finishes_its_streams(link: GatewayLink, hub: ChannelHub) -> None:
    """It leaves the list before its streams end."""
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        hub.set_replicas("m", {})
        await settle()
        for frame in HELLO[1:]:
            assert link.push(inbox.stream, frame)
            await asyncio.sleep(0)
        assert events(await read_all(inbox)) == events(HELLO[1:])


async def test_what_a_draining_replica_has_not_finished_is_taken_from_it(
    server: CountingServer, address: ChannelAddress
) -> None:
    hub = ChannelHub(LIMIT, handover_after_s=0.01)
    hub.set_replicas("m", {"r": address})
    link = await linked(server, hub)
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        hub.set_replicas("m", {})
        with pytest.raises(ReplicaStopping):
            await get(inbox)
    await hub.aclose()


async def test_a_replica_that_comes_back_in_time_keeps_its_streams(
    server: CountingServer, address: ChannelAddress
) -> None:
    hub = ChannelHub(LIMIT, handover_after_s=0.02)
    hub.set_replicas("m", {"r": address})
    link = await linked(server, hub)
    with hub.open() as inbox:
        link.push(inbox.stream, STARTED)
        await get(inbox)
        hub.set_replicas("m", {})
        await settle()
        hub.set_replicas("m", {"r": address})
        await asyncio.sleep(0.05)
        for frame in HELLO[1:]:
            link.push(inbox.stream, frame)
        assert events(await read_all(inbox)) == events(HELLO[1:])
    await hub.aclose()


async def test_who_asks_is_told_what_the_replicas_can_take(hub: ChannelHub, address: ChannelAddress) -> None:
    told: list[tuple[str, int]] = []
    hub.on_capacity = lambda model, capacity: told.append((model, capacity))
    hub.set_replicas("m", {"r": address}, 10)
    hub.set_replicas("m", {}, 0)
    await eventually(lambda: len(told) == 2)
    assert told == [("m", 10), ("m", 0)]


async def test_a_node_is_reached_while_a_replica_there_is(
    link: GatewayLink, hub: ChannelHub, address: ChannelAddress
) -> None:
    elsewhere = ChannelAddress("127.0.0.1", 1, "secret")
    hub.set_replicas("m", {"r": address, "s": elsewhere}, 10, {"r": "node a", "s": "node b"})
    await settle()
    assert (hub.node("m", "r"), hub.node("m", "s"), hub.node("m", "t"), hub.node("n", "r")) == (
        "node a",
        "node b",
        "",
        "",
    )
    assert hub.reaches("node a")
    assert not hub.reaches("node b")
    hub.set_replicas("m", {}, 0)
    await settle()
    assert not hub.reaches("node a"), "it is not known any more what is there"


async def test_a_replica_that_is_listed_again_keeps_its_one_connection(
    link: GatewayLink, hub: ChannelHub, server: CountingServer, address: ChannelAddress
) -> None:
    hub.set_replicas("m", {})
    await settle()
    hub.set_replicas("m", {"r": address})
    await settle()
    assert len(keepers()) == 1
    link.transport.abort()
    await eventually(lambda: server.connections == 2)
    await settle()
    assert len(keepers()) == 1
    assert server.connections == 2
    assert hub.connected == {address}


async def test_models_do_not_take_each_others_replicas_away(
    link: GatewayLink, hub: ChannelHub, address: ChannelAddress
) -> None:
    other = CountingServer()
    try:
        hub.set_replicas("other", {"r": await other.start(HOST)})
        await linked(other, hub)
        hub.set_replicas("other", {})
        await settle()
        assert link.open
        link.transport.abort()
        await eventually(lambda: not link.open)
        await eventually(lambda: address in hub.connected)
    finally:
        await other.aclose()


async def test_replicas_may_be_set_from_another_thread(
    hub: ChannelHub, server: ChannelServer, address: ChannelAddress
) -> None:
    await asyncio.to_thread(hub.set_replicas, "m", {"r": address})
    await linked(server, hub)


async def test_closing_the_hub_closes_its_connections(
    link: GatewayLink, hub: ChannelHub, address: ChannelAddress
) -> None:
    await hub.aclose()
    await eventually(lambda: not link.open)
    assert not keepers()
    assert not hub.connected


async def test_closing_the_hub_also_closes_connections_to_draining_replicas(link: GatewayLink, hub: ChannelHub) -> None:
    hub.set_replicas("m", {})
    await settle()
    await hub.aclose()
    await eventually(lambda: not link.open)
    assert not keepers()


async def test_closing_the_server_closes_its_connections(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer, address: ChannelAddress
) -> None:
    async with asyncio.timeout(WITHIN_S):
        await server.aclose()
    await eventually(lambda: not link.open)
    with pytest.raises(OSError):
        await asyncio.open_connection(HOST, address.port)


async def test_two_gateways_of_one_replica_are_told_apart(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer, address: ChannelAddress
) -> None:
    second = ChannelHub(LIMIT)
    try:
        assert second.gateway != hub.gateway
        second.set_replicas("m", {"r": address})
        other = await linked(server, second)
        with hub.open() as inbox, second.open() as same_number:
            assert inbox.stream == same_number.stream
            other.push(same_number.stream, text("second", 2))
            link.push(inbox.stream, text("first", 1))
            assert tokens([await get(inbox)]) == [1]
            assert tokens([await get(same_number)]) == [2]
    finally:
        await second.aclose()


# --- messages beside the frames, and who has a connection -----------------------------------------------------


async def test_messages_beside_the_frames_pass_both_ways(
    link: GatewayLink, hub: ChannelHub, server: ChannelServer
) -> None:
    heard: list[tuple[str, object]] = []
    server.on_aside = lambda _, data: heard.append(("replica", msgspec.msgpack.decode(data)))
    hub.on_aside = lambda _, data: heard.append(("gateway", msgspec.msgpack.decode(data)))
    await send_beside_a_frame(link, hub)
    await eventually(lambda: len(heard) == 2)
    assert sorted(heard, key=str) == [("gateway", {"number": 2}), ("replica", {"number": 1})]


async def send_beside_a_frame(link: GatewayLink, hub: ChannelHub) -> None:
    there = hub.link("m", "r")
    assert there is not None
    there.send({"number": 1})
    link.send({"number": 2})
    with hub.open() as inbox:
        link.push(inbox.stream, text("a", 1))
        assert tokens([await get(inbox)]) == [1]


async def test_messages_nobody_wants_are_passed_over(link: GatewayLink, hub: ChannelHub) -> None:
    await send_beside_a_frame(link, hub)
    assert link.open


async def test_a_connection_is_found_by_model_and_replica(link: GatewayLink, hub: ChannelHub) -> None:
    assert hub.link("m", "r") is not None
    assert hub.link("m", "other") is hub.link("other", "r") is None
    assert {model: set(ids) for model, ids in hub.replicas().items()} == {"m": {"r"}}
    hub.set_replicas("m", {})
    await settle()
    assert hub.link("m", "r") is None, "who is not listed is asked nothing, though its streams go on"


async def test_a_replica_whose_connection_broke_may_be_dead_until_it_is_back(
    link: GatewayLink, hub: ChannelHub, server: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.broken("m") == set()
    monkeypatch.setattr(channel, "RECONNECT_S", (0.05,))
    link.transport.abort()
    await eventually(lambda: hub.broken("m") == {"r"})
    assert hub.broken("other") == set()
    await eventually(lambda: server.connections == 2)
    await eventually(lambda: hub.broken("m") == set())


async def test_a_replica_is_not_thought_dead_for_long(
    link: GatewayLink, hub: ChannelHub, server: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve lists it still, so its connection only cannot be made again."""
    monkeypatch.setattr(channel, "BROKEN_S", 0.1)
    monkeypatch.setattr(channel, "RECONNECT_S", (WITHIN_S,))
    link.transport.abort()
    await eventually(lambda: hub.broken("m") == {"r"})
    await eventually(lambda: hub.broken("m") == set())
    assert server.connections == 1


async def test_a_replica_that_leaves_is_not_broken(link: GatewayLink, hub: ChannelHub) -> None:
    hub.set_replicas("m", {})
    await settle()
    link.transport.abort()
    await eventually(lambda: not hub.connected)
    assert hub.broken("m") == set()


async def test_the_stream_learns_which_replica_took_its_request(hub: ChannelHub) -> None:
    with hub.open() as inbox:
        hub.routed(inbox.stream, "r")
        assert inbox.routed_to == "r"
    hub.routed(inbox.stream, "late")
    assert inbox.routed_to == "r"


@pytest.fixture
async def servers() -> AsyncIterator[dict[str, CountingServer]]:
    servers = {name: CountingServer() for name in "abcd"}
    yield servers
    for server in servers.values():
        await server.aclose()


@pytest.fixture
async def small_hub(servers: dict[str, CountingServer]) -> AsyncIterator[ChannelHub]:
    """With connections for two of its four replicas."""
    hub = ChannelHub(LIMIT, max_connections=2)
    hub.set_replicas("m", {name: await server.start(HOST) for name, server in servers.items()})
    await eventually(lambda: len(hub.connected) == 2)
    yield hub
    await hub.aclose()


def connected(hub: ChannelHub) -> set[str]:
    return {name for name in "abcd" if hub.link("m", name) is not None}


async def test_no_more_replicas_are_connected_to_than_there_may_be(
    small_hub: ChannelHub, servers: dict[str, CountingServer]
) -> None:
    await settle()
    assert sum(server.connections for server in servers.values()) == 2
    assert len(connected(small_hub)) == 2


async def test_those_that_are_used_get_the_connections(
    small_hub: ChannelHub, servers: dict[str, CountingServer]
) -> None:
    wanted = {*"abcd"} - connected(small_hub)
    small_hub.use("m", wanted)
    small_hub.use("m", ["unknown"])
    small_hub.use("unknown", wanted)
    small_hub._review_connections()
    await eventually(lambda: connected(small_hub) == wanted)
    assert small_hub.broken("m") == set(), "what is closed on purpose is not broken"
    await eventually(lambda: len(keepers()) == 2)


async def test_a_connection_with_streams_is_kept_until_they_end(
    small_hub: ChannelHub, servers: dict[str, CountingServer]
) -> None:
    busy, idle = connected(small_hub)
    wanted = {*"abcd"} - {busy, idle}
    with small_hub.open() as inbox:
        link = await linked(servers[busy], small_hub)
        link.push(inbox.stream, text("a", 1))
        await get(inbox)
        small_hub.use("m", wanted)
        small_hub._review_connections()
        await eventually(lambda: connected(small_hub) == {busy, *wanted})
        link.push(inbox.stream, finished())
        assert (await get(inbox)) == finished()
    small_hub._review_connections()
    await eventually(lambda: connected(small_hub) == wanted)


async def test_a_connection_is_kept_for_a_request_whose_first_frame_has_not_come(
    small_hub: ChannelHub, servers: dict[str, CountingServer]
) -> None:
    busy, idle = connected(small_hub)
    wanted = {*"abcd"} - {busy, idle}
    with small_hub.open() as inbox:
        small_hub.routed(inbox.stream, busy)
        small_hub.use("m", wanted)
        small_hub._review_connections()
        await eventually(lambda: connected(small_hub) == {busy, *wanted})


async def test_a_lost_place_goes_to_another_replica(small_hub: ChannelHub, servers: dict[str, CountingServer]) -> None:
    gone, _ = connected(small_hub)
    left = {name: address for name, address in small_hub._replicas["m"].items() if name != gone}
    small_hub.set_replicas("m", left)
    await eventually(lambda: len(connected(small_hub)) == 2)
    small_hub.set_replicas("m", dict(list(left.items())[:2]))
    await eventually(lambda: small_hub._review is None)


def test_the_installed_hub_is_the_current_one() -> None:
    assert channel.current_hub() is None
    hub = object()
    channel.install_hub(hub)  # type: ignore[arg-type]
    try:
        assert channel.current_hub() is hub
    finally:
        channel.install_hub(None)
    assert channel.current_hub() is None


# --- inbox ------------------------------------------------------------------------------------------------------------


async def test_frames_that_waited_are_merged_into_one() -> None:
    inbox = Inbox(1, choices=1, limit=LIMIT)
    for frame in HELLO:
        inbox.put(frame)
    merged = await get(inbox)
    assert merged.events == (*STARTED.events, TextDelta("Hello"), *finished().events)
    assert merged.tokens == (1, 2)
    assert inbox.drained


async def test_a_frame_that_did_not_wait_is_passed_on_as_it_is() -> None:
    inbox = Inbox(1, choices=1, limit=LIMIT)
    for frame in HELLO:
        inbox.put(frame)
        assert await get(inbox) is frame


async def test_frames_of_different_choices_are_not_merged() -> None:
    inbox = Inbox(1, choices=2, limit=LIMIT)
    for frame in [text("a", 1), text("b", 2), text("x", 3, choice=1), text("y", 4, choice=1), text("c", 5)]:
        inbox.put(frame)
    merged = [await get(inbox) for _ in range(3)]
    assert [(frame.choice, frame.tokens) for frame in merged] == [(0, (1, 2)), (1, (3, 4)), (0, (5,))]
    assert all(event.choice == frame.choice for frame in merged for event in frame.events)


async def test_a_stream_of_two_choices_ends_after_both() -> None:
    inbox = Inbox(1, choices=2, limit=LIMIT)
    inbox.put(STARTED)
    inbox.put(finished(choice=1))
    assert not inbox.ended
    inbox.put(text("a", 1))
    inbox.put(finished(choice=0))
    assert inbox.ended
    assert not inbox.drained
    assert len(events(await read_all(inbox))) == 4


async def test_a_failure_ends_all_choices() -> None:
    inbox = Inbox(1, choices=2, limit=LIMIT)
    failed = Frame((Failed(ErrorInfo("internal", "no")),))
    inbox.put(failed)
    assert inbox.ended
    assert await get(inbox) == failed
    assert inbox.drained


async def test_nothing_follows_the_end() -> None:
    inbox = Inbox(1, choices=1, limit=LIMIT)
    inbox.put(finished())
    inbox.put(text("late", 9))
    inbox.fail(BackendLost("late"))
    assert tokens(await read_all(inbox)) == []


async def test_a_client_that_does_not_read_is_cut_off_at_the_limit() -> None:
    inbox = Inbox(1, choices=1, limit=3)
    for i in range(3):
        inbox.put(text("a", i))
    inbox.put(text("one too many", 3))
    with pytest.raises(ClientTooSlow, match="last 3"):
        await get(inbox)
    inbox.put(text("later", 4))
    with pytest.raises(ClientTooSlow):
        await get(inbox)


async def test_a_client_that_reads_is_never_cut_off() -> None:
    inbox = Inbox(1, choices=1, limit=3)
    for i in range(100):
        for _ in range(3):
            inbox.put(text("a", i))
        assert (await get(inbox)).tokens == (i, i, i)


async def test_one_slow_client_leaves_the_others_of_its_connection_alone(
    server: ChannelServer, address: ChannelAddress
) -> None:
    hub = ChannelHub(stream_buffer_frames=5)
    try:
        hub.set_replicas("m", {"r": address})
        link = await linked(server, hub)
        with hub.open() as slow, hub.open() as quick:
            received = []
            for i in range(20):
                link.push(slow.stream, text("a", i))
                link.push(quick.stream, text("b", i))
                received.append(await get(quick))
            assert tokens(received) == list(range(20))
            with pytest.raises(ClientTooSlow):
                await get(slow)
    finally:
        await hub.aclose()


async def test_the_first_failure_counts() -> None:
    inbox = Inbox(1, choices=1, limit=LIMIT)
    inbox.put(STARTED)
    inbox.fail(Overloaded("first"))
    inbox.fail(BackendLost("second"))
    inbox.put(text("late"))
    assert await get(inbox) == STARTED
    with pytest.raises(Overloaded, match="first"):
        await get(inbox)


async def test_a_read_that_is_given_up_loses_nothing() -> None:
    inbox = Inbox(1, choices=1, limit=LIMIT)
    reading = asyncio.create_task(inbox.get())
    await settle()
    reading.cancel()
    inbox.put(text("a", 1))
    await asyncio.gather(reading, return_exceptions=True)
    inbox.put(text("b", 2))
    received = [] if reading.cancelled() else [reading.result()]
    received.append(await get(inbox))
    assert tokens(received) == [1, 2]


async def test_a_frame_without_events_is_delivered() -> None:
    """Tokens whose text is held back still have to be known to whoever resumes the stream."""
    inbox = Inbox(1, choices=1, limit=LIMIT)
    inbox.put(Frame((), (7,)))
    assert (await get(inbox)).tokens == (7,)
    assert not inbox.ended


async def test_a_log_line_never_holds_text(
    link: GatewayLink, hub: ChannelHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "deployments")
    with hub.open() as inbox:
        link.push(inbox.stream, Frame((TextDelta("private words"),), (1,)))
        await get(inbox)
        link.transport.abort()
        with pytest.raises(BackendLost):
            await get(inbox)
    assert "private words" not in caplog.text
