"""A local Ray with Serve, for `tokenyard serve`: what is started here is what is stopped here, and nothing else."""

from __future__ import annotations

import errno
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from deployments.settings import export_local_ray_environment

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

DEPLOY_POLL_S = 0.5
OBJECT_STORE_BYTES = 256 * 2**20
"""Tokens do not pass the object store; only requests over 3 MiB do. Ray's default takes 30 % of the memory."""


class ClusterError(Exception):
    """One line for the operator."""


class AppStatus(msgspec.Struct, frozen=True):
    name: str
    status: str
    message: str
    replicas: dict[str, int]


def port_holder(host: str, port: int) -> str | None:
    """Who listens on the port, as `name (pid N)`; `another process` if that cannot be seen; None if it is free.

    Raises `ClusterError` if nobody could listen there: it is no address of this machine, or not permitted.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ClusterError(f"Cannot listen on port {port} of {host}: {error.strerror}.") from None
        else:
            return None
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        pass
    return "another process"


def require_free(host: str, port: int) -> None:
    holder = port_holder(host, port)
    if holder is None:
        return
    hint = ""
    if holder.startswith("haproxy"):
        hint = " It was left behind by an earlier cluster: end it by that id."
    raise ClusterError(f"Port {port} on {host} is taken by {holder}.{hint} Free it, or set http_options.port.")


def connect(address: str = "auto") -> bool:
    """Join a Ray cluster: by default the one that runs on this machine (or RAY_ADDRESS). False if there is none."""
    import ray  # here, as everywhere in this module: the environment must be set before Ray is imported

    from deployments import ray_compat

    if not ray_compat.cluster_answers(address):
        return False
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    return True


@contextmanager
def running_cluster(config: ServeDeploySchema, say: Callable[[str], None], address: str = "auto") -> Iterator[bool]:
    """Ray and Serve, joined or started. Yields whether Serve was started here; on exit stops what was started here.

    `address` is Ray's: `auto` joins the cluster of this machine if there is one, `local` always starts a new one.
    """
    import ray
    from ray import serve

    from deployments import ray_compat

    host, port = config.http_options.host, config.http_options.port
    joined = address != "local" and connect(address)
    if not joined and address not in ("auto", "local"):
        raise ClusterError(f"No Ray cluster answers at {address}.")
    if not joined:
        require_free(host, port)
        say("starting a local Ray")
        export_local_ray_environment()
        ray.init(
            address="local",
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
        )
        ray_compat.end_idle_processes()
    ours = False
    try:
        if not ray_compat.serve_is_running():
            require_free(host, port)
            say("starting Serve")
            ours = True
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            ray_compat.start_serve(config)
        yield ours
    except ray.exceptions.RayError as error:
        ours = False
        raise ClusterError(f"The Ray cluster went away ({type(error).__name__}).") from error
    finally:
        with ray_compat.cluster_messages_muted():
            if ours:
                say("stopping Serve")
                # Before Ray: an HAProxy that outlives its cluster keeps the port and answers 500.
                serve.shutdown()  # type: ignore[no-untyped-call]  # Ray does not type it
            if not joined:
                say("stopping Ray")
            ray.shutdown()


def failure_reason(message: str) -> str:
    """The one line that says why, from a deployment's message: Serve hands out the traceback of the constructor."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    if "Error:" not in message:
        return " ".join(lines)
    return re.sub(r"^[\w.]+(Error|Exception): ", "", lines[-1])


def statuses() -> list[AppStatus]:
    from ray import serve

    return [
        AppStatus(
            name,
            app.status.value,
            "; ".join(
                failure_reason(deployment.message)
                for deployment in app.deployments.values()
                if deployment.status.value in ("DEPLOY_FAILED", "UNHEALTHY") or "failed to start" in deployment.message
            )
            or " ".join(app.message.split()),
            {
                state: count
                for deployment in app.deployments.values()
                for state, count in deployment.replica_states.items()
                if count
            },
        )
        for name, app in sorted(serve.status().applications.items())
    ]


def wait_until_deployed(names: set[str], say: Callable[[str], None]) -> list[AppStatus]:
    """Follows the applications until each of `names` runs or has failed; returns the failed ones."""
    started = time.monotonic()
    while True:
        apps = [app for app in statuses() if app.name in names]
        waiting = [app.name for app in apps if app.status not in ("RUNNING", "DEPLOY_FAILED")]
        if not waiting and len(apps) == len(names):
            say("")
            return [app for app in apps if app.status == "DEPLOY_FAILED"]
        say(f"loading {', '.join(waiting) or 'applications'} ({time.monotonic() - started:.0f} s)")
        time.sleep(DEPLOY_POLL_S)


def replica_pids() -> dict[str, dict[str, int]]:
    """Process ids by application and replica id; of replicas that have a process already."""
    from deployments import ray_compat

    details: dict[str, Any] = ray_compat.serve_details()
    return {
        name: {
            replica["replica_id"]: replica["pid"]
            for deployment in app["deployments"].values()
            for replica in deployment["replicas"]
            if replica.get("pid")
        }
        for name, app in details["applications"].items()
    }
