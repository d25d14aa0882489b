"""What goes wrong: processes that are killed, a node that is lost, a setting that is changed under load."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from deployments import cluster

CONTROLLER = "ray::ServeController"
"""How Ray titles its process."""


class Monkey(threading.Thread):
    """Does one of `faults` after another, `pause_s` apart, in random order, each at least once if time allows."""

    def __init__(self, faults: dict[str, Callable[[], str]], pause_s: float, for_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._faults = faults
        self._pause_s = pause_s
        self._ends = time.monotonic() + for_s
        self._draw = random.Random(seed)
        self.done: list[tuple[float, str]] = []
        self.error: BaseException | None = None

    @property
    def over(self) -> bool:
        return time.monotonic() > self._ends or self.error is not None

    def run(self) -> None:
        started = time.monotonic()
        try:
            while not self.over:
                for name in self._draw.sample(sorted(self._faults), len(self._faults)):
                    time.sleep(self._pause_s)
                    if self.over:
                        return
                    what = self._faults[name]()
                    self.done.append((time.monotonic(), name))
                    print(f"{time.monotonic() - started:5.1f} s  {name}: {what}", flush=True)
        except BaseException as error:  # shown by the test, which waits for `over`
            self.error = error


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
