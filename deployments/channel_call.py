"""Requests that travel over the step channel. Serve's router chooses, counts and retries as ever; what it sends is a
message on the connection to the replica instead of a gRPC call of its own, which costs each end 40 KB and 1 ms.

Serve's replica knows nothing of such a request: the replica counts them itself (`replica.py`), and refuses and drains
by its own count. Where there is no connection, or it is stuck, the request is a call of Serve's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
from ray import ObjectRef, ObjectRefGenerator
from ray.exceptions import ActorUnavailableError
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.channel import ChannelHub, Count, Inbox, Leave, ReplicaLink, ReturnAddress, Run, current_hub
from deployments.ray_compat import ReplicaQueueLengthInfo, ReplicaResult, by_reference
from protocols.errors import BackendLost

METHOD = "generate"
"""Of a replica. Its other methods are called by Serve."""

Unavailable = Callable[[], ActorUnavailableError]

_address = msgspec.msgpack.Decoder(ReturnAddress)
_encode = msgspec.msgpack.Encoder().encode


class ChannelReplica(RunningReplica):
    """A replica as Serve's router sees it."""

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        if pr.metadata.call_method == METHOD and not by_reference(pr.metadata) and (way := self._way()) is not None:
            hub, link = way
            inbox = hub.inbox(_address.decode(pr.kwargs["to"]).stream)
            if inbox is not None:
                run = Run(inbox.stream, self.max_ongoing_requests, pr.args[0], _encode(pr.kwargs["hint"]))
                return ChannelCall(link, inbox, run, self.replica_id.unique_id, self._unavailable)
        return super().try_send_request(pr, with_rejection)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        way = self._way()
        if way is None:
            return int(await super().get_queue_len(deadline_s=deadline_s))
        hub, link = way
        question = _Question(link, hub.next_stream(), self._unavailable)
        try:
            return await question.answer
        finally:
            link.forget_caller(question.stream)

    def _way(self) -> tuple[ChannelHub, ReplicaLink] | None:
        """None where the replica has to be called by Serve."""
        hub = current_hub()
        if hub is None or hub.loop is not asyncio.get_running_loop():
            return None
        link = hub.link(self.replica_id.deployment_id.app_name, self.replica_id.unique_id)
        return (hub, link) if link is not None and link.takes_orders else None

    def _unavailable(self) -> ActorUnavailableError:
        """What Serve's router tries another replica for."""
        return ActorUnavailableError("The connection to the replica was lost.", self.actor_id.binary())


class _Question:
    def __init__(self, link: ReplicaLink, stream: int, unavailable: Unavailable) -> None:
        self.stream = stream
        self.answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._unavailable = unavailable
        link.order(Count(stream), self)

    def told(self, number: int) -> None:
        if not self.answer.done():
            self.answer.set_result(number)

    def lost(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(self._unavailable())


class ChannelCall(ReplicaResult):
    """A request that a replica was sent. As a stream it has no items, and ends once it is taken: the frames go to the
    inbox, and so does its end.

    For Serve, which counts it, it is over when the replica says so, the connection is lost, or it is cancelled.
    """

    def __init__(self, link: ReplicaLink, inbox: Inbox, run: Run, replica: str, unavailable: Unavailable) -> None:
        self._link = link
        self._inbox = inbox
        self._replica = replica
        self._unavailable = unavailable
        self._verdict: int | None = None
        self._end: BaseException | None = None
        self._over = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._waiter: asyncio.Future[None] | None = None
        link.order(run, self)

    # --- what the connection tells ---

    def told(self, number: int) -> None:
        if self._verdict is not None:
            self._finish()
            self._inbox.fail(BackendLost("The model's replica ended the answer early."))  # unless it has ended
            return
        self._verdict = number
        if number < 0:
            self._finish()
            return
        self._inbox.routed_to, self._inbox.carried, self._inbox.cancel = self._replica, True, self.cancel
        self._link.bind(self._inbox)
        self._wake()

    def lost(self) -> None:
        self._finish(self._unavailable())

    # --- what Serve asks ---

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        """Raises `ActorUnavailableError` if the connection was lost before the replica said anything."""
        while self._verdict is None:
            self._raise_if_ended_badly()
            await self._news()
        accepted = self._verdict >= 0
        return ReplicaQueueLengthInfo(accepted, self._verdict if accepted else ~self._verdict)

    async def __anext__(self) -> NoReturn:
        while self._verdict is None:
            self._raise_if_ended_badly()
            await self._news()
        self._raise_if_ended_badly()
        raise StopAsyncIteration

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._over:
            callback(self._end)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> None:
        if not self._over:
            self._link.send(Leave(self._inbox.stream))
            self._finish(asyncio.CancelledError())

    def _finish(self, end: BaseException | None = None) -> None:
        if self._over:
            return
        self._over, self._end = True, end
        self._link.forget_caller(self._inbox.stream)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(end)
        self._wake()

    def _raise_if_ended_badly(self) -> None:
        if self._end is not None:
            raise self._end

    async def _news(self) -> None:
        """Serve waits for the verdict before it hands out the stream, so one waits at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- what nobody asks of a stream ---
    # Abstract in Serve's class. The first two are of calls with one answer, the third of callers without an event loop,
    # the others of results in the object store, which Serve's own for gRPC refuses as well.

    def get(self, timeout_s: float | None) -> NoReturn:
        raise NotImplementedError

    async def get_async(self) -> NoReturn:
        raise NotImplementedError

    def __next__(self) -> NoReturn:
        raise NotImplementedError

    def to_object_ref(self) -> ObjectRef[Any]:
        raise NotImplementedError

    async def to_object_ref_async(self) -> ObjectRef[Any]:
        raise NotImplementedError

    def to_object_ref_gen(self) -> ObjectRefGenerator[Any]:
        raise NotImplementedError
