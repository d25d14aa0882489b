"""One process, no Ray: the same HTTP side over backends in this process. Starts in the time its models take to load."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)

import uvicorn

from backends import create
from backends.answers import answer
from backends.base import Backend
from deployments import garbage, request_log
from deployments.admission import Line
from deployments.config import OurParts
from deployments.http import build_app
from deployments.local_http import GuardedProtocol
from deployments.middleware import ASGIApp
from deployments.models import ModelEntry, Offer
from deployments.naming import NamedModels, offer
from deployments.settings import queue_slots
from protocols.calls import AnswerT, EmbeddingRequest, Question, RerankRequest
from protocols.errors import ModelNotFound
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink

logger = logging.getLogger(__name__)


class LocalPool:
    """The `ModelPool` over backends of this process, with a line in front of each, as gateways have it."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        waiting_limits: Mapping[str, int],
        offers: Mapping[str, Offer] | None = None,
        wait_s: float = 600.0,
    ) -> None:
        """`waiting_limits`: requests that may wait beyond a backend's slots, by model; for `wait_s` seconds at most."""
        self._backends = backends
        self._offers = offers or {}
        self._lines = {name: _line(name, backends[name], limit) for name, limit in waiting_limits.items()}
        self._wait_s = wait_s
        self._created = int(time.time())

    def models(self) -> Sequence[ModelEntry]:
        return [
            ModelEntry(name, self._created, offer=self._offers.get(name, Offer())) for name in sorted(self._backends)
        ]

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        backend = self._backend(request.model)
        async with self._place(request.model, request.tenant), aclosing(backend.generate(request, sink)) as frames:
            async for frame in frames:
                yield frame

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        backend = self._backend(call.model)
        computes = isinstance(call, EmbeddingRequest | RerankRequest)
        async with self._place(call.model, call.tenant) if computes else nullcontext():
            return await answer(backend, call)

    def _place(self, model: str, tenant: str) -> AbstractAsyncContextManager[None]:
        return self._lines[model].place(self._wait_s, tenant)

    def _backend(self, model: str) -> Backend:
        backend = self._backends.get(model)
        if backend is None:
            raise ModelNotFound.of(model, sorted(self._backends))
        return backend


def _line(model: str, backend: Backend, waiting: int) -> Line:
    """In front of a backend that gets a few requests more than it has slots, so that a freed one is filled at once."""
    slots = backend.stats().slots
    ahead = min(queue_slots(slots), waiting)
    line = Line(model, waiting - ahead, time.monotonic, floor=0)
    line.set_capacity(slots + ahead)
    return line


@asynccontextmanager
async def running_backends(parts: OurParts) -> AsyncIterator[dict[str, Backend]]:
    """All models of a config, loaded. Raises `BackendStartError`."""
    async with AsyncExitStack() as stack:
        backends: dict[str, Backend] = {}
        for name, settings in parts.models.items():
            backend = create(settings.backend)
            await backend.start()
            stack.push_async_callback(backend.aclose)
            backends[name] = backend
        yield backends


async def serve(parts: OurParts, host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Serves until the process is interrupted."""
    if parts.gateway.request_log:
        requests = request_log.logger
        requests.setLevel(logging.INFO)
        requests.addHandler(logging.StreamHandler())
    async with running_backends(parts) as backends:
        limits = {name: settings.max_queued_requests for name, settings in parts.models.items()}
        offers = {name: offer(settings) for name, settings in parts.models.items()}
        pool = NamedModels(LocalPool(backends, limits, offers, parts.gateway.first_frame_timeout_s))
        app = build_app(pool, parts.gateway, echo_request_id=True)
        garbage.freeze()
        await listen(app, [host], port, on_ready)


async def listen(app: ASGIApp, hosts: Sequence[str], port: int, on_ready: Callable[[], None]) -> None:
    """Answers on all `hosts` until the process is interrupted. Raises `OSError` for an address that is not free."""
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(_socket(host, port)) for host in hosts]
        serving = asyncio.create_task(server.serve(sockets=sockets))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready()
        await serving


def _socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
