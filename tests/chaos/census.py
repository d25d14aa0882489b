"""What the system holds when nobody asks: counted before and after a load, it has to be the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
from ray import serve

from backends.base import BackendStats
from deployments.held import Held
from deployments.settings import MODEL_DEPLOYMENT

SETTLED_S = 60.0
"""Within that everything is back: HAProxy closes connections that it has no use for, a few every five seconds."""


class Count(msgspec.Struct, frozen=True):
    """Of one process. `fronts` are its connections from HAProxy, which keeps some to use again; the descriptors are
    those beside them."""

    name: str
    pid: int
    descriptors: int
    threads: int
    tasks: int
    streams: int
    fronts: int


def count(deployments: Sequence[tuple[str, str]]) -> list[Count]:
    """All replicas of these, each as (deployment, application)."""
    found = []
    for deployment, application in deployments:
        for held in _broadcast(deployment, application, "held"):
            found.append(_count(application, held))
    return sorted(found, key=lambda count: (count.name, count.pid))


def _count(name: str, held: Held) -> Count:
    process = psutil.Process(held.pid)
    connections = process.net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.laddr}
    fronts = (
        [c for c in connections if c.status != psutil.CONN_LISTEN and c.laddr and c.laddr.port in listening]
        if name == "gateway"
        else []
    )
    return Count(
        name,
        held.pid,
        process.num_fds() - len(fronts),
        process.num_threads(),
        held.tasks,
        held.streams,
        len(fronts),
    )


def stats(model: str) -> list[BackendStats]:
    """What the engines of a model say of themselves."""
    return _broadcast(MODEL_DEPLOYMENT, model, "stats")


def slots_in_use(url: str, model: str) -> int:
    """By llama.cpp's own list of its slots, of all replicas."""
    slots = httpx2.get(f"{url}/slots", params={"model": model}, timeout=30).json()
    return sum(slot["is_processing"] for slot in slots)


def stored_responses(path: Path) -> int:
    if not path.exists():  # it is made with the first of them
        return 0
    with sqlite3.connect(path) as database:
        return int(database.execute("SELECT count(*) FROM responses").fetchone()[0])


def _broadcast(deployment: str, application: str, method: str) -> list[Any]:
    response = serve.get_deployment_handle(deployment, application).broadcast(method)
    return list(response.results(timeout_s=30))


def table(before: Sequence[Count], after: Sequence[Count]) -> str:
    lines = [
        "| process | descriptors | threads | tasks | streams | kept by the front |",
        "|---|---|---|---|---|---|",
    ]
    columns: tuple[Callable[[Count], int], ...] = (
        lambda c: c.descriptors,
        lambda c: c.threads,
        lambda c: c.tasks,
        lambda c: c.streams,
        lambda c: c.fronts,
    )
    for old, new in zip(before, after, strict=True):
        lines.append(f"| {old.name} {old.pid} | {' | '.join(f'{of(old)} -> {of(new)}' for of in columns)} |")
    return "\n".join(lines)
