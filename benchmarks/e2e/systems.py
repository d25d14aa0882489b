"""What is compared: our replicas by our rule and by Serve's, and llama-server alone with as many threads and slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from backends.model_source import resolve_model
from benchmarks.engine import llama_server
from benchmarks.router_live import system as live
from benchmarks.router_live.system import Shape

OURS = "Tokenyard"
DEFAULT_ROUTING = "Tokenyard, Serve's routing"
LLAMA_SERVER = "llama-server"
PORT = 8124


class System(msgspec.Struct, frozen=True):
    """`rule` is a router's class, None ours; with `threads` it is llama-server, and they are all it has."""

    name: str
    rule: str | None = None
    threads: int = 0


class Running(msgspec.Struct, frozen=True):
    url: str
    pid: int


def systems(shape: Shape) -> list[System]:
    """llama-server has the sum of the replicas' threads; where that is more than there are cores, it gets a second run
    with one per core, as its threads wait for each other and lose by being too many.
    """
    total, cores = shape.replicas * shape.threads, len(os.sched_getaffinity(0))
    counts = [total] if total <= cores else [total, cores]
    theirs = [System(f"{LLAMA_SERVER}, {count} threads", threads=count) for count in counts]
    return [System(OURS), *theirs, System(DEFAULT_ROUTING, "benchmarks.router_live.routers.PowerOfTwo")]


@contextmanager
def running(system: System, shape: Shape) -> Iterator[Running]:
    if not system.threads:
        with live.running(system.rule, shape) as server:
            yield Running(live.URL, server.pid)
        return
    with llama_server.running(
        resolve_model(live.MODEL_FILE),
        PORT,
        slots=shape.replicas * shape.slots,
        context_length=shape.context_length,
        threads=system.threads,
        options=["--cache-ram", str(shape.replicas * shape.prompt_cache_mib)],
    ) as pid:
        yield Running(f"http://127.0.0.1:{PORT}", pid)
