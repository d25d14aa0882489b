"""What a replica and a gateway cost Serve's controller, measured on a local Ray with replicas that do nothing.

    python -m benchmarks.scaling.controller --replicas 5 20 40 --gateways 1 4

At each size, first with stats that never change and then with stats that do at every look: the controller's CPU, how
long its control loop takes and how often it turns. Gateways are actors that have a handle with our router, and so get
every change of the list of replicas.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.request_router import RequestRouter, RunningReplica
from ray.serve.schema import ServeDeploySchema

from benchmarks.scaling.tiny import APP, DEPLOYMENT
from deployments import cluster, ray_compat

CONTROLLER_TITLE = "ray::ServeController"
READY_WITHIN_S = 400.0


class Measured(msgspec.Struct, frozen=True):
    """`cpu`: cores the controller took. Of the control loop: turns per second and seconds of a turn."""

    replicas: int
    gateways: int
    moving: bool
    cpu: float
    turns_per_s: float
    turn_mean_s: float
    deployments_mean_s: float
    """Of a turn: looking after replicas, which is where health checks, stats and lists of replicas are."""
    updates_per_s: float
    """Lists of replicas that a gateway got."""
    gateway_cpu: float
    """Cores a gateway took."""


def config(replicas: int) -> ServeDeploySchema:
    application: dict[str, Any] = {
        "name": APP,
        "route_prefix": None,
        "import_path": "benchmarks.scaling.tiny:build",
        "args": {},
        "deployments": [
            {"name": DEPLOYMENT, "autoscaling_config": {"min_replicas": replicas, "max_replicas": replicas}}
        ],
    }
    return ServeDeploySchema.model_validate({"proxy_location": "Disabled", "applications": [application]})


class Gateway:
    """A caller's process: Serve brings it every list of replicas."""

    def __init__(self) -> None:
        self.updates = 0
        update = RequestRouter.update_replicas  # Serve pickles our class by value: a copy of it would not be reached

        def counted(router: RequestRouter, replicas: list[RunningReplica]) -> None:
            self.updates += 1
            update(router, replicas)

        setattr(RequestRouter, update.__name__, counted)
        self._handle = serve.get_deployment_handle(DEPLOYMENT, APP)
        ray_compat.warm_up(self._handle)

    def so_far(self) -> tuple[int, float]:
        """Lists it got, and seconds of CPU it took."""
        return self.updates, time.process_time()


@contextmanager
def running() -> Iterator[None]:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    with cluster.running_cluster(config(1), say, "local"):
        yield


def scale(replicas: int) -> None:
    ray_compat.deploy(config(replicas))
    began = time.monotonic()
    while True:
        found = {app.name: app for app in cluster.statuses()}.get(APP)
        if found is not None and found.status == "RUNNING" and found.replicas == {"RUNNING": replicas}:
            return
        if time.monotonic() - began > READY_WITHIN_S:
            sys.exit(f"{replicas} replicas did not come up: {found}")
        time.sleep(1.0)


def controller_process() -> psutil.Process:
    (found,) = [p for p in psutil.Process().children(recursive=True) if p.name().startswith(CONTROLLER_TITLE[:15])]
    return found


def measure(replicas: int, gateways: list[Any], span_s: float, *, moving: bool) -> Measured:
    controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    process = controller_process()

    def look() -> tuple[float, float, dict[str, Any], list[tuple[int, float]]]:
        times = process.cpu_times()
        health: dict[str, Any] = ray.get(controller.get_health_metrics.remote())
        return time.monotonic(), times.user + times.system, health, ray.get([g.so_far.remote() for g in gateways])

    began, cpu, health, gone = look()
    time.sleep(span_s)
    ended, cpu_after, health_after, gone_after = look()
    seconds = ended - began
    got = [(after[0] - before[0], after[1] - before[1]) for before, after in zip(gone, gone_after, strict=True)]
    return Measured(
        replicas,
        len(gateways),
        moving,
        (cpu_after - cpu) / seconds,
        (health_after["num_control_loops"] - health["num_control_loops"]) / seconds,
        health_after["loop_duration_s"]["mean"],
        health_after["deployment_state_update_duration_s"]["mean"],
        sum(updates for updates, _ in got) / len(got) / seconds,
        sum(used for _, used in got) / len(got) / seconds,
    )


def table(rows: list[Measured]) -> str:
    lines = [
        "| replicas | gateways | stats | controller CPU, cores | turns/s | a turn, ms | of it deployments | "
        "lists/s per gateway | CPU of a gateway, cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.replicas} | {row.gateways} | {'change' if row.moving else 'stay'} | {row.cpu:.3f} "
            f"| {row.turns_per_s:.1f} | {row.turn_mean_s * 1e3:.1f} | {row.deployments_mean_s * 1e3:.1f} "
            f"| {row.updates_per_s:.2f} | {row.gateway_cpu:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[5, 20, 40])
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 4], help="more than the first at the last size")
    parser.add_argument("--span", type=float, default=20.0, help="seconds of each measurement")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    rows: list[Measured] = []
    gateways: list[Any] = []
    gateway: Any = ray.remote(num_cpus=0)(Gateway)

    def add(replicas: int, *, moving: bool) -> None:
        serve.get_deployment_handle(DEPLOYMENT, APP).broadcast("set_moving", moving).results()
        time.sleep(args.settle)
        rows.append(measure(replicas, gateways, args.span, moving=moving))
        print(rows[-1], file=sys.stderr, flush=True)

    with running():
        for size in args.replicas:
            scale(size)
            while len(gateways) < args.gateways[0]:
                gateways.append(gateway.remote())
            add(size, moving=False)
            add(size, moving=True)
        for count in args.gateways[1:]:
            while len(gateways) < count:
                gateways.append(gateway.remote())
            add(args.replicas[-1], moving=True)
    load = f"load average {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {load}\n")
    print(table(rows))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
