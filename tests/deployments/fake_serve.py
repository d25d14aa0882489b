"""Stand-ins for the parts of Ray Serve that our code is called by and calls, as Ray 2.60 has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.routing.hint import RoutingHint
from deployments.routing.key import PrefixKey

DEPLOYMENT = DeploymentID(name="Model", app_name="m")


class FakeRunningReplica(RunningReplica):
    """What a router sees of a replica. It answers probes at once, and records them."""

    def __init__(
        self,
        name: str,
        metadata: dict[str, Any] | None = None,
        max_ongoing_requests: int = 10,
        routing_stats: Any = None,
    ) -> None:
        # Not the parent's: it looks the replica's actor up in the cluster.
        self._id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self._metadata = metadata or {}
        self._max_ongoing_requests = max_ongoing_requests
        self._routing_stats = {} if routing_stats is None else routing_stats
        self.queue_len = 0
        self.probes = 0

    @property
    def replica_id(self) -> ReplicaID:
        return self._id

    @property
    def node_id(self) -> str:
        return "node"

    @property
    def availability_zone(self) -> str | None:
        return None

    @property
    def multiplexed_model_ids(self) -> set[str]:
        return set()

    @property
    def routing_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._routing_stats
        return stats

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return self._metadata

    @property
    def max_ongoing_requests(self) -> int:
        return self._max_ongoing_requests

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        return self.queue_len

    def __repr__(self) -> str:
        return self._id.unique_id


def pending(name: str, key: PrefixKey | None = None, avoid: tuple[str, ...] = (), call: int = 0) -> PendingRequest:
    """A request waiting for a replica, as `Dispatcher` makes it; without a key, one made by somebody else."""
    kwargs = {} if key is None else {"hint": RoutingHint(key, call, avoid)}
    return PendingRequest(args=[b""], kwargs=kwargs, metadata=RequestMetadata(f"r-{name}", name, is_streaming=True))


Items = Callable[..., AsyncIterator[bytes]]


class FakeResponse:
    """A handle's streaming response. Whoever reads a cancelled one sees `asyncio.CancelledError`, as with Serve's."""

    def __init__(self, items: AsyncIterator[bytes]) -> None:
        self._items = items
        self._reading: asyncio.Task[bytes] | None = None
        self.cancelled = False
        self.over = False

    def __aiter__(self) -> FakeResponse:
        return self

    async def __anext__(self) -> bytes:
        if self.cancelled:
            raise asyncio.CancelledError
        self._reading = asyncio.ensure_future(anext(self._items))
        try:
            return await self._reading
        except BaseException:
            self.over = True
            raise
        finally:
            self._reading = None

    def cancel(self) -> None:
        self.cancelled = True
        if self._reading is not None:
            self._reading.cancel()


Reply = Callable[..., Awaitable[bytes]]


class FakeUnaryResponse:
    """A handle's response with one answer."""

    def __init__(self, answer: Awaitable[bytes]) -> None:
        self._answer = asyncio.ensure_future(answer)
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._answer.__await__()

    def cancel(self) -> None:
        self.cancelled = True
        self._answer.cancel()


class FakeBroadcastResponse:
    """What all replicas answered, or the first error."""

    def __init__(self, answers: list[Awaitable[bytes]]) -> None:
        self._answers = answers

    async def results_async(self) -> list[bytes]:
        return await asyncio.gather(*self._answers)


class FakeUnaryHandle:
    """As `FakeHandle`, for `Replica.call`. To a call of all replicas, each of `answers` is one of them."""

    def __init__(self, *answers: Reply) -> None:
        self._answers = list(answers)
        self.calls: list[dict[str, Any]] = []
        self.responses: list[FakeUnaryResponse] = []
        self.options_used: list[dict[str, Any]] = []
        self.call = self

    def options(self, **options: Any) -> FakeUnaryHandle:
        self.options_used.append(options)
        return self

    def remote(self, call: bytes, **kwargs: Any) -> FakeUnaryResponse:
        answer = self._answers[min(len(self.calls), len(self._answers) - 1)]
        self.calls.append({"call": call, **kwargs})
        self.responses.append(FakeUnaryResponse(answer(call, **kwargs)))
        return self.responses[-1]

    def broadcast(self, method_name: str, call: bytes, **kwargs: Any) -> FakeBroadcastResponse:
        assert method_name == "call"
        self.calls.append({"call": call, **kwargs})
        return FakeBroadcastResponse([answer(call, **kwargs) for answer in self._answers])


class FakeHandle:
    """A deployment handle whose calls are answered by `answers`, one after another; the last one repeats."""

    def __init__(self, *answers: Items) -> None:
        self._answers = list(answers)
        self.is_initialized = False
        self.calls: list[dict[str, Any]] = []
        self.responses: list[FakeResponse] = []
        self.options_used: list[dict[str, Any]] = []
        self.generate = self

    def _init(self) -> None:
        self.is_initialized = True

    def options(self, **options: Any) -> FakeHandle:
        self.options_used.append(options)
        return self

    def remote(self, request: bytes, **kwargs: Any) -> FakeResponse:
        answer = self._answers[min(len(self.calls), len(self._answers) - 1)]
        self.calls.append({"request": request, **kwargs})
        response = FakeResponse(answer(request, **kwargs))
        self.responses.append(response)
        return response
