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
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from backends.base import BackendStartError
from deployments import ray_compat
from deployments.config import MODEL_IMPORT
from deployments.models import ModelEntry, Offer
from deployments.naming import offer_of
from deployments.settings import MODEL_DEPLOYMENT
from protocols.errors import ModelNotFound, Unavailable

logger = logging.getLogger(__name__)

REFRESH_AT_MOST_EVERY_S = 0.25
BELIEVED_AFTER_S = 60.0
"""How long Serve must have given up on a model, whose replicas do not say why, until its requests are told so."""
DETAILS_S = 15.0
"""How old what is known of a model's replicas may be, where its status did not change with them."""
FORGET_AFTER_S = 30.0
"""How long a model is believed to be there that Serve's status does not have, though nobody has deleted it."""

_GONE = frozenset({ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED})


class Application(msgspec.Struct, frozen=True):
    """A model application as Serve reports it. `failure` is set when it never came up; `leaving` as it is deleted.

    Of one that is `building` Serve has the config only, and not what runs: whoever knew it knows more.
    """

    entry: ModelEntry
    failure: str | None
    leaving: bool = False
    building: bool = False


class StatusSource(Protocol):
    def __call__(self) -> Mapping[str, Application]:
        """All model applications by name. Blocks; called on a thread."""


class ServeStatus:
    """The `StatusSource` over Serve. What models offer is in their configs, and read again when one is deployed.

    Each gateway asks every second. Serve's details take its controller 3 ms with five applications and grow with the
    replicas of all, so they are asked for only when the statuses (1 ms) are not those of the last time, or after
    `DETAILS_S`. `serve.status()` would take another 60 ms here to validate them, in which no stream goes on.
    """

    def __init__(self) -> None:
        self._statuses: list[bytes] | None = None
        self._read_at = float("-inf")
        self._models: dict[str, _Model] = {}
        self._building: dict[str, Application] = {}
        self._offers: dict[str, tuple[float, Offer]] = {}
        self._failing_since: dict[str, float] = {}

    def __call__(self) -> dict[str, Application]:
        statuses, now = ray_compat.serve_statuses(), time.monotonic()
        if statuses != self._statuses or now - self._read_at >= DETAILS_S:
            applications: Mapping[str, Any] = ray_compat.serve_details()["applications"]
            models = {name: app for name, app in applications.items() if MODEL_DEPLOYMENT in app["deployments"]}
            self._offers = {name: self._offer(name, app) for name, app in models.items()}
            self._models = {name: _Model.of(app) for name, app in models.items()}
            self._building = {name: _being_built(name, app) for name, app in applications.items() if _is_built(app)}
            self._statuses, self._read_at = statuses, now
        return self._building | {
            name: Application(model.entry(name, self._offers[name][1]), self._failure(name, model), model.leaving)
            for name, model in self._models.items()
        }

    def _offer(self, name: str, app: Mapping[str, Any]) -> tuple[float, Offer]:
        deployed, known = app["last_deployed_time_s"], self._offers.get(name)
        if known is not None and known[0] == deployed:
            return known
        return deployed, offer_of(app.get("deployed_app_config") or {})

    def _failure(self, name: str, model: _Model) -> str | None:
        """Why no replica can be had, as Serve says it; None where there is one, or one may yet come.

        A deployment that failed may have replicas of before, and they serve. One that slept may fail when it is woken,
        and Serve tries on and on. A replica that was killed as it started also failed to start, but the next one will
        do: what counts is that the model itself said why it cannot, or that nothing else comes for a while.
        """
        gave_up = model.status is ApplicationStatus.DEPLOY_FAILED
        failing = gave_up or model.trigger == "REPLICA_STARTUP_FAILED"
        if model.running or not failing:
            self._failing_since.pop(name, None)
            return None
        now = time.monotonic()
        for_long = now - self._failing_since.setdefault(name, now) >= BELIEVED_AFTER_S
        return model.message if BackendStartError.__name__ in model.message or (gave_up and for_long) else None


def _is_built(app: Mapping[str, Any]) -> bool:
    """Whether it is a model that Serve builds, anew or for the first time: for seconds it has no deployments."""
    config = app.get("deployed_app_config") or {}
    building = app["status"] == ApplicationStatus.DEPLOYING and not app["deployments"]
    return building and config.get("import_path") == MODEL_IMPORT


def _being_built(name: str, app: Mapping[str, Any]) -> Application:
    offer = offer_of(app["deployed_app_config"])
    entry = ModelEntry(name, int(app["last_deployed_time_s"]), ready=False, offer=offer, replicas=0)
    return Application(entry, failure=None, building=True)


class _Model(msgspec.Struct, frozen=True):
    """A model application, as far as it is read out of Serve's details."""

    status: ApplicationStatus
    trigger: str
    message: str
    deployed_at: float
    running: int
    starting: int

    @classmethod
    def of(cls, app: Mapping[str, Any]) -> _Model:
        model = app["deployments"][MODEL_DEPLOYMENT]
        states = [replica["state"] for replica in model["replicas"]]
        return cls(
            ApplicationStatus(app["status"]),
            model["status_trigger"],
            model["message"] or app["message"],
            app["last_deployed_time_s"],
            states.count("RUNNING"),
            states.count("STARTING"),
        )

    @property
    def leaving(self) -> bool:
        return self.status in _GONE

    def entry(self, name: str, offer: Offer) -> ModelEntry:
        """Ready also while it is updated, as long as an old replica serves, and when it is scaled to zero."""
        ready = self.status is ApplicationStatus.RUNNING or self.running > 0
        return ModelEntry(name, int(self.deployed_at), ready, offer, replicas=self.running, starting=self.starting)


class Catalog:
    """A current copy of the model list, refreshed every `poll_s` seconds and when someone asks for a model it lacks."""

    def __init__(self, poll_s: float, on_change: Any = None, source: StatusSource | None = None) -> None:
        self._poll_s = poll_s
        self._source = source or ServeStatus()
        self._on_change = on_change
        self._applications: Mapping[str, Application] = {}
        self._seen_at: dict[str, float] = {}
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
        return [apps[name].entry for name in sorted(apps) if apps[name].failure is None and not apps[name].leaving]

    async def find(self, model: str) -> ModelEntry:
        """Raises `ModelNotFound`, naming what there is, or `Unavailable` for a model that failed to deploy."""
        if model not in self._applications:
            await self._refresh()
        app = self._applications.get(model)
        if app is None or app.leaving:
            raise ModelNotFound.of(model, [entry.id for entry in self.entries()])
        self.require_startable(model)
        return app.entry

    def require_startable(self, model: str) -> None:
        """Raises `Unavailable` for a model of which no replica can be had. Serve never tells those who wait for it."""
        app = self._applications.get(model)
        if app is not None and app.failure is not None:
            raise Unavailable(f"The model '{model}' failed to start. See `tokenyard status` for the reason.")

    def _with_missing(self, applications: Mapping[str, Application]) -> Mapping[str, Application]:
        """`applications`, and those that were there a moment ago and are not being deleted.

        While its controller restarts, or an application is deployed again, Serve's status lacks what it has for
        seconds. Nobody is to be told meanwhile that there is no such model, or that nothing runs of it.
        """
        now = time.monotonic()
        for name in applications:
            self._seen_at[name] = now
        kept = {
            name: app
            for name, app in self._applications.items()
            if (name not in applications or applications[name].building)
            and not app.leaving
            and now - self._seen_at[name] < FORGET_AFTER_S
        }
        return {**applications, **kept}

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
            self._applications = self._with_missing(applications)
            if self._on_change is not None and added:
                self._on_change(added)
