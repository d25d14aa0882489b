"""The loads a running system is put under, one after the other."""

from __future__ import annotations

import asyncio
from typing import get_args

import msgspec

from benchmarks.relay.load import LoadResult, address, idle_stream_bytes, load, stream, tree_cpu_s
from benchmarks.relay.systems import HAPROXY, STEP_S, Running, Speed, System
from deployments.bench.dialects import Dialect, body
from deployments.bench.prompts import Prompt, Turn
from deployments.bench.report import percentile

COUNTS = (1, 32, 128, 512)
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
PACED_TOKENS = {1: 100, 32: 100, 128: 100, 512: 60}
UNLIMITED_TOKENS = {1: 2000, 32: 500, 128: 150, 512: 50}
SLOW_TOKENS = 40
IDLE_STREAMS = 512
IDLE_SPAN_S = 5.0
ON_THE_PATH = ("ray::ServeReplica", "ray::ProxyActor", "haproxy")
"""Processes that a stream goes through. Ray's others grow and shrink by as much as all streams take together."""
PROMPTS = {"small": 2, "100 KB": 100_000, "1 MB": 1_000_000}
"""Characters of a prompt."""


class Load(msgspec.Struct, frozen=True):
    speed: Speed
    dialect: Dialect
    streams: int
    tokens: int

    @property
    def name(self) -> str:
        return name(self.speed, self.dialect, self.streams)


def name(speed: Speed, dialect: Dialect, streams: int) -> str:
    return f"{speed} {dialect} {streams}"


def loads(system: System, shorter: int = 1) -> list[Load]:
    """The other systems only have chats. `shorter` divides how many tokens a stream has."""
    dialects: tuple[Dialect, ...] = DIALECTS if system.ours else ("chat",)
    wanted = [Load("paced", "chat", count, PACED_TOKENS[count]) for count in COUNTS]
    if system.name == HAPROXY:
        wanted += [Load("paced", dialect, 128, PACED_TOKENS[128]) for dialect in dialects if dialect != "chat"]
    wanted += [Load("slow", "chat", 512, SLOW_TOKENS)]
    wanted += [Load("unlimited", dialect, count, UNLIMITED_TOKENS[count]) for dialect in dialects for count in COUNTS]
    return [msgspec.structs.replace(item, tokens=max(5, item.tokens // shorter)) for item in wanted]


class Measured(msgspec.Struct):
    """One system, once."""

    loads: dict[str, LoadResult] = {}
    idle_cpu: float = 0.0
    """Cores that the server takes when nobody asks."""
    idle_stream_kb: float | None = None
    idle_stream_kb_by_process: dict[str, float] = {}
    added_ms: dict[str, float] = {}
    """By the prompt's size: the median time to the first token of an engine that answers at once."""


async def measure(found: Measured, server: Running, shorter: int, repeats_of_prompts: int, settle_s: float) -> None:
    """All that can be measured of a system that was started for `server.speeds`, into `found`."""
    if server.system.name == HAPROXY and "idle" in server.speeds:
        # First, before anything has grown for another reason.
        model, extra = server.system.request("idle")
        streams = IDLE_STREAMS // shorter
        held = await idle_stream_bytes(server.url, model, streams, settle_s, extra, server.pid)
        found.idle_stream_kb_by_process = {process: count / 1000 for process, count in held.items()}
        found.idle_stream_kb = sum(
            kb for process, kb in found.idle_stream_kb_by_process.items() if process.startswith(ON_THE_PATH)
        )
    if "paced" in server.speeds:
        before = tree_cpu_s(server.pid)
        await asyncio.sleep(IDLE_SPAN_S / shorter)
        found.idle_cpu = (tree_cpu_s(server.pid) - before) / (IDLE_SPAN_S / shorter)
    if "unlimited" in server.speeds:
        found.added_ms = await _added_ms(server, repeats_of_prompts)
    for item in [item for item in loads(server.system, shorter) if item.speed in server.speeds]:
        model, extra = server.system.request(item.speed)
        step_s = STEP_S[item.speed] or None
        found.loads[item.name] = await load(
            server.url,
            model,
            item.streams,
            item.tokens,
            dialect=item.dialect,
            stagger_s=0.01 if step_s else 0.0,
            step_s=step_s,
            extra=extra,
            server_pid=server.pid,
        )


async def _added_ms(server: Running, repeats: int) -> dict[str, float]:
    """One request at a time, the sizes in turn."""
    host, port = address(server.url)
    model, extra = server.system.request("unlimited")
    times: dict[str, list[float]] = {size: [] for size in PROMPTS}
    bodies = {
        size: body("chat", model, Prompt((Turn("user", ("word " * characters)[:characters]),)), 1, extra)
        for size, characters in PROMPTS.items()
    }
    for _ in range(repeats):
        for size, content in bodies.items():
            times[size].append((await stream(host, port, "chat", content)).ttft_s)
    return {size: percentile(values[1:] or values, 0.5) * 1e3 for size, values in times.items()}  # the first warms up
