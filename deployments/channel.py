"""The step channel: tokens travel by engine step, not by request, and requests without a call of their own.

Each replica listens on a TCP port; each gateway keeps one connection to it. Everything the replica's streams produced
for one gateway within one turn of its event loop leaves as one write: coalesced by readiness, never by a timer.

    gateway -> replica   Hello (Run | Leave | Count | ToReplica)*
    replica -> gateway   (Envelope | ToGateway)*       each a 4-byte little-endian length and that many bytes of msgpack
    Hello                [secret, gateway id]
    Run, Leave, Count    a request for the stream that it names, its end, a question (`channel_call.py`)
    Envelope             [[stream id, Frame | number]*]
    ToReplica, ToGateway {…}                           what the router asks, and what it is answered (`routing/ask.py`)

The messages beside the frames are maps, so a message's first byte tells what it is. They are opaque here: whoever wants
them sets `on_aside`. What a reader does not understand of them it passes over; a bad envelope ends the connection.

Loss is seen at once: a broken connection fails the streams that ran over it. Nothing is re-sent; a stream that has
begun on a connection ends with it, so no frame can be missing in the middle. A replica that has no connection from
the calling gateway sends the same frames over Serve's handle stream instead (`replica.py`), into the same `Inbox`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Protocol, cast

import msgspec

from deployments.routing.connections import most_used
from protocols.errors import BackendLost, ClientTooSlow, ReplicaStopping, ServingError
from protocols.events import Failed, Finished, Frame, merged
from protocols.sink import Sink, is_middle

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
MAX_HELLO_BYTES = 1024
MAX_MESSAGE_BYTES = 64 * 2**20
"""Of anything that follows the hello."""
UNREAD_LIMIT_BYTES = 64 * 2**20
"""What a replica keeps for a gateway that does not read; past it the connection is cut."""

RECONNECT_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Waits between attempts to reach a replica that Serve lists; the last one repeats."""


class ChannelAddress(msgspec.Struct, frozen=True):
    """Where a replica listens, as published in its metadata."""

    host: str
    port: int
    secret: str
    takes_orders: bool = False
    """One of an earlier version does not, and would hang up."""


class ReturnAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's frames should go: the gateway, and the stream's number there."""

    gateway: str
    stream: int


class Run(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """A request, and what is known of it, both encoded; its frames go to `stream`.

    It is answered by a number before all frames: how many requests the replica has now, or the complement of it (`~n`)
    if those were `limit` already and it was not taken. A second number behind all frames says that it is over.
    """

    stream: int
    limit: int
    request: bytes
    hint: bytes


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="L"):
    """Nobody wants that stream's frames any more."""

    stream: int


class Count(msgspec.Struct, frozen=True, array_like=True, tag="C"):
    """How many requests the replica has: answered by that number, for a stream that there is not."""

    stream: int


Order = Run | Leave | Count

_NONE: Mapping[str, ChannelAddress] = {}
_NO_NODES: Mapping[str, str] = {}
_hello = msgspec.msgpack.Decoder(tuple[str, str])
_envelope = msgspec.msgpack.Decoder(list[tuple[int, Frame | int]])
_order: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_encoder = msgspec.msgpack.Encoder()


REVIEW_S = 10.0
"""How often it is looked at which replicas are used most, where not all can have a connection."""

BROKEN_S = 15.0
"""How long a replica whose connection broke is thought to have died, if Serve goes on listing it."""

MAX_UNSENT_BYTES = 64 * 2**10
"""A connection with more than that in its buffer is stuck, and is asked nothing more."""


def framed(message: object) -> bytearray:
    """`message` as it goes over a connection."""
    data = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, data, LENGTH_BYTES)
    data[:LENGTH_BYTES] = (len(data) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return data


def _is_aside(message: bytes) -> bool:
    """Whether it is a map of up to 15 entries, by its first byte."""
    return message[0] & 0xF0 == 0x80


class _Framed(asyncio.Protocol):
    """Length-prefixed messages over one connection."""

    max_bytes: int = 0
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def send(self, message: object) -> None:
        self.transport.write(framed(message))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            size = int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if size > self.max_bytes:
                logger.warning("channel: a message of %d bytes, at most %d are legal; closing", size, self.max_bytes)
                self.transport.abort()
                return
            end = start + LENGTH_BYTES + size
            if len(buffer) < end:
                break
            self.message_received(bytes(memoryview(buffer)[start + LENGTH_BYTES : end]))
            start = end
        del buffer[:start]

    def message_received(self, message: bytes) -> None:
        raise NotImplementedError


# --- replica side -----------------------------------------------------------------------------------------------------


class GatewayLink(_Framed):
    """A gateway's connection, seen from the replica. Frames pushed in one loop turn leave together."""

    max_bytes = MAX_HELLO_BYTES

    def __init__(self, server: ChannelServer) -> None:
        super().__init__()
        self._server = server
        self._pending: list[tuple[int, Frame | int]] = []
        self.gateway = ""
        self.open = False

    def message_received(self, message: bytes) -> None:
        if self.gateway and _is_aside(message):
            if self._server.on_aside is not None:
                self._server.on_aside(self, message)
            return
        if self.gateway and self._server.on_order is not None:
            self._take(message)
            return
        try:
            secret, gateway = _hello.decode(message)
        except msgspec.DecodeError:
            secret = gateway = ""
        if self.gateway or not hmac.compare_digest(secret.encode(), self._server.secret.encode()):
            logger.warning("channel: refused a connection that does not know this replica's secret")
            self.transport.abort()
            return
        self.gateway, self.open = gateway, True
        self.max_bytes = MAX_MESSAGE_BYTES
        self._server.attach(self)

    def _take(self, message: bytes) -> None:
        assert self._server.on_order is not None
        try:
            order = _order.decode(message)
        except msgspec.DecodeError:
            logger.warning("channel: gateway %s sent what is no order; closing", self.gateway)
            self.transport.abort()
            return
        self._server.on_order(self, order)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._pending.clear()
        self._server.detach(self)

    def push(self, stream: int, item: Frame | int) -> bool:
        """Queue `item` for this turn's write. False once the connection is gone: the stream must end with it."""
        if not self.open:
            return False
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((stream, item))
        return True

    def _flush(self) -> None:
        if not self.open:
            return
        if self.transport.get_write_buffer_size() > UNREAD_LIMIT_BYTES:
            logger.error("channel: gateway %s has not read %d bytes; cutting it off", self.gateway, UNREAD_LIMIT_BYTES)
            self.transport.abort()
            return
        self.send(self._pending)
        self._pending.clear()


class ChannelServer:
    """A replica's listening end."""

    def __init__(self) -> None:
        self.secret = secrets.token_urlsafe(24)
        self.on_aside: Callable[[GatewayLink, bytes], None] | None = None
        """Told of a gateway's messages beside its orders. Must not raise: that would end the connection."""
        self.on_order: Callable[[GatewayLink, Order], None] | None = None
        """Likewise told of its orders, which it may give if this was set before the start."""
        self.on_lost: Callable[[GatewayLink], None] | None = None
        self._links: dict[str, GatewayLink] = {}
        self._connected: set[GatewayLink] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> ChannelAddress:
        """Listen on a free port of `host`, the address other nodes reach this one at."""

        def connect() -> GatewayLink:
            link = GatewayLink(self)
            self._connected.add(link)
            return link

        self._server = await asyncio.get_running_loop().create_server(connect, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return ChannelAddress(host, port, self.secret, takes_orders=self.on_order is not None)

    def link(self, gateway: str) -> GatewayLink | None:
        """The connection of `gateway`, or None: then its frames go over the handle stream."""
        return self._links.get(gateway)

    def attach(self, link: GatewayLink) -> None:
        self._links[link.gateway] = link

    def detach(self, link: GatewayLink) -> None:
        self._connected.discard(link)
        if self.on_lost is not None:
            self.on_lost(link)
        if self._links.get(link.gateway) is link:
            del self._links[link.gateway]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            for link in list(self._connected):
                link.transport.close()
            await self._server.wait_closed()


# --- gateway side -----------------------------------------------------------------------------------------------------


class Inbox:
    """One stream's frames, wherever they come from. Bounded: a client that does not read fills its own inbox only.

    As a context manager it is open for the block; what arrives for it afterwards is dropped.
    """

    __slots__ = (
        "_error", "_frames", "_limit", "_many", "_of", "_unfinished", "_waiter", "cancel", "carried", "replica",
        "routed_to", "sink", "stream"
    )  # fmt: skip

    def __init__(self, stream: int, choices: int, limit: int, of: dict[int, Inbox] | None = None) -> None:
        """`of`: where whoever has something for a stream looks for it."""
        self.stream = stream
        self._of = {} if of is None else of
        self.replica: ReplicaLink | None = None
        self.routed_to = ""
        """The id of the replica that took the request, once Serve has said so."""
        self.carried = False
        """Whether its request went over `replica` too, which will say that it is over: nobody else will."""
        self.cancel: Callable[[], None] | None = None
        """Ends the request, for whoever has sent it."""
        self.sink: Sink | None = None
        """Gets what arrives while somebody waits in `get`, if it takes it."""
        self._unfinished = choices
        self._many = choices > 1
        self._limit = limit
        self._frames: list[Frame] = []  # an empty deque takes 700 bytes more
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Inbox:
        self._of[self.stream] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._of[self.stream]
        self.cancel = self.sink = None  # of somebody who knows this inbox
        if self.replica is not None:
            self.replica.forget(self)

    @property
    def ended(self) -> bool:
        """Whether the last event of the stream has arrived."""
        return self._unfinished <= 0

    @property
    def drained(self) -> bool:
        """Whether the last event of the stream has been read."""
        return self.ended and not self._frames

    def put(self, frame: Frame) -> None:
        self.add(frame)
        self.deliver()

    def add(self, frame: Frame) -> None:
        """As `put`, where more may come at once: nobody hears of it before `deliver`."""
        if self._error is not None or self._unfinished <= 0:
            return
        if len(self._frames) >= self._limit:
            self._frames.clear()
            if self.cancel is not None:
                self.cancel()  # nobody may come to `get` for a long time, and the engine should not wait for that
            self.fail(ClientTooSlow(f"The client has not read the last {self._limit} parts of its answer."))
            return
        self._frames.append(frame)
        if frame.events:  # terminal events are the last of their frame
            last = type(frame.events[-1])  # `isinstance` takes five times as long, for every token
            if last is Finished:
                self._unfinished -= 1
            elif last is Failed:
                self._unfinished = 0

    def deliver(self) -> None:
        frames, waiter = self._frames, self._waiter
        if waiter is None or not frames or waiter.done():
            return
        sink = self.sink
        middle = is_middle(frames[0]) if len(frames) == 1 else all(map(is_middle, frames))
        if sink is None or not middle or not self._sunk(sink):
            self._wake()

    def _sunk(self, sink: Sink) -> bool:
        """Whether `sink` has taken everything. What it raises, the reader raises: all share the connection."""
        frame = self._next()
        try:
            if sink(frame):
                return not self._frames
        except Exception as error:
            self._error = error
            return False
        self._frames.insert(0, frame)
        return False

    def fail(self, error: ServingError) -> None:
        """End the stream with `error`, after the frames that are already here."""
        if self._error is None and not self.ended:
            self._error = error
            self._wake()

    async def get(self) -> Frame:
        """The next frame; frames that waited are merged into one. Raises the error the stream failed with."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._next()

    def _next(self) -> Frame:
        if len(self._frames) == 1:
            return self._frames.pop()
        frames, self._frames = self._frames, []
        if self._many:
            choice = frames[0].choice
            count = next((at for at, frame in enumerate(frames) if frame.choice != choice), len(frames))
            frames, self._frames = frames[:count], frames[count:]
        return merged(frames)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Caller(Protocol):
    """Who sent an order, and is told what the replica says to it."""

    def told(self, number: int) -> None: ...

    def lost(self) -> None:
        """The connection is. Before its streams fail."""


class ReplicaLink(_Framed):
    """A connection to one replica, seen from the gateway."""

    max_bytes = MAX_MESSAGE_BYTES

    def __init__(self, hub: ChannelHub, address: ChannelAddress, lost: Callable[[], None]) -> None:
        super().__init__()
        self._hub = hub
        self._address = address
        self._lost = lost
        self._inboxes: set[Inbox] = set()
        self._callers: dict[int, Caller] = {}
        self._arrived: dict[Inbox, None] = {}

    @property
    def idle(self) -> bool:
        """Whether no stream runs over it, as far as is known here."""
        return not self._inboxes and not self._callers

    @property
    def takes_orders(self) -> bool:
        return self._address.takes_orders

    @property
    def stuck(self) -> bool:
        return self.transport.is_closing() or self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send((self._address.secret, self._hub.gateway))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        arrived, self._arrived = self._arrived, {}
        for inbox in arrived:  # of all messages at once: frames that came together leave together
            inbox.deliver()

    def message_received(self, message: bytes) -> None:
        if message[0] & 0xF0 == 0x80:  # `_is_aside`, written out: this is done for every step of every engine
            if self._hub.on_aside is not None:
                self._hub.on_aside(self, message)
            return
        inboxes = self._hub.inboxes
        for stream, item in _envelope.decode(message):
            if isinstance(item, int):
                if (caller := self._callers.get(stream)) is not None:
                    caller.told(item)
                continue
            inbox = inboxes.get(stream)
            if inbox is None:
                continue  # cancelled meanwhile
            if inbox.replica is None:
                self.bind(inbox)
            inbox.add(item)
            self._arrived[inbox] = None

    def order(self, order: Order, caller: Caller) -> None:
        """Sends it. Until `forget_caller`, what the replica says to it is told to `caller`."""
        self._callers[order.stream] = caller
        self.send(order)

    def forget_caller(self, stream: int) -> None:
        self._callers.pop(stream, None)

    def bind(self, inbox: Inbox) -> None:
        """From here on the stream ends with this connection."""
        inbox.replica = self
        self._inboxes.add(inbox)

    def forget(self, inbox: Inbox) -> None:
        self._inboxes.discard(inbox)

    def connection_lost(self, exc: Exception | None) -> None:
        callers, self._callers = self._callers, {}
        for caller in callers.values():
            caller.lost()
        self._fail_all(BackendLost("The connection to the model's replica was lost."))
        if self._hub.on_lost is not None:
            self._hub.on_lost(self)
        self._lost()

    def hand_over(self) -> None:
        """Ends the streams that are still open, for them to go on elsewhere."""
        if self._inboxes:
            logger.info("channel: %d streams leave a replica that stops", len(self._inboxes))
        self._fail_all(ReplicaStopping("The model's replica stops."))

    def _fail_all(self, error: ServingError) -> None:
        inboxes, self._inboxes = self._inboxes, set()
        for inbox in inboxes:
            inbox.fail(error)


class ChannelHub:
    """A gateway's connections to all replicas of all models, and the inboxes of its open streams."""

    def __init__(self, stream_buffer_frames: int, handover_after_s: float = 120.0, max_connections: int = 256) -> None:
        """With more than `max_connections` replicas, those that are used most get one."""
        self.gateway = secrets.token_urlsafe(9)
        self.loop = asyncio.get_running_loop()
        self.on_capacity: Callable[[str, int], None] | None = None
        """Told how many requests the replicas of a model can take, all together, whenever that changes."""
        self.on_aside: Callable[[ReplicaLink, bytes], None] | None = None
        """Told of a replica's messages beside the frames. Must not raise: that would end the connection."""
        self.on_lost: Callable[[ReplicaLink], None] | None = None
        self._limit = stream_buffer_frames
        self._handover_after_s = handover_after_s
        self._max_connections = max_connections
        self._streams = itertools.count(1)
        self.inboxes: dict[int, Inbox] = {}
        """The open streams, by their numbers."""
        self._keepers: dict[ChannelAddress, asyncio.Task[None]] = {}
        self._replicas: dict[str, dict[str, ChannelAddress]] = {}  # by model and id: those that Serve lists
        self._nodes: dict[str, dict[str, str]] = {}  # theirs, in the same way
        self._chosen: set[ChannelAddress] = set()  # of those, the ones to be connected to
        self._links: dict[ChannelAddress, ReplicaLink] = {}
        self._broken: dict[ChannelAddress, float] = {}  # until when
        self._uses: dict[ChannelAddress, float] = {}
        self._review: asyncio.TimerHandle | None = None

    def inbox(self, stream: int) -> Inbox | None:
        return self.inboxes.get(stream)

    @property
    def streams(self) -> int:
        """How many are open."""
        return len(self.inboxes)

    def next_stream(self) -> int:
        return next(self._streams)

    def open(self, choices: int = 1) -> Inbox:
        """An inbox for one stream of `choices` choices, to be entered."""
        return Inbox(self.next_stream(), choices, self._limit, self.inboxes)

    @property
    def connected(self) -> Set[ChannelAddress]:
        return self._links.keys()

    def link(self, model: str, replica: str) -> ReplicaLink | None:
        """The open connection to a replica, if there is one that can be written to."""
        address = self._replicas.get(model, _NONE).get(replica)
        link = None if address is None else self._links.get(address)
        return None if link is None or link.stuck else link

    def replicas(self) -> Mapping[str, Set[str]]:
        """The ids of each model's replicas."""
        return {model: addresses.keys() for model, addresses in self._replicas.items()}

    def node(self, model: str, replica: str) -> str:
        """The node that Serve says a listed replica is on; "" if it does not."""
        return self._nodes.get(model, _NO_NODES).get(replica, "")

    def reaches(self, node: str) -> bool:
        """Whether there is an open connection to a replica of `node`."""
        return any(
            address in self._links
            for model, addresses in self._replicas.items()
            for id_, address in addresses.items()
            if self.node(model, id_) == node
        )

    def broken(self, model: str) -> Set[str]:
        """Replicas that Serve lists and whose connection has just broken: they may be dead. From any thread."""
        if not self._broken:
            return frozenset()
        now, broken = self.loop.time(), dict(self._broken)
        return {id_ for id_, address in self._replicas.get(model, _NONE).items() if broken.get(address, 0.0) > now}

    def routed(self, stream: int, replica: str) -> None:
        """`replica` has taken the request whose frames go to `stream`. From any thread."""
        inbox = self.inboxes.get(stream)
        if inbox is not None:
            inbox.routed_to = replica

    def use(self, model: str, replicas: Iterable[str]) -> None:
        """These replicas are asked or given requests: they deserve a connection, if not all can have one."""
        if self._review is not None:
            addresses = self._replicas.get(model, _NONE)
            for id_ in replicas:
                if (address := addresses.get(id_)) is not None:
                    self._uses[address] = self._uses.get(address, 0.0) + 1.0

    def set_replicas(
        self,
        model: str,
        addresses: Mapping[str, ChannelAddress],
        capacity: int = 0,
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        """The replicas `model` has now, by replica id, and how many requests they take; on which nodes, by the same
        ids. From any thread.

        A replica that is not among them any more is gone, or finishes its streams to stop. Those that it has not
        finished after `handover_after_s` are taken from it.
        """
        self.loop.call_soon_threadsafe(self._set_replicas, model, dict(addresses), capacity, dict(nodes or {}))

    def _set_replicas(
        self, model: str, addresses: dict[str, ChannelAddress], capacity: int, nodes: dict[str, str]
    ) -> None:
        for address in set(self._replicas.get(model, _NONE).values()).difference(addresses.values()):
            self.loop.call_later(self._handover_after_s, self._hand_over, address)
            self._uses.pop(address, None)
            self._broken.pop(address, None)
        self._replicas[model], self._nodes[model] = addresses, nodes
        self._choose()
        if self.on_capacity is not None:
            self.on_capacity(model, capacity)

    def _choose(self) -> None:
        wanted = {address for addresses in self._replicas.values() for address in addresses.values()}
        self._chosen = most_used(wanted, self._links.keys(), self._uses, self._max_connections)
        for address in self._chosen - self._keepers.keys():
            self._keepers[address] = self.loop.create_task(self._keep_connected(address))
        if len(wanted) == len(self._chosen):
            if self._review is not None:
                self._review.cancel()
                self._review = None
            self._uses.clear()
            return
        # Some have a request, and no frame of it has come yet.
        busy = {inbox.routed_to for inbox in self.inboxes.values()}
        for addresses in self._replicas.values():
            for id_, address in addresses.items():
                link = None if address in self._chosen or id_ in busy else self._links.get(address)
                if link is not None and link.idle:
                    link.transport.close()
        if self._review is None:
            self._review = self.loop.call_later(REVIEW_S, self._review_connections)

    def _review_connections(self) -> None:
        self._review = None
        self._choose()
        self._uses = {address: uses / 2 for address, uses in self._uses.items() if uses > 0.1}

    def _hand_over(self, address: ChannelAddress) -> None:
        link = self._links.get(address)
        if link is not None and not self._is_wanted(address):
            link.hand_over()

    def _is_wanted(self, address: ChannelAddress) -> bool:
        return any(address in addresses.values() for addresses in self._replicas.values())

    async def _keep_connected(self, address: ChannelAddress) -> None:
        try:
            await self._reconnect_while_wanted(address)
        finally:
            self._keepers.pop(address, None)

    async def _reconnect_while_wanted(self, address: ChannelAddress) -> None:
        """A replica that drains leaves the list before its streams end: its connection is kept, but not renewed."""
        attempt = 0
        while address in self._chosen:
            lost = self.loop.create_future()

            def on_lost(lost: asyncio.Future[None] = lost) -> None:
                if not lost.done():
                    lost.set_result(None)

            link = ReplicaLink(self, address, on_lost)
            try:
                await self.loop.create_connection(lambda link=link: link, address.host, address.port)  # type: ignore[misc]
            except OSError as error:
                if attempt == 0:
                    logger.warning("channel: cannot reach %s:%d (%s)", address.host, address.port, error)
            else:
                connected_at = self.loop.time()
                self._links[address] = link
                self._broken.pop(address, None)
                try:
                    await lost
                    if address in self._chosen:
                        self._broken[address] = self.loop.time() + BROKEN_S
                finally:
                    if self.loop.time() - connected_at > RECONNECT_S[-1]:
                        attempt = 0  # it worked for a while; a replica that hangs up at once is not asked all the time
                    del self._links[address]
                    link.transport.abort()
            await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
            attempt += 1

    async def aclose(self) -> None:
        if self._review is not None:
            self._review.cancel()
        keepers, self._keepers = list(self._keepers.values()), {}
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


_hub: ChannelHub | None = None


def install_hub(hub: ChannelHub | None) -> None:
    """Make `hub` the one this process's routers report replicas to. Serve builds routers: nothing can be passed."""
    global _hub
    _hub = hub


def current_hub() -> ChannelHub | None:
    return _hub
