"""What we lean on in Ray beyond its public interface, held against the Ray that is installed. No cluster.

A failure here after an upgrade of Ray says which line of `ray_compat.py`, `router.py` or `app.py` to look at.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._common.usage import usage_constants
from ray._private import node, services, worker
from ray._private.accelerators import accelerator
from ray.serve import context
from ray.serve._private import api, constants, default_impl, replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.common import RequestMetadata
from ray.serve._private.controller import ServeController
from ray.serve._private.handle_options import DynamicHandleOptions, InitHandleOptions
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle
from ray.serve.request_router import RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema

from deployments import ray_compat, settings
from deployments.channel_call import ChannelCall, ChannelReplica
from deployments.router import ModelRouter

ROOT = Path(__file__).parents[2]


def parameters(function: Callable[..., Any]) -> list[str]:
    """Without `_ray_trace_ctx`, which Ray adds to the methods of each actor's class once traces are on in a process."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "_ray_trace_ctx")]


def recorder(real: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., None]:
    """Stands in for `real`, and fails on a call that `real` would not take."""
    signature = inspect.signature(real)

    def record(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        unexpected = bound.arguments.get("kwargs")
        assert not unexpected, f"{unexpected} would be swallowed"
        calls.append(dict(bound.arguments))

    return record


# --- the version ------------------------------------------------------------------------------------------------------


def test_the_installed_ray_is_the_pinned_one() -> None:
    assert ray_compat.PINNED_RAY_VERSION == ray.__version__


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_the_same_version_is_pinned_for_installation(file: str) -> None:
    pins = re.findall(r"^\s*\"?ray(?:\[serve\])?==([\d.]+)", (ROOT / file).read_text(), flags=re.M)
    assert pins == [ray_compat.PINNED_RAY_VERSION]


# --- finding a cluster ------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> Iterator[str]:
    # On every address, as Ray's own server: Ray takes 127.0.0.1 for this machine, and asks for it by its other address.
    with socket.create_server(("", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_cluster_answers_where_somebody_listens(listening: str, silent: str) -> None:
    assert ray_compat.cluster_answers(listening)
    assert not ray_compat.cluster_answers(silent)


def test_auto_follows_ray_address(listening: str, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    assert ray_compat.cluster_answers("auto")
    monkeypatch.setenv("RAY_ADDRESS", silent)
    assert not ray_compat.cluster_answers("auto")


def test_where_ray_knows_of_no_cluster_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "addr" in parameters(services.canonicalize_bootstrap_address)

    def unknown(address: str) -> str:
        raise ConnectionError

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", unknown)
    assert not ray_compat.cluster_answers("auto")


@pytest.mark.parametrize("address", ["local", "nonsense", "host:port", ""])
def test_an_address_of_no_cluster_is_no_cluster(address: str) -> None:
    assert not ray_compat.cluster_answers(address)


def test_what_the_cluster_reports_is_printed_by_the_function_we_replace() -> None:
    printer = worker.print_to_stdstream
    assert parameters(printer) == ["data", "ignore_prefix"]
    # Looked up in its module each time: what is set there is what runs.
    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names
    with ray_compat.cluster_messages_muted():
        assert worker.print_to_stdstream is not printer
        worker.print_to_stdstream({"lines": ["not printed"]}, ignore_prefix=True)
    assert worker.print_to_stdstream is printer


# --- handles ----------------------------------------------------------------------------------------------------------


class Routers:
    """Stands in for Serve's way to make a router, which needs a cluster."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def __call__(self, **kwargs: Any) -> object:
        self.made.append(kwargs)
        return object()


def handle(routers: Routers) -> DeploymentHandle[Any]:
    return DeploymentHandle("Model", "m", _create_router=routers)  # type: ignore[arg-type]


def test_a_streaming_handle_goes_where_it_is_told() -> None:
    routers = Routers()
    plain = handle(routers)
    for by_reference in (True, False):
        streaming = ray_compat.streaming_handle(plain, by_reference=by_reference)
        assert streaming.handle_options == DynamicHandleOptions(stream=True, _by_reference=by_reference)
        assert (streaming.deployment_name, streaming.app_name) == ("Model", "m")
    assert len(routers.made) == 1, "handles made from one share its router"


def test_a_unary_handle_goes_where_it_is_told() -> None:
    """Also one that is made from a streaming handle."""
    routers = Routers()
    plain = handle(routers)
    for source in (plain, ray_compat.streaming_handle(plain, by_reference=True)):
        for by_reference in (True, False):
            unary = ray_compat.unary_handle(source, by_reference=by_reference)
            assert unary.handle_options == DynamicHandleOptions(stream=False, _by_reference=by_reference)
            assert unary.answer.handle_options == DynamicHandleOptions("answer", _by_reference=by_reference)
            assert (unary.deployment_name, unary.app_name) == ("Model", "m")
    assert len(routers.made) == 1, "handles made from one share its router"


def test_a_method_of_a_streaming_handle_keeps_its_options() -> None:
    generate = ray_compat.streaming_handle(handle(Routers()), by_reference=True).generate
    assert generate.handle_options == DynamicHandleOptions("generate", stream=True, _by_reference=True)


def test_warming_up_makes_the_router_once() -> None:
    routers = Routers()
    cold = handle(routers)
    assert not cold.is_initialized
    ray_compat.warm_up(cold)
    assert cold.is_initialized
    ray_compat.warm_up(cold)
    assert len(routers.made) == 1
    assert routers.made[0]["deployment_id"].app_name == "m"


def metadata() -> RequestMetadata:
    made: RequestMetadata = default_impl.get_request_metadata(InitHandleOptions.create(), DynamicHandleOptions())
    return made


def test_two_calls_of_one_request_have_one_name_unless_each_has_an_empty_context() -> None:
    """Why `Dispatcher` makes its calls in empty contexts: Serve matches waiting calls to replicas by this name."""

    def calls_of_a_request() -> tuple[set[str], set[str]]:
        context._set_request_context(_internal_request_id="the request")
        shared = {metadata().internal_request_id for _ in range(2)}
        own = {contextvars.Context().run(metadata).internal_request_id for _ in range(2)}
        return shared, own

    shared, own = contextvars.copy_context().run(calls_of_a_request)
    assert shared == {"the request"}
    assert len(own) == 2
    assert not own & shared


# --- the controller ---------------------------------------------------------------------------------------------------


def schema() -> ServeDeploySchema:
    raw = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8123},
        "controller_options": {},
        "applications": [],
    }
    return ServeDeploySchema.model_validate(raw)


def test_serve_is_started_with_the_configs_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "serve_start", recorder(api.serve_start, calls))
    config = schema()
    ray_compat.start_serve(config)
    (call,) = calls
    assert HTTPOptions.model_validate(call["http_options"]).host == "127.0.0.1"
    assert HTTPOptions.model_validate(call["http_options"]).port == 8123
    assert gRPCOptions.model_validate(call["grpc_options"]).port == config.grpc_options.port
    assert call["proxy_location"] == config.proxy_location
    assert call["controller_options"] is config.controller_options


class Client:
    """A controller client that takes what the real one takes."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._deploy_apps = recorder(ServeControllerClient.deploy_apps, self.calls)

    def deploy_apps(self, *args: Any, **kwargs: Any) -> None:
        self._deploy_apps(self, *args, **kwargs)

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {}}


def test_a_config_is_deployed_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(context, "_get_global_client", lambda: client)
    config = schema()
    ray_compat.deploy(config)
    (call,) = client.calls
    assert call["config"] is config
    assert call["_blocking"] is False


def test_details_come_from_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(ServeControllerClient.get_serve_details) == []
    monkeypatch.setattr(context, "_get_global_client", Client)
    assert ray_compat.serve_details() == {"applications": {}}


def test_statuses_come_from_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithController(Client):
        def __init__(self) -> None:
            super().__init__()
            answer = SimpleNamespace(remote=lambda: "a reference")
            self._controller = SimpleNamespace(list_serve_statuses=answer)

    assert parameters(ServeController.list_serve_statuses) == []
    assert parameters(ServeControllerClient.__init__)[0] == "controller"
    monkeypatch.setattr(context, "_get_global_client", WithController)
    monkeypatch.setattr(ray, "get", lambda reference: [reference.encode()])
    assert ray_compat.serve_statuses() == [b"a reference"]


def test_a_missing_controller_is_not_an_error_but_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.context is context
    assert parameters(context._get_global_client) == ["raise_if_no_controller_running"]
    found: list[object] = []

    def get_global_client(raise_if_no_controller_running: bool = True) -> object:
        assert not raise_if_no_controller_running
        return found[0] if found else None

    monkeypatch.setattr(context, "_get_global_client", get_global_client)
    assert not ray_compat.serve_is_running()
    found.append(object())
    assert ray_compat.serve_is_running()


def test_a_controller_that_died_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(raise_if_no_controller_running: bool = True) -> object:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(context, "_get_global_client", dead)
    assert not ray_compat.serve_is_running()


# --- what Serve calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook", ["initialize_state", "update_replicas", "choose_replicas", "on_request_routed", "on_request_completed"]
)
def test_our_router_takes_what_serve_passes(hook: str) -> None:
    theirs, ours = inspect.signature(getattr(RequestRouter, hook)), inspect.signature(getattr(ModelRouter, hook))
    assert [p.kind for p in ours.parameters.values()] == [p.kind for p in theirs.parameters.values()]
    named = [name for name, p in theirs.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [name for name, p in ours.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD] == named
    assert asyncio.iscoroutinefunction(getattr(ModelRouter, hook)) == (hook == "choose_replicas")


def test_all_replicas_can_be_called() -> None:
    """Public, and "alpha"."""
    assert parameters(DeploymentHandle.broadcast) == ["method_name", "args", "kwargs"]
    assert asyncio.iscoroutinefunction(DeploymentBroadcastResponse.results_async)


def test_our_wrapper_of_a_replica_takes_what_serve_passes() -> None:
    """It is made by the router, and asked what Serve's own is asked."""
    assert parameters(RequestRouter.create_replica_wrapper) == parameters(ModelRouter.create_replica_wrapper)
    for hook in ("try_send_request", "get_queue_len"):
        theirs, ours = getattr(RunningReplica, hook), getattr(ChannelReplica, hook)
        assert ours is not theirs
        assert parameters(ours) == parameters(theirs)
        assert asyncio.iscoroutinefunction(ours) == asyncio.iscoroutinefunction(theirs)


def test_what_our_wrapper_returns_has_all_that_serve_asks_of_it() -> None:
    assert not inspect.isabstract(ChannelCall)
    for name in ray_compat.ReplicaResult.__abstractmethods__:
        theirs, ours = getattr(ray_compat.ReplicaResult, name), getattr(ChannelCall, name)
        assert parameters(ours) == parameters(theirs)
        assert asyncio.iscoroutinefunction(ours) == asyncio.iscoroutinefunction(theirs)
    fields = inspect.signature(ray_compat.ReplicaQueueLengthInfo).parameters
    assert list(fields) == ["accepted", "num_ongoing_requests"]


def test_serve_asks_each_time_whether_to_watch_for_clients_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this function of its module, and watches for nobody who has said no: unless there is a timeout of its own."""
    name = "parse_disconnect_disabled_header"
    real = getattr(replica, name)
    assert parameters(real) == ["headers"] and real({b"x-request-disconnect-disabled": b"?1"})
    assert name in replica.Replica._direct_ingress_asgi.__code__.co_names
    monkeypatch.setattr(replica, name, real)  # what it was, it will be
    ray_compat.leave_disconnects_to_the_app()
    assert getattr(replica, name)({}) is True


@pytest.mark.parametrize("by_reference", [True, False])
def test_a_call_knows_whether_it_goes_by_reference(by_reference: bool) -> None:
    options = DynamicHandleOptions(_by_reference=by_reference)
    made = default_impl.get_request_metadata(InitHandleOptions.create(), options)
    assert ray_compat.by_reference(made) is by_reference


def test_serve_repeats_at_once_unless_told_otherwise() -> None:
    assert RequestRoutingContext().should_backoff is False


def test_a_running_replica_has_its_metadata() -> None:
    assert isinstance(RunningReplica.replica_metadata, property)
    assert isinstance(RunningReplica.replica_id, property)


def test_the_hooks_of_our_deployments_are_the_ones_serve_looks_for() -> None:
    from deployments import app
    from deployments.replica import Replica

    assert constants.RECORD_REPLICA_METADATA_METHOD == "record_replica_metadata"
    assert hasattr(Replica, constants.RECORD_REPLICA_METADATA_METHOD)
    assert hasattr(app._Gateway, replica.SERVE_BUILD_ASGI_APP_METHOD)
    assert constants.HEALTH_CHECK_METHOD == "check_health"
    assert asyncio.iscoroutinefunction(Replica.check_health)


def test_the_environment_we_set_is_environment_ray_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    settings.export_ray_environment("python")
    settings.export_ray_environment("haproxy")
    sources = "".join(inspect.getsource(module) for module in (constants, usage_constants, accelerator))
    unread = [
        name
        for name in (environment | settings.GATEWAY_ENV).keys() - settings.VLLM_ENV.keys()
        if f'"{name}"' not in sources
    ]
    assert unread == []


def test_a_clusters_idle_processes_can_be_ended() -> None:
    assert hasattr(worker, "_global_node")
    for end in (node.Node.kill_dashboard, node.Node.kill_log_monitor, node.Node.kill_monitor):
        assert "check_alive" in inspect.signature(end).parameters
