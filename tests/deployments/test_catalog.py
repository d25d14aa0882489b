"""The model list: current without waking anybody, and no worse than before while Serve's controller is away."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve._private.common import DeploymentStatusTrigger, ReplicaState
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deployments import catalog as catalog_module
from deployments import ray_compat
from deployments.catalog import Application, Catalog, ServeStatus
from deployments.models import ModelEntry, Offer
from protocols.errors import ModelNotFound, Unavailable
from tests.deployments.support import eventually


def running(*names: str) -> dict[str, Application]:
    return {name: Application(ModelEntry(name, 7), failure=None) for name in names}


class Source:
    """Serve's status as a test sets it. Called on a thread, as the real one."""

    def __init__(self, *names: str) -> None:
        self.now: Mapping[str, Application] | Exception = running(*names)
        self.reads = 0

    def __call__(self) -> Mapping[str, Application]:
        self.reads += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


@pytest.fixture(autouse=True)
def refresh_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not seen is gone at once, where a test does not say otherwise."""
    monkeypatch.setattr(catalog_module, "REFRESH_AT_MOST_EVERY_S", 0.0)
    monkeypatch.setattr(catalog_module, "FORGET_AFTER_S", 0.0)
    monkeypatch.setattr(catalog_module, "BELIEVED_AFTER_S", 0.0)


@pytest.fixture
async def watched() -> AsyncIterator[Callable[..., Catalog]]:
    """Makes catalogs that watch, and closes them."""
    made: list[Catalog] = []

    def make(source: Source, on_change: object = None) -> Catalog:
        made.append(Catalog(0.002, on_change, source))
        made[-1].start()
        return made[-1]

    yield make
    for catalog in made:
        await catalog.aclose()


def ids(catalog: Catalog) -> list[str]:
    return [entry.id for entry in catalog.entries()]


async def test_a_model_that_is_not_known_yet_is_looked_for() -> None:
    source = Source("a")
    catalog = Catalog(1000, source=source)
    assert ids(catalog) == []
    assert await catalog.find("a") == ModelEntry("a", 7)
    source.now = running("a", "b")
    assert (await catalog.find("b")).id == "b"


async def test_a_known_model_is_found_without_asking_serve() -> None:
    source = Source("a")
    catalog = Catalog(1000, source=source)
    await catalog.find("a")
    source.now = RayServeException("away")
    for _ in range(5):
        await catalog.find("a")
    assert source.reads == 1


async def test_a_model_there_is_not_is_an_error_that_names_what_there_is() -> None:
    catalog = Catalog(1000, source=Source("b", "a"))
    with pytest.raises(ModelNotFound) as caught:
        await catalog.find("c")
    assert caught.value.message == "The model 'c' does not exist. Available: a, b."
    assert caught.value.param == "model"


async def test_where_there_are_no_models_none_are_named() -> None:
    with pytest.raises(ModelNotFound, match="Available: none"):
        await Catalog(1000, source=Source()).find("c")


async def test_misses_do_not_ask_serve_more_than_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for a model there is not must not load the controller."""
    monkeypatch.setattr(catalog_module, "REFRESH_AT_MOST_EVERY_S", 1000.0)
    source = Source("a")
    catalog = Catalog(1000, source=source)
    misses = await asyncio.gather(*(catalog.find("no") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(miss, ModelNotFound) for miss in misses)
    assert source.reads == 1


async def test_a_failing_source_is_not_asked_more_often_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "REFRESH_AT_MOST_EVERY_S", 1000.0)
    source = Source()
    source.now = RayServeException("away")
    catalog = Catalog(1000, source=source)
    await asyncio.gather(*(catalog.find("a") for _ in range(20)), return_exceptions=True)
    assert source.reads == 1


async def test_requests_that_wait_for_one_refresh_are_all_served_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "REFRESH_AT_MOST_EVERY_S", 1000.0)
    source = Source("a")
    catalog = Catalog(1000, source=source)
    entries = await asyncio.gather(*(catalog.find("a") for _ in range(20)))
    assert {entry.id for entry in entries} == {"a"}
    assert source.reads == 1


AWAY = [RayActorError(), GetTimeoutError("slow"), RayServeException("no controller")]


@pytest.mark.parametrize("away", AWAY, ids=lambda error: type(error).__name__)
async def test_while_the_controller_is_away_the_last_list_stays(
    away: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source("a", "b")
    catalog = Catalog(1000, source=source)
    await catalog.find("a")
    source.now = away
    with pytest.raises(ModelNotFound):
        await catalog.find("new")
    assert ids(catalog) == ["a", "b"]
    assert (await catalog.find("b")).id == "b"
    assert "keeping the last one" in caplog.text


async def test_B91_a_model_that_failed_to_deploy_is_unavailable_and_not_listed() -> None:
    source = Source("good")
    source.now = {**running("good"), "bad": Application(ModelEntry("bad", 7), failure="Traceback: /secret/path")}
    catalog = Catalog(1000, source=source)
    with pytest.raises(Unavailable) as caught:
        await catalog.find("bad")
    assert "'bad' failed to start" in caught.value.message
    assert "secret" not in caught.value.message
    assert ids(catalog) == ["good"]


async def test_entries_are_in_order_of_their_ids() -> None:
    catalog = Catalog(1000, source=Source("c", "a", "b"))
    await catalog.find("a")
    assert ids(catalog) == ["a", "b", "c"]


# --- watching ---------------------------------------------------------------------------------------------------------


async def test_the_list_follows_serve(watched: Callable[..., Catalog]) -> None:
    source = Source("a")
    catalog = watched(source)
    await eventually(lambda: ids(catalog) == ["a"])
    source.now = running("a", "b")
    await eventually(lambda: ids(catalog) == ["a", "b"])
    source.now = running("b")
    await eventually(lambda: ids(catalog) == ["b"])


async def test_added_models_are_announced_once(watched: Callable[..., Catalog]) -> None:
    announced: list[set[str]] = []
    source = Source("a", "b")
    catalog = watched(source, lambda added: announced.append(set(added)))
    await eventually(lambda: ids(catalog) == ["a", "b"])
    source.now = running("a", "b", "c")
    await eventually(lambda: ids(catalog) == ["a", "b", "c"])
    source.now = running("a")
    await eventually(lambda: ids(catalog) == ["a"])
    source.now = running("a", "c")
    await eventually(lambda: ids(catalog) == ["a", "c"])
    assert announced == [{"a", "b"}, {"c"}, {"c"}]


async def test_the_list_is_current_when_models_are_announced() -> None:
    seen: list[list[str]] = []
    catalog: Catalog = Catalog(1000, lambda added: seen.append(ids(catalog)), Source("a"))
    await catalog.find("a")
    assert seen == [["a"]]


async def test_watching_goes_on_after_the_controller_was_away(watched: Callable[..., Catalog]) -> None:
    source = Source("a")
    catalog = watched(source)
    await eventually(lambda: ids(catalog) == ["a"])
    source.now = RayActorError()
    reads = source.reads
    await eventually(lambda: source.reads > reads + 2)
    source.now = running("a", "b")
    await eventually(lambda: ids(catalog) == ["a", "b"])


async def test_watching_goes_on_after_an_error_nobody_foresaw(
    watched: Callable[..., Catalog], caplog: pytest.LogCaptureFixture
) -> None:
    """Else a gateway would never see another model, and nothing would say so."""
    source = Source("a")
    catalog = watched(source)
    await eventually(lambda: ids(catalog) == ["a"])
    source.now = KeyError("a field that this release does not have")
    reads = source.reads
    await eventually(lambda: source.reads > reads + 2)
    source.now = running("a", "b")
    await eventually(lambda: ids(catalog) == ["a", "b"])
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


async def test_watching_goes_on_when_a_model_cannot_be_prepared(watched: Callable[..., Catalog]) -> None:
    """A model may be deleted between being seen and being prepared for."""

    def prepare(added: set[str]) -> None:
        if "gone" in added:
            raise KeyError("Deployment(name='Model', app='gone') does not exist.")

    source = Source("a", "gone")
    catalog = watched(source, prepare)
    await eventually(lambda: source.reads > 2)
    source.now = running("a", "b")
    await eventually(lambda: ids(catalog) == ["a", "b"])


async def test_closing_ends_the_watching() -> None:
    source = Source("a")
    catalog = Catalog(0.001, source=source)
    catalog.start()
    await eventually(lambda: source.reads > 2)
    await catalog.aclose()
    reads = source.reads
    await asyncio.sleep(0.02)
    assert source.reads == reads


async def test_a_catalog_that_never_watched_can_be_closed() -> None:
    await Catalog(1000, source=Source()).aclose()


# --- Serve's status ---------------------------------------------------------------------------------------------------


def application(
    status: ApplicationStatus,
    deployment: str = "Model",
    message: str = "",
    trigger: DeploymentStatusTrigger = DeploymentStatusTrigger.CONFIG_UPDATE_COMPLETED,
    replicas: Sequence[ReplicaState] = (),
    said: str = "",
) -> dict[str, Any]:
    """As Serve's details have it."""
    details = {"status_trigger": trigger, "message": said, "replicas": [{"state": state} for state in replicas]}
    return {
        "status": status,
        "message": message,
        "last_deployed_time_s": 12.9,
        "deployments": {deployment: details, "Entry": details},
    }


def building(import_path: str = "deployments.app:model") -> dict[str, Any]:
    """As Serve's details have it between a config and what it makes of it."""
    config = {"import_path": import_path, "args": {"backend": {"kind": "fake"}, "aliases": ["other"]}}
    return application(ApplicationStatus.DEPLOYING) | {"deployments": {}, "deployed_app_config": config}


def test_a_model_that_is_being_built_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts meanwhile has nothing else to know it by."""
    Controller({"m": building(), "gateway": building("deployments.app:gateway")}, monkeypatch)
    expected = ModelEntry("m", 12, ready=False, offer=Offer(aliases=("other",)), replicas=0)
    assert ServeStatus()() == {"m": Application(expected, failure=None, building=True)}


async def test_a_model_that_is_being_built_anew_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "FORGET_AFTER_S", 1000.0)
    up = application(ApplicationStatus.RUNNING, replicas=[ReplicaState.RUNNING] * 2)
    controller = Controller({"m": up}, monkeypatch)
    catalog = Catalog(1000)
    assert (await catalog.find("m")).replicas == 2
    controller.applications = {"m": building(), "new": building()}
    assert not (await catalog.find("new")).ready
    assert (await catalog.find("m")).replicas == 2
    controller.applications = {"m": application(ApplicationStatus.DELETING), "newer": building()}
    await catalog.find("newer")
    with pytest.raises(ModelNotFound):
        await catalog.find("m")


class Controller:
    """Serve's, as far as it is asked; every state of `applications` has a status of its own."""

    def __init__(self, applications: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.applications = applications
        self.reads = 0
        monkeypatch.setattr(ray_compat, "serve_statuses", lambda: [repr(self.applications).encode()])
        monkeypatch.setattr(ray_compat, "serve_details", self.details)

    def details(self) -> dict[str, Any]:
        self.reads += 1
        return {"applications": copy.deepcopy(self.applications)}


def test_models_are_the_applications_with_a_model_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, up = DeploymentStatusTrigger.REPLICA_STARTUP_FAILED, [ReplicaState.RUNNING]
    applications = {
        "gateway": application(ApplicationStatus.RUNNING, deployment="Gateway"),
        "up": application(ApplicationStatus.RUNNING, replicas=up),
        "asleep": application(ApplicationStatus.RUNNING),
        "loading": application(ApplicationStatus.DEPLOYING, replicas=[ReplicaState.STARTING]),
        "updating": application(ApplicationStatus.DEPLOYING, replicas=[ReplicaState.STARTING, *up]),
        "sick": application(ApplicationStatus.UNHEALTHY),
        "broken": application(ApplicationStatus.DEPLOY_FAILED, message="no such file"),
        "not woken": application(ApplicationStatus.UNHEALTHY, trigger=failed, said="BackendStartError: no memory"),
        "one of two": application(ApplicationStatus.UNHEALTHY, message="no memory", trigger=failed, replicas=up),
        "not replaced": application(ApplicationStatus.DEPLOY_FAILED, message="no such file", replicas=up),
        "leaving": application(ApplicationStatus.DELETING),
        "absent": application(ApplicationStatus.NOT_STARTED),
    }
    Controller(applications, monkeypatch)
    status = ServeStatus()()
    assert {name: app.failure for name, app in status.items()} == {
        "up": None,
        "asleep": None,
        "loading": None,
        "updating": None,
        "sick": None,
        "broken": "no such file",
        "not woken": "BackendStartError: no memory",
        "one of two": None,
        "not replaced": None,
        "leaving": None,
        "absent": None,
    }
    assert [name for name, app in status.items() if app.leaving] == ["leaving", "absent"]
    assert [name for name, app in status.items() if app.entry.ready] == [
        "up",
        "asleep",
        "updating",
        "one of two",
        "not replaced",
    ]
    assert status["up"].entry == ModelEntry("up", 12)
    assert {name: (app.entry.replicas, app.entry.starting) for name, app in list(status.items())[:3]} == {
        "up": (1, 0),
        "asleep": (0, 0),
        "loading": (0, 1),
    }


def test_a_replica_that_was_killed_as_it_started_is_no_model_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
    apps = {"m": application(ApplicationStatus.UNHEALTHY, trigger=trigger)}
    Controller(apps, monkeypatch)
    status = ServeStatus()
    apps["m"]["deployments"]["Model"]["message"] = "The deployment failed to start 1 times: ActorDiedError"
    assert status()["m"].failure is None
    apps["m"]["deployments"]["Model"]["message"] = "failed to start: backends.base.BackendStartError: no such file"
    assert "no such file" in (status()["m"].failure or "")


async def test_what_serve_loses_sight_of_is_still_there(
    watched: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its controller restarts, Serve's status lacks what it has."""
    monkeypatch.setattr(catalog_module, "FORGET_AFTER_S", 60.0)
    source = Source("a", "b")
    catalog = watched(source)
    await eventually(lambda: ids(catalog) == ["a", "b"])
    source.now = running("b")
    reads = source.reads
    await eventually(lambda: source.reads > reads + 3)
    assert ids(catalog) == ["a", "b"]
    assert (await catalog.find("a")).id == "a"


async def test_what_is_deleted_is_gone_at_once(
    watched: Callable[..., Catalog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "FORGET_AFTER_S", 60.0)
    source = Source("a", "b")
    catalog = watched(source)
    await eventually(lambda: ids(catalog) == ["a", "b"])
    source.now = {**running("b"), "a": Application(ModelEntry("a", 7), failure=None, leaving=True)}
    await eventually(lambda: ids(catalog) == ["b"])
    with pytest.raises(ModelNotFound):
        await catalog.find("a")
    source.now = running("b")
    reads = source.reads
    await eventually(lambda: source.reads > reads + 3)
    assert ids(catalog) == ["b"]


def test_what_models_offer_is_read_again_when_one_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the config, so that a model that sleeps offers it too."""
    args = {"backend": {"kind": "fake"}, "aliases": ["gpt"]}
    model = application(ApplicationStatus.RUNNING) | {"deployed_app_config": {"args": args}}
    Controller({"m": model}, monkeypatch)
    status = ServeStatus()
    assert status()["m"].entry.offer == Offer(aliases=("gpt",))
    hot = [{"name": "Model", "user_config": {"aliases": ["hot"]}}]
    model |= {"deployed_app_config": {"args": args, "deployments": hot}, "last_deployed_time_s": 13.0}
    assert status()["m"].entry.offer == Offer(aliases=("hot",))
    model |= {"deployed_app_config": {"args": {"of": "another version"}}, "last_deployed_time_s": 14.0}
    assert status()["m"].entry.offer == Offer()
    model |= {"deployed_app_config": None, "last_deployed_time_s": 15.0}  # by hand
    assert status()["m"].entry.offer == Offer()


def test_serves_details_are_asked_for_when_something_changed_or_they_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    apps = {"m": application(ApplicationStatus.RUNNING, replicas=[ReplicaState.RUNNING])}
    controller = Controller(apps, monkeypatch)
    status = ServeStatus()
    for _ in range(3):
        assert status()["m"].entry.replicas == 1
    assert controller.reads == 1
    apps["m"]["deployments"]["Model"]["replicas"] = []
    assert status()["m"].entry.replicas == 0
    assert controller.reads == 2
    monkeypatch.setattr(catalog_module, "DETAILS_S", 0.0)
    status()
    assert controller.reads == 3
