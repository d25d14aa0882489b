"""From a request to its frames through Serve: find the model, wait for a place, call a replica, go on elsewhere.

Control goes through a Serve handle call (routing, admission, accounting, cancellation); how the request travels is the
router's matter (`channel_call.py`). Tokens come over the step channel, or as the call's items where the channel is not
connected. Both end in one `Inbox`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from deployments import ray_compat, request_log
from deployments.admission import Lines
from deployments.asks import Asks
from deployments.catalog import Catalog
from deployments.channel import ChannelHub, Inbox, ReturnAddress
from deployments.failover import Journey, pause_after
from deployments.fan_out import side_by_side
from deployments.models import ModelEntry
from deployments.replica import HANDED_OVER, decode_answer, decode_frame
from deployments.routing.hint import UNKNOWN, RoutingHint
from deployments.routing.key import PrefixKey, bare_key, prefix_key
from deployments.settings import MODEL_DEPLOYMENT, GatewaySettings
from protocols.calls import AnswerT, EmbeddingRequest, Question, RerankRequest
from protocols.errors import (
    BackendLost,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.events import Failed, Frame, Started
from protocols.request import ChatPrompt, Request
from protocols.sink import Sink, watched

logger = logging.getLogger(__name__)

T = TypeVar("T")

GRPC_REQUEST_LIMIT_BYTES = 3 * 2**20
"""gRPC's own cap is 4 MiB unless every node was started with a higher one: larger requests go by the object store."""

_ANSWER_GROWTH = 8
"""An answer has at most so many times the bytes of its question."""

NODE_LOSS_KNOWN_S = 20.0
"""After how long Ray's control store has noticed at the latest that a node is gone: five missed checks, every 3 s."""
NODE_LOOK_EVERY_S = 2.0
"""Longer than it takes the processes of a node to end after the one that manages it."""

LOOK_EVERY_S = 1.0
"""How often a request that waits for its first frame looks whether one can be expected at all."""

INLINE_KEY_BYTES = 8 * 2**20
INLINE_KEY_MESSAGES = 2000
"""Of a larger request the key is made in a thread: it would take the event loop a millisecond or two. Below, a thread
takes longer than the key does: 0.1 ms for a megabyte, 0.8 us for each message.
"""

_COMPUTED = (EmbeddingRequest, RerankRequest)
"""Questions that an engine has to compute tokens for."""

LATE_FRAMES_S = 5.0
"""How long the last frames may trail the handle's acknowledgement: they are two connections."""

_encoder = msgspec.msgpack.Encoder()


class _Trip:
    """What is kept of a request while it goes from replica to replica: its key, those that were lost, its last moment.

    `deadline` is of the loop's clock; `node` is where the last one that was lost had been.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.key: PrefixKey | None = None
        self.lost: list[str] = []
        self.node = ""


async def _key(request: Request, payload_bytes: int) -> PrefixKey:
    messages = len(request.prompt.messages) if isinstance(request.prompt, ChatPrompt) else 0
    if payload_bytes > INLINE_KEY_BYTES or messages > INLINE_KEY_MESSAGES:
        return await asyncio.to_thread(prefix_key, request)
    return prefix_key(request)


def serving_error(error: Exception, model: str) -> ServingError:
    """What a failed handle call of `model` means to the client. Detail is logged, not shown."""
    match error:
        case ServingError():
            return error
        case BackPressureError():
            return Overloaded(
                f"Too many requests are waiting for the model '{model}'. Try again shortly.", retry_after_s=1.0
            )
        case DeploymentUnavailableError():
            return Unavailable(f"The model '{model}' has no replica that can serve.", retry_after_s=5.0)
        case RayTaskError():
            logger.error("a replica of %s raised: %s", model, error)
            return InternalError(InternalError.PUBLIC_MESSAGE)
        case RayError() | ReplicaUnavailableError() | RequestCancelledError():
            logger.warning("a replica of %s was lost: %s", model, type(error).__name__)
            return BackendLost("The model's replica was lost.")
        case _:
            logger.error("a call of %s failed", model, exc_info=error)
            return InternalError(InternalError.PUBLIC_MESSAGE)


class _Handles:
    """A model's handle, and what it makes of itself: Serve builds a new one for each option and each method's name."""

    def __init__(self, model: str) -> None:
        self.base = serve.get_deployment_handle(MODEL_DEPLOYMENT, model)
        self._of: dict[tuple[str, bool], Any] = {}

    def method(self, name: str, *, stream: bool, by_reference: bool) -> Any:
        found = self._of.get((name, by_reference))
        if found is None:
            options = ray_compat.streaming_handle if stream else ray_compat.unary_handle
            found = self._of[name, by_reference] = getattr(options(self.base, by_reference=by_reference), name)
        return found


class Dispatcher:
    """The `ModelPool` of a gateway."""

    def __init__(self, settings: GatewaySettings, hub: ChannelHub, asks: Asks | None = None) -> None:
        self._settings = settings
        self._hub = hub
        self._asks = asks
        self._lines = Lines(settings.max_queued_requests, time.monotonic)
        hub.on_capacity = lambda model, capacity: self._lines.of(model).set_capacity(capacity)
        self._handles: dict[str, _Handles] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self.catalog = Catalog(settings.catalog_poll_s, on_change=self._warm_up)

    def models(self) -> Sequence[ModelEntry]:
        return self.catalog.entries()

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        await self.catalog.find(request.model)
        journey = Journey(request, self._settings.retries)
        sink = watched(sink, journey.observe)
        limits = [limit for limit in (request.timeout_s, self._settings.request_timeout_s) if limit is not None]
        trip = _Trip(asyncio.get_running_loop().time() + min(limits) if limits else math.inf)
        async with self._lines.of(request.model).place(
            min(limits, default=self._settings.first_frame_timeout_s), request.tenant
        ):
            while not journey.complete:
                try:
                    async with aclosing(self._attempts(journey.requests(), trip, sink)) as frames:
                        async for frame in frames:
                            shown = journey.observe(frame)
                            if shown.events or shown.tokens:
                                yield shown
                except ServingError as error:
                    pause_s = journey.lost(error, trip.node)
                    await self._require_innocent(journey, trip.deadline)
                    request_log.current().moves += 1
                    self.catalog.require_startable(request.model)
                    await asyncio.sleep(pause_s)

    def _attempts(self, parts: Sequence[Request], trip: _Trip, sink: Sink | None) -> AsyncGenerator[Frame, None]:
        if len(parts) == 1:
            return self._attempt(parts[0], trip, sink)
        return side_by_side([partial(self._attempt, part, trip) for part in parts])

    async def _require_innocent(self, journey: Journey, deadline: float) -> None:
        """Refuses a request that replicas died of. Whether one died with its node, Ray may not know for a while.

        A node of which another replica still answers is there.
        """
        loop = asyncio.get_running_loop()
        until = min(loop.time() + NODE_LOSS_KNOWN_S, deadline)
        while journey.suspected:
            journey.acquit(await asyncio.to_thread(ray_compat.lost_nodes))
            if journey.suspected:
                await asyncio.sleep(NODE_LOOK_EVERY_S)
                if loop.time() >= until or all(node == "" or self._hub.reaches(node) for node in journey.died_on):
                    journey.refuse()

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        await self.catalog.find(call.model)
        computes = isinstance(call, EmbeddingRequest | RerankRequest)
        async with self._place(call.model, call.tenant) if computes else nullcontext():
            return await self._answer(call)

    def _place(self, model: str, tenant: str) -> AbstractAsyncContextManager[None]:
        return self._lines.of(model).place(self._settings.first_frame_timeout_s, tenant)

    async def _answer(self, call: Question[AnswerT]) -> AnswerT:
        lost = 0
        while True:
            try:
                return decode_answer(call, await (self._ask_all(call) if call.everywhere else self._ask(call)))
            except (BackendLost, Unavailable) as error:
                lost += 1
                if not call.repeatable or lost > self._settings.retries:
                    raise
                logger.warning("request %s: %s; asking another replica", call.id, error.message)
                await asyncio.sleep(pause_after(lost))

    async def _ask(self, call: Question[Any]) -> list[bytes]:
        """One call of one replica: its reply, or the error that the call ended with."""
        payload = _encoder.encode(call)
        # Vectors, and the tokens of a long text, are larger than what they are made of.
        large = isinstance(call, EmbeddingRequest) or _ANSWER_GROWTH * len(payload) > GRPC_REQUEST_LIMIT_BYTES
        ask = self._handle(call.model).method("call", stream=False, by_reference=large)
        hint = RoutingHint(bare_key(len(payload))) if isinstance(call, _COMPUTED) else UNKNOWN
        # As in `_attempt`: a context of its own, and so a cancellation of our own.
        response: Any = contextvars.Context().run(ask.remote, payload, hint=hint)
        return [await self._reply(response, response.cancel, call.model)]

    async def _ask_all(self, call: Question[Any]) -> list[bytes]:
        """One call of every replica there is, full ones too: their replies, or the first error.

        Such calls cannot be taken back, so they must be short.
        """
        handle = ray_compat.unary_handle(self._handle(call.model).base, by_reference=False)
        response = contextvars.Context().run(handle.broadcast, "call", _encoder.encode(call), hint=UNKNOWN)
        return await self._reply(response.results_async(), lambda: None, call.model)

    async def _reply(self, reply: Awaitable[T], cancel: Callable[[], None], model: str) -> T:
        try:
            async with asyncio.timeout(self._settings.first_frame_timeout_s):
                return await reply
        except TimeoutError:
            cancel()
            raise DeadlineExceeded(
                f"No replica answered within {self._settings.first_frame_timeout_s:g} seconds."
            ) from None
        except asyncio.CancelledError:
            cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise BackendLost("The call to the model's replica was cancelled.") from None
        except Exception as error:
            raise serving_error(error, model) from None

    async def _attempt(self, request: Request, trip: _Trip, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        """One call of one replica. Raises whatever it ends with other than `Finished`. Frames behind the first one may
        go to `sink`.
        """
        loop = asyncio.get_running_loop()
        payload = _encoder.encode(request)
        by_reference = len(payload) > GRPC_REQUEST_LIMIT_BYTES
        generate = self._handle(request.model).method("generate", stream=True, by_reference=by_reference)
        if trip.key is None:
            trip.key = await _key(request, len(payload))
        key = trip.key
        with self._hub.open(request.n) as inbox:
            hint = RoutingHint(key, inbox.stream, tuple(trip.lost))
            to = ReturnAddress(self._hub.gateway, inbox.stream if self._settings.step_channel else 0)
            # Serve names a call after the HTTP request whose context it is made in, and matches waiting calls to
            # replicas by that name: a retry beside a call that is not quite over would wait forever. An empty context
            # gives each call its own name; cancelling it with the request is then up to us, below.
            response = contextvars.Context().run(generate.remote, payload, hint=hint, to=_encoder.encode(to))
            del payload  # as large as the prompt, and sent by now; a retry makes it anew
            inbox.cancel = response.cancel
            # Also behind the end of this: Serve's accounting may hang on somebody seeing the call's.
            self._readers.add(reader := loop.create_task(_read_handle(response, inbox, request.model)))
            reader.add_done_callback(self._readers.discard)
            del reader, response  # some KB; a carried one is needed no more
            expiry = None if trip.deadline == math.inf else loop.call_at(trip.deadline, inbox.fail, _too_late())
            try:
                frame = await self._first_frame(inbox, request.model)
                delivered = False
                trip.node = self._hub.node(request.model, inbox.routed_to)
                request_log.current().replica = inbox.routed_to
                self._observe_started(request.model, key, frame)
                inbox.sink = sink
                while True:
                    if frame.events and type(last := frame.events[-1]) is Failed:
                        # What came along with the failure. Before the first frame, all of it may come again.
                        if delivered and (frame.events[:-1] or frame.tokens):
                            yield Frame(frame.events[:-1], frame.tokens, frame.choice)
                        raise ServingError.from_info(last.error)
                    yield frame
                    delivered = True
                    if inbox.drained:
                        break
                    frame = await inbox.get()
            except BackendLost:
                if inbox.routed_to:
                    trip.lost.append(inbox.routed_to)
                raise
            finally:
                if expiry is not None:
                    expiry.cancel()
                if not inbox.ended:
                    inbox.cancel()

    async def _first_frame(self, inbox: Inbox, model: str) -> Frame:
        """`DeadlineExceeded` if none comes in time; `Unavailable` once it is known that no replica can start."""
        by = asyncio.get_running_loop().time() + self._settings.first_frame_timeout_s
        timer: list[asyncio.TimerHandle] = []  # `asyncio.timeout` takes longer, and each request has one
        self._look_later(inbox, model, by, timer)
        try:
            return await inbox.get()
        finally:
            timer[0].cancel()

    def _look_later(self, inbox: Inbox, model: str, by: float, timer: list[asyncio.TimerHandle]) -> None:
        loop = asyncio.get_running_loop()
        timer[:] = [loop.call_at(min(by, loop.time() + LOOK_EVERY_S), self._look, inbox, model, by, timer)]

    def _look(self, inbox: Inbox, model: str, by: float, timer: list[asyncio.TimerHandle]) -> None:
        try:
            if asyncio.get_running_loop().time() >= by:
                within_s = self._settings.first_frame_timeout_s
                raise DeadlineExceeded(f"No replica began to answer within {within_s:g} seconds.")
            self.catalog.require_startable(model)
        except ServingError as error:
            inbox.fail(error)
        else:
            self._look_later(inbox, model, by, timer)

    def _observe_started(self, model: str, key: PrefixKey, frame: Frame) -> None:
        if self._asks is not None and frame.events and isinstance(started := frame.events[0], Started):
            self._asks.started(model, key, started.prompt_tokens, started.cached_tokens)

    def _handle(self, model: str) -> _Handles:
        handles = self._handles.get(model)
        if handles is None:
            handles = self._handles[model] = _Handles(model)
        return handles

    def _warm_up(self, models: Collection[str]) -> None:
        for model in models:
            # A model that was deleted and deployed again needs a handle that has not seen its deletion.
            self._handles.pop(model, None)
            try:
                ray_compat.warm_up(self._handle(model).base)
            except (KeyError, RayError, RayServeException) as error:
                # Deleted meanwhile, or the controller is away: that model's first request finds out.
                logger.warning("no handle for %s yet: %s", model, error)


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("The answer took longer than it was allowed to.")


async def _read_handle(response: Any, inbox: Inbox, model: str) -> None:
    """Bring the handle call's items, or its failure, to the inbox. Returns when the call is over, or is carried."""
    try:
        async for item in response:
            if item != HANDED_OVER:
                inbox.put(decode_frame(item))
        if not inbox.ended and not inbox.carried:
            await asyncio.sleep(LATE_FRAMES_S)
            inbox.fail(BackendLost("The model's replica ended the answer early."))
    except Exception as error:
        # All of them: an error that does not reach the inbox leaves its client waiting forever.
        inbox.fail(serving_error(error, model))
    except asyncio.CancelledError:
        # Serve raises it into the caller when a call was cancelled; the inbox's owner is gone, or learns it here.
        inbox.fail(BackendLost("The call to the model's replica was cancelled."))
