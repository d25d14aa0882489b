"""One process, no Ray: the same HTTP side over backends in this process. Starts in the time its models take to load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import uvicorn

from backends import create
from backends.answers import answer
from backends.base import Backend
from deployments import request_log
from deployments.config import OurParts
from deployments.http import build_app
from deployments.models import ModelEntry, Offer
from deployments.naming import NamedModels, offer
from protocols.calls import AnswerT, EmbeddingRequest, Question, RerankRequest
from protocols.errors import ModelNotFound, Overloaded
from protocols.events import Frame
from protocols.request import Request

logger = logging.getLogger(__name__)


class LocalPool:
    """The `ModelPool` over backends of this process, with a limit on each one's queue: no Serve is there to keep it."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        waiting_limits: Mapping[str, int],
        offers: Mapping[str, Offer] | None = None,
    ) -> None:
        self._backends = backends
        self._waiting_limits = waiting_limits
        self._offers = offers or {}
        self._created = int(time.time())

    def models(self) -> Sequence[ModelEntry]:
        return [
            ModelEntry(name, self._created, offer=self._offers.get(name, Offer())) for name in sorted(self._backends)
        ]

    async def stream(self, request: Request) -> AsyncGenerator[Frame, None]:
        backend = self._backend(request.model)
        self._check_room(backend, request.model)
        async with aclosing(backend.generate(request)) as frames:
            async for frame in frames:
                yield frame

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        backend = self._backend(call.model)
        if isinstance(call, EmbeddingRequest | RerankRequest):  # the others wait for no computation
            self._check_room(backend, call.model)
        return await answer(backend, call)

    def _backend(self, model: str) -> Backend:
        backend = self._backends.get(model)
        if backend is None:
            raise ModelNotFound.of(model, sorted(self._backends))
        return backend

    def _check_room(self, backend: Backend, model: str) -> None:
        stats = backend.stats()
        if stats.running + stats.waiting >= stats.slots + self._waiting_limits[model]:
            raise Overloaded(
                f"Too many requests are waiting for the model '{model}'. Try again shortly.", retry_after_s=1.0
            )


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
        app = build_app(NamedModels(LocalPool(backends, limits, offers)), parts.gateway, echo_request_id=True)
        server = uvicorn.Server(
            uvicorn.Config(
                app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=5
            )
        )
        serving = asyncio.create_task(server.serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            on_ready()
        await serving
