"""Every private Ray name this project touches, pinned to one version; `tests/deployments/test_ray_compat.py` guards it.

Ray 2.60.0. Each function says what it needs and why there is no public way.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray._private import services, worker
from ray.serve._private import api as serve_api
from ray.serve._private import deploy_utils
from ray.serve._private import replica as serve_replica
from ray.serve._private.common import ReplicaQueueLengthInfo
from ray.serve._private.replica_result import ReplicaResult
from ray.serve.schema import ServeApplicationSchema

if TYPE_CHECKING:
    from ray.serve._private.client import ServeControllerClient
    from ray.serve._private.common import RequestMetadata
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ServeDeploySchema

__all__ = ["ReplicaQueueLengthInfo", "ReplicaResult"]
"""What a replica's wrapper gives Serve's router for a request that it has sent (`channel_call.py`): the wrapper is
public, as is a router that makes its own, but not what it returns.
"""

PINNED_RAY_VERSION = "2.60.0"


@contextmanager
def cluster_messages_muted() -> Iterator[None]:
    """Keeps Ray from printing what the cluster reports: while Serve is shut down it reports the controller's death.

    There is no option for it; the listener prints through this one function.
    """
    printing = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


def cluster_answers(address: str) -> bool:
    """Whether `ray.init(address)` has anybody to connect to.

    Ray remembers the address of a cluster that has died and tries it for tens of seconds, with a page of log lines.
    """
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError):  # Ray knows of none; the address is none
        return False
    if found is None:
        return False
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True


def end_idle_processes() -> None:
    """Of the cluster that this process has started: Ray's minimal dashboard, what looks for output of workers to print
    it, and the scaler of nodes. None of them has anything to do here, and each takes a hundred MB to look around.
    """
    node = worker._global_node
    assert node is not None, "a cluster was started"
    for end in (node.kill_dashboard, node.kill_log_monitor, node.kill_monitor):
        end(check_alive=False)


def streaming_handle(handle: DeploymentHandle[Any], *, by_reference: bool) -> DeploymentHandle[Any]:
    """`handle` for generator methods: over gRPC, or (`by_reference`) through the object store.

    `_by_reference` is private; the public way is an environment variable read at import on every node.
    """
    return handle.options(stream=True, _by_reference=by_reference)


def unary_handle(handle: DeploymentHandle[Any], *, by_reference: bool) -> DeploymentHandle[Any]:
    """The same for methods with one answer."""
    return handle.options(stream=False, _by_reference=by_reference)


def leave_disconnects_to_the_app() -> None:
    """In a gateway's process. Serve then does not watch for clients that leave, which the app does as well: a task, a
    queue and 8 KB for each stream. Clients can ask for that by a header; nothing of a deployment's can.
    """
    vars(serve_replica)["parse_disconnect_disabled_header"] = lambda headers: True


def by_reference(metadata: RequestMetadata) -> bool:
    """Whether a call's arguments go through the object store: what `streaming_handle` and `unary_handle` chose."""
    return metadata._by_reference


def warm_up(handle: DeploymentHandle[Any]) -> None:
    """Create the handle's router now, so that it knows the replicas before the first request. No public call does."""
    if not handle.is_initialized:
        handle._init()  # type: ignore[no-untyped-call]


def start_serve(config: ServeDeploySchema) -> None:
    """Start Serve with the config's options, or connect to it if it runs. `serve.start` takes no controller options."""
    serve_api.serve_start(
        http_options=config.http_options.model_dump(),
        proxy_location=config.proxy_location,
        grpc_options=config.grpc_options.model_dump(),
        controller_options=config.controller_options,
    )


def deploy(config: ServeDeploySchema) -> None:
    """Make `config` the desired state, as `serve run` does. The public way is the dashboard's REST interface."""
    _client().deploy_apps(config, _blocking=False)


def serve_is_running() -> bool:
    """Whether this Ray cluster has a Serve controller. `serve.status()` cannot tell 'none' from 'no applications'."""
    try:
        return serve.context._get_global_client(raise_if_no_controller_running=False) is not None
    except ray.exceptions.RayActorError:
        return False


def lost_nodes() -> frozenset[str]:
    """The ids of the nodes that were part of the cluster and are gone. Blocks: it asks the cluster's control store."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]  # Ray does not type it
    return frozenset(node["NodeID"] for node in nodes if not node["Alive"])


def _client() -> ServeControllerClient:
    client = serve.context._get_global_client()
    assert client is not None, "the call above raises when there is no controller"
    return client


def serve_statuses() -> list[bytes]:
    """The state of each application and deployment, encoded: equal lists say that nothing changed.

    Publicly there are the details only, which the controller takes longer to gather, and a caller to validate.
    """
    controller = _client()._controller
    statuses: list[bytes] = ray.get(controller.list_serve_statuses.remote())
    return statuses


def serve_details() -> dict[str, Any]:
    """Applications, deployments and replicas with their process ids. Publicly, only the dashboard's REST has them."""
    details = _client().get_serve_details()
    assert isinstance(details, dict)
    return details


def application_configs() -> dict[str, dict[str, Any]]:
    """What each application that a config deployed was deployed with. Publicly, only the dashboard's REST has them."""
    configs = {name: app.get("deployed_app_config") for name, app in serve_details()["applications"].items()}
    return {name: config for name, config in configs.items() if config}


def code_version(application: Mapping[str, Any]) -> str:
    """Serve's hash of what makes it restart all of an application. It has no public form."""
    return deploy_utils.get_app_code_version(ServeApplicationSchema.model_validate(application))
