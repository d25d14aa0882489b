"""Which models there are: found by watching Serve's status, never from a list, and without waking any of them.

An application whose deployment is named `Model` serves a model; the application's name is the model id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from deployments.models import MODEL_DEPLOYMENT as MODEL_DEPLOYMENT
from deployments.models import ModelEntry
from protocols.errors import ModelNotFound, Unavailable

logger = logging.getLogger(__name__)

REFRESH_AT_MOST_EVERY_S = 0.25

_GONE = frozenset({ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED})


class Application(msgspec.Struct, frozen=True):
    """A model application as Serve reports it. `failure` is set when it never came up."""

    entry: ModelEntry
    failure: str | None


class StatusSource(Protocol):
    def __call__(self) -> Mapping[str, Application]:
        """All model applications by name. Blocks; called on a thread."""


def read_serve_status() -> dict[str, Application]:
    status = serve.status()
    return {
        name: Application(
            ModelEntry(name, int(app.last_deployed_time_s), _is_ready(app)),
            app.message if app.status is ApplicationStatus.DEPLOY_FAILED else None,
        )
        for name, app in status.applications.items()
        if MODEL_DEPLOYMENT in app.deployments and app.status not in _GONE
    }


def _is_ready(app: ApplicationStatusOverview) -> bool:
    """Also while it is updated, as long as an old replica serves, and when it is scaled to zero."""
    if app.status is ApplicationStatus.RUNNING:
        return True
    return any(state == "RUNNING" for state in app.deployments[MODEL_DEPLOYMENT].replica_states)


class Catalog:
    """A current copy of the model list, refreshed every `poll_s` seconds and when someone asks for a model it lacks."""

    def __init__(self, poll_s: float, on_change: Any = None, source: StatusSource = read_serve_status) -> None:
        self._poll_s = poll_s
        self._source = source
        self._on_change = on_change
        self._applications: Mapping[str, Application] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def aclose(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def entries(self) -> Sequence[ModelEntry]:
        apps = self._applications
        return [apps[name].entry for name in sorted(apps) if apps[name].failure is None]

    async def find(self, model: str) -> ModelEntry:
        """Raises `ModelNotFound`, naming what there is, or `Unavailable` for a model that failed to deploy."""
        if model not in self._applications:
            await self._refresh()
        app = self._applications.get(model)
        if app is None:
            raise ModelNotFound.of(model, [entry.id for entry in self.entries()])
        if app.failure is not None:
            raise Unavailable(f"The model '{model}' failed to start. See `tokenyard status` for the reason.")
        return app.entry

    async def _watch(self) -> None:
        while True:
            try:
                await self._refresh()
            except Exception:
                # Whatever one look brings: without the next one this gateway would never see another model.
                logger.exception("catalog: looking for models failed")
            await asyncio.sleep(self._poll_s)

    async def _refresh(self) -> None:
        async with self._reading:
            if time.monotonic() - self._read_at < REFRESH_AT_MOST_EVERY_S:
                return
            try:
                applications = await asyncio.to_thread(self._source)
            except (RayError, RayServeException) as error:
                # The controller restarts, or is busy: what was known stays known, requests go on.
                logger.warning("catalog: Serve's status cannot be read (%s); keeping the last one", error)
                return
            finally:
                self._read_at = time.monotonic()
            added = applications.keys() - self._applications.keys()
            self._applications = applications
            if self._on_change is not None and added:
                self._on_change(added)
