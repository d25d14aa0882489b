"""The shell around one backend in one Serve replica: requests in, frames out, over the step channel or by Serve.

Those that come over the channel Serve does not know of: they are counted, refused and waited for here.

It also keeps the book that routers ask for (`routing/tracker.py`), and answers them on the same connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, assert_never

import msgspec

from backends import create
from backends.answers import answer
from backends.base import BackendStats, ModelCard
from deployments import autoscaling
from deployments.bookkeeping import Book
from deployments.channel import ChannelAddress, ChannelServer, Count, GatewayLink, Leave, Order, ReturnAddress, Run
from deployments.held import Held, held
from deployments.routing.ask import VERSION
from deployments.routing.hint import RoutingHint, read_hint
from deployments.settings import HotSettings, ModelSettings
from deployments.watchdog import watch
from protocols.calls import AnswerT, ModelCall, Question
from protocols.errors import (
    BackendLost,
    ErrorInfo,
    InternalError,
    InvalidRequest,
    ReplicaStopping,
    ServingError,
    Unavailable,
)
from protocols.events import Failed, Frame
from protocols.request import Request
from protocols.sink import Sink, watched

logger = logging.getLogger(__name__)

_request = msgspec.msgpack.Decoder(Request)
_call: msgspec.msgpack.Decoder[ModelCall] = msgspec.msgpack.Decoder(ModelCall)
_address = msgspec.msgpack.Decoder(ReturnAddress)
_encoder = msgspec.msgpack.Encoder()
_frame = msgspec.msgpack.Decoder(Frame)

DRAINING = 2**31
"""The requests that a draining replica says it has: more than any may have, or Serve would offer it another at once."""
DRAIN_LOOK_S = 0.05
LAST_FRAMES_S = 2.0
"""How long a replica that closes waits for its streams to say so to their gateways."""

HANDED_OVER = b""
"""The one item of a handle stream whose frames all went over the step channel."""


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    """What a call is answered with: the answer, still encoded, or an error; and by which replica."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    error: ErrorInfo | None = None
    replica: str = ""


_reply = msgspec.msgpack.Decoder(_Reply)


class ReplicaMetadata(msgspec.Struct, frozen=True):
    """What a replica publishes once, when it is ready. Serve hands it to every router."""

    channel: ChannelAddress
    card: ModelCard
    routing_version: int = 0
    """Of the router's questions that it answers; 0: none."""
    prefill_rate: float = 0.0
    """About how many prompt tokens it computes per second."""

    def to_plain(self) -> dict[str, Any]:
        plain = msgspec.to_builtins(self)
        assert isinstance(plain, dict)
        return plain

    @staticmethod
    def from_plain(plain: object) -> ReplicaMetadata | None:
        """None for metadata of another version or another product: such a replica is reached by its handle only."""
        try:
            return msgspec.convert(plain, ReplicaMetadata)
        except msgspec.ValidationError:
            return None


def decode_frame(item: bytes) -> Frame:
    """An item of the handle stream, other than `HANDED_OVER`, as the frame it is."""
    return _frame.decode(item)


def decode_answer(call: Question[AnswerT], replies: Sequence[bytes]) -> AnswerT:
    """The answer in what `Replica.call` of those asked returned. Raises the `ServingError` that is there instead."""
    answers: list[tuple[str, AnswerT]] = []
    for reply in map(_reply.decode, replies):
        if reply.error is not None:
            raise ServingError.from_info(reply.error)
        answers.append((reply.replica, msgspec.msgpack.decode(reply.answer, type=call.answer_type())))
    return call.merged(answers)


class Replica:
    """Owns one backend. `generate` (where there is no `Run`) and `call` are what gateways call; the rest Serve does."""

    def __init__(self, settings: ModelSettings, node_ip: str, name: str = "") -> None:
        """`name` is how it is told from other replicas of its model."""
        self._name = name
        self._backend = create(settings.backend)
        self._node_ip = node_ip
        self._channel = ChannelServer()
        self._metadata: ReplicaMetadata | None = None
        self._settings = settings
        self._changed = settings
        self._watchdog: asyncio.Task[None] | None = None
        self._draining = False
        self._closing = False
        self._streams = 0
        self._called = 0  # by Serve
        self._runs: dict[tuple[GatewayLink, int], asyncio.Task[None]] = {}

    async def start(self) -> None:
        card = await self._backend.start()
        self._book = Book(card, self._backend.stats, self._settings.max_ongoing_requests)
        self._channel.on_aside = self._book.on_aside
        self._channel.on_order = self._on_order
        self._channel.on_lost = self._on_lost
        address = await self._channel.start(self._node_ip)
        self._metadata = ReplicaMetadata(address, card, VERSION, self._book.expected_rate)
        watching = watch(self._backend, lambda: self._changed.stall_timeout_s)
        self._watchdog = asyncio.get_running_loop().create_task(watching)

    def change(self, hot: HotSettings) -> None:
        """`hot` in place of what the settings and an earlier call say of the same. Names and defaults are the
        gateways' matter.
        """
        self._changed = self._settings.changed(hot)

    async def generate(self, request: bytes, hint: RoutingHint, to: bytes) -> AsyncGenerator[bytes, None]:
        """Runs `request` and sends its frames to `to`: over the channel if connected, else as this stream's items.

        `hint` is what the caller's router knows of it. Never raises for a request: a failure is the last frame.
        """
        address = _address.decode(to)
        link = self._channel.link(address.gateway) if address.stream else None
        entry = self._book.enter(hint)
        pushed = False
        async with self._counted(), aclosing(self._frames(_request.decode(request))) as frames, entry:
            async for frame in frames:
                entry.observe(frame)
                if link is not None and link.push(address.stream, frame):
                    pushed = True
                elif not pushed:
                    link = None  # if there was a connection, nothing can have been lost with it
                    yield _encoder.encode(frame)
                else:
                    # What was pushed before may be lost with the connection, so the stream cannot go on elsewhere.
                    yield _encoder.encode(_failed(BackendLost("The connection to the gateway was lost.")))
                    return
        if link is not None:
            yield HANDED_OVER

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        self._called += 1
        try:
            yield
        finally:
            self._called -= 1

    @property
    def _ongoing(self) -> int:
        """Requests, as routers are told: one that drains has more than any replica may have."""
        return DRAINING if self._draining else self._called + len(self._runs)

    def _on_order(self, link: GatewayLink, order: Order) -> None:
        match order:
            case Run(stream=stream):
                if self._ongoing >= order.limit:
                    link.push(stream, ~self._ongoing)
                    return
                run = self._runs[link, stream] = asyncio.get_running_loop().create_task(self._run(link, order))
                run.add_done_callback(lambda _: self._runs.pop((link, stream)))
                link.push(stream, self._ongoing)
            case Leave(stream=stream):
                if (left := self._runs.get((link, stream))) is not None:
                    left.cancel()
            case Count(stream=stream):
                link.push(stream, self._ongoing)
            case _:
                assert_never(order)

    def _on_lost(self, link: GatewayLink) -> None:
        for (of, _), run in self._runs.items():
            if of is link:
                run.cancel()

    async def _run(self, link: GatewayLink, run: Run) -> None:
        """As `generate`, over one connection from beginning to end."""
        name = "of another version"
        try:
            request = _request.decode(run.request)
            name = request.id
            async with self._book.enter(read_hint(run.hint)) as entry:
                sink = watched(partial(link.push, run.stream), entry.observe)
                async with aclosing(self._frames(request, sink)) as frames:
                    async for frame in frames:
                        entry.observe(frame)
                        link.push(run.stream, frame)
        except Exception as error:
            link.push(run.stream, _failed(_logged(error, name)))
        link.push(run.stream, self._ongoing)

    async def _frames(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        self._streams += 1
        try:
            async with aclosing(self._backend.generate(request, sink)) as frames:
                async for frame in frames:
                    yield frame
        except Exception as error:
            failure = _logged(error, request.id)
            if self._closing and isinstance(failure, Unavailable):
                failure = ReplicaStopping("The model's replica stops.")
            yield _failed(failure)
        finally:
            self._streams -= 1

    async def call(self, call: bytes, hint: RoutingHint) -> bytes:
        """Answers a `ModelCall`; `decode_answer` reads what it returns. Never raises for a call, as `generate`."""
        question = _call.decode(call)
        try:
            async with self._counted(), self._book.enter(hint):
                answered = _encoder.encode(await answer(self._backend, question))
            reply = _Reply(msgspec.Raw(answered), replica=self._name)
        except Exception as error:
            reply = _Reply(error=_logged(error, question.id).info, replica=self._name)
        return _encoder.encode(reply)

    def record_replica_metadata(self) -> dict[str, Any]:
        assert self._metadata is not None, "Serve asks for metadata only once the replica has started"
        return self._metadata.to_plain()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return autoscaling.report(self._backend.stats())  # async: a plain method Serve would call on another thread

    async def record_routing_stats(self) -> dict[str, Any]:
        """Not a plain function: Serve would run it in a thread."""
        return self._book.stats()

    async def check_health(self) -> None:
        await self._backend.check_health()

    def stats(self) -> BackendStats:
        return self._backend.stats()

    async def held(self) -> Held:
        """Not a plain function: Serve would run it in a thread."""
        return held(self._streams)

    async def aclose(self) -> None:
        """Serve has waited for its own calls; what came over the channel is waited for here, while Serve lets it live.

        What still runs is handed over: its clients notice nothing of it.
        """
        self._draining = True
        while self._runs:
            await asyncio.sleep(DRAIN_LOOK_S)
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._backend.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                while self._streams:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # what was pushed leaves in the next turn of the loop
        await self._channel.aclose()


def _logged(error: Exception, request_id: str) -> ServingError:
    """What the gateway is told. Of anything but a `ServingError` the traceback stays in this replica's log."""
    if not isinstance(error, ServingError):
        logger.error("request %s: the backend failed", request_id, exc_info=error)
        return InternalError(InternalError.PUBLIC_MESSAGE)
    if not isinstance(error, InvalidRequest):
        logger.warning("request %s: %s: %s", request_id, error.kind, error.message)
    return error


def _failed(error: ServingError) -> Frame:
    return Frame((Failed(error.info),))
