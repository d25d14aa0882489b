"""What goes wrong: processes that are killed, a node that is lost, a setting that is changed under load."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deployments import cluster

CONTROLLER = "ray::ServeController"
"""How Ray titles its process."""


class Fault(msgspec.Struct, frozen=True):
    """`do` says what it did. `may` is asked before, with the time at which this fault was done last."""

    do: Callable[[], str]
    may: Callable[[float], bool] = lambda last: True


class Monkey(threading.Thread):
    """Does one of `faults` after another, `pause_s` apart: rounds of all of them, each round in a random order.

    One that may not be done yet is put off behind the others of its round. It goes on for `for_s`, and until every one
    was done, but for no longer than `MOST` times that.
    """

    MOST = 4

    def __init__(self, faults: dict[str, Fault], pause_s: float, for_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._faults = faults
        self._pause_s = pause_s
        self._for_s = for_s
        self._draw = random.Random(seed)
        self._began = time.monotonic()
        self.done: list[tuple[float, str]] = []
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        passed = time.monotonic() - self._began
        enough = len({name for _, name in self.done}) == len(self._faults)
        return self.error is not None or passed > (self._for_s if enough else self.MOST * self._for_s)

    def run(self) -> None:
        try:
            while not self.over:
                self._round(self._draw.sample(sorted(self._faults), len(self._faults)))
        except BaseException as error:  # shown by the test, which waits for `over`
            self.error = error

    def _round(self, names: list[str]) -> None:
        while names:
            time.sleep(self._pause_s)
            name = next((name for name in names if self._faults[name].may(self._last(name))), None)
            if self.over:
                return
            if name is not None:
                names.remove(name)
                what = self._faults[name].do()
                self.done.append((time.monotonic(), name))
                print(f"{time.monotonic() - self._began:5.1f} s  {name}: {what}", flush=True)

    def _last(self, name: str) -> float:
        return max((at for at, done in self.done if done == name), default=float("-inf"))


def kill_replica(application: str, draw: random.Random) -> str:
    pids = sorted(cluster.replica_pids().get(application, {}).values())
    if not pids:
        return "there is none at the moment"
    pid = draw.choice(pids)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return f"pid {pid} of {application} was gone already"
    return f"pid {pid} of {application}"


def whole(application: str, replicas: int) -> bool:
    """Whether that many replicas of it serve. Serve's status alone does not say: it takes seconds to miss a process."""
    app = next((app for app in cluster.statuses() if app.name == application), None)
    pids = cluster.replica_pids().get(application, {}).values()
    return app is not None and app.replicas.get("RUNNING", 0) >= replicas and all(map(psutil.pid_exists, pids))


def forwards_to_all() -> bool:
    """Whether the front knows every gateway. While the controller is away, it does not hear of new ones."""
    gateways = [psutil.Process(pid) for pid in cluster.replica_pids().get("gateway", {}).values()]
    ports = forwarded_ports()
    return all(ports.intersection(_listens_on(gateway)) for gateway in gateways)


def _listens_on(process: psutil.Process) -> set[int]:
    try:
        return {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr}
    except psutil.NoSuchProcess:
        return set()


def forwarded_ports() -> set[int]:
    """The ports of the servers that HAProxy thinks are up."""
    running = [p for p in psutil.process_iter(["name", "cmdline", "create_time"]) if p.info["name"] == "haproxy"]
    if not running:
        return set()
    arguments = max(running, key=lambda process: process.info["create_time"]).info["cmdline"]
    written = Path(arguments[arguments.index("-f") + 1]).read_text()
    (path,) = re.findall(r"^\s*stats socket (\S+)", written, re.MULTILINE)
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        control.sendall(b"show servers state\n")
        _, names, *rows = b"".join(iter(lambda: control.recv(65536), b"")).decode().strip().splitlines()
    servers = [dict(zip(names.removeprefix("# ").split(), row.split(), strict=False)) for row in rows]
    return {int(server["srv_port"]) for server in servers if server["srv_op_state"] == "2"}


def kill_controller() -> str:
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or ()).startswith(CONTROLLER)
    ]
    for process in found:
        process.kill()
    return ", ".join(f"pid {process.pid}" for process in found) or "there is none at the moment"


def lose_node(nodes: Any, add: Callable[[], object]) -> str:
    """A worker node of a `ray.cluster_utils.Cluster` goes at once, with all that ran on it; another one comes."""
    node = next(iter(nodes.worker_nodes))
    nodes.remove_node(node, allow_graceful=False)
    add()
    return "one gone, a new one added"
