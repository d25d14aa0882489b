"""What the load generator counts, and what the bars are read from."""

from __future__ import annotations

import asyncio
import math
from typing import get_args

import pytest

from backends.fake import FakeBackend, FakeSettings
from benchmarks.relay import steps
from benchmarks.relay.load import ENDS, PIECES, StreamResult, lateness, process_name, result, stream
from benchmarks.relay.measures import COUNTS, DIALECTS, Measured, loads, name
from benchmarks.relay.plots import PLOTS, plots
from benchmarks.relay.report import Bar, Figure, bars, shown, summary, tables
from benchmarks.relay.systems import BARE, HAPROXY, PEER, STEP_S, SYSTEMS, config, parts
from deployments.bench.dialects import PATHS, Dialect, body
from deployments.bench.prompts import Prompt, Turn
from deployments.config import our_parts
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.settings import GatewaySettings
from tests.deployments.support import Exchange


async def answer(dialect: Dialect, tokens: int) -> bytes:
    """What ours writes."""
    backend = FakeBackend(FakeSettings())
    await backend.start()
    app = build_app(LocalPool({"m": backend}, {"m": 0}), GatewaySettings(), echo_request_id=True)
    asked = body(dialect, "m", Prompt((Turn("user", "hi"),)), tokens)
    exchange = await Exchange(app, "POST", PATHS[dialect], asked).done()
    await backend.aclose()
    return exchange.body


@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_tokens_are_counted_once_however_the_stream_is_cut(dialect: Dialect, size: int) -> None:
    data = await answer(dialect, 5)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found = await stream("127.0.0.1", server.sockets[0].getsockname()[1], dialect, b"{}")
    assert (found.tokens, found.complete) == (5, True)
    assert ENDS[dialect] in data and len(PIECES[dialect].findall(data)) == 5


@pytest.mark.parametrize(("piece", "tokens"), [(" token0 token1 token2", 3), (' a \\"quoted\\" word', 1)])
@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_a_piece_is_one_token_and_of_ours_as_many_as_it_has_words(piece: str, tokens: int, size: int) -> None:
    data = f'data: {{"delta":{{"content":"{piece}"}}}}\n\n'.encode() * 2 + b"data: [DONE]\n\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        found = await stream("127.0.0.1", server.sockets[0].getsockname()[1], "chat", b"{}")
    assert (found.tokens, found.complete) == (2 * tokens, True)


async def test_a_server_that_is_not_there_or_leaves_loses_tokens() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'data: {"delta":{"content":"a"}}')
        await writer.drain()
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        left = await stream("127.0.0.1", port, "chat", b"{}")
    assert left.tokens <= 1 and not left.complete
    gone = await stream("127.0.0.1", port, "chat", b"{}")
    assert (gone.tokens, gone.complete) == (0, False) and math.isnan(gone.ttft_s)


def test_a_token_is_late_by_the_beat_and_not_by_the_one_before() -> None:
    # The first comes when the prompt is done; the third was held up, and the fourth is on the beat again.
    assert lateness([0.93, 1.0, 1.35, 1.2], 0.1) == pytest.approx([0.0, 0.25, 0.0])
    assert lateness([1.0], 0.1) == lateness([], 0.1) == []


def test_what_did_not_come_is_lost_and_not_slow() -> None:
    streams = [StreamResult(0.1, [1.0, 1.0, 1.5], True), StreamResult(float("nan"), [], False)]
    found = result(streams, tokens=3, seconds=2.0, cpu_s=0.3, step_s=0.2)
    assert (found.tokens, found.lost_tokens, found.unfinished_streams) == (3, 3, 1)
    assert (found.tokens_per_s, found.requests_per_s, found.server_cpu_s_per_1000_tokens) == (1.5, 1.0, 100.0)
    assert (found.ttft_p50_ms, found.gap_p50_ms) == (100.0, 500.0)
    assert found.late_tokens == 1  # the third: a beat of 0.2 s after the second is 1.2
    assert math.isnan(result(streams, 3, 2.0, 0.3).lateness_p50_ms)


async def test_streams_of_one_speed_step_together() -> None:
    clock = steps.Steps()
    woken: list[str] = []

    async def one(name: str, count: int) -> None:
        for _ in range(count):
            await clock.wait(0.01)
            woken.append(name)

    gone = asyncio.create_task(one("gone", 5))
    await asyncio.sleep(0)
    gone.cancel()  # the others' steps go on
    await asyncio.gather(one("a", 3), one("b", 3))
    assert [set(woken[i : i + 2]) for i in range(0, 6, 2)] == [{"a", "b"}] * 3


def test_processes_have_the_names_one_knows_them_by() -> None:
    assert process_name(["ray::ServeReplica:a:Model", "", ""]) == "ray::ServeReplica:a:Model"
    assert process_name(["/usr/bin/haproxy", "-f", "x"]) == "haproxy"
    assert process_name([]) == "?"


def test_the_config_of_ours_is_good() -> None:
    ours = next(system for system in SYSTEMS if system.name == HAPROXY)
    started = [sorted(our_parts(config(8000, speeds)).models) for speeds in parts(ours)]
    assert started == [["paced"], ["idle", "slow", "unlimited"]]


def test_every_load_has_its_engine() -> None:
    for system in SYSTEMS:
        started = [speed for speeds in parts(system) for speed in speeds]
        assert sorted(started) == sorted(STEP_S)


def measured(cpu_s: float, seconds: float = 1.0) -> Measured:
    streams = [StreamResult(0.01 * cpu_s, [1.0, 1.05, 1.1], True)]
    by_process = {"haproxy": 39.95, "other": 0.05}
    found = Measured(
        idle_stream_kb=40.0, idle_stream_kb_by_process=by_process, added_ms={"small": 1.0, "100 KB": 3.0, "1 MB": 50.0}
    )
    for dialect in DIALECTS:
        found.loads[name("paced", dialect, 128)] = result(streams, 3, seconds, cpu_s, 0.05)
    found.loads[name("slow", "chat", 512)] = result(streams, 3, seconds, cpu_s, 0.2)
    found.loads[name("unlimited", "chat", 32)] = result(streams, 3, seconds, cpu_s)
    return found


def test_bars_compare_medians_and_say_what_is_missing() -> None:
    results = {
        HAPROXY: [measured(0.1), measured(0.1), measured(100.0)],
        PEER: [measured(1.0, seconds=4.0)],
        BARE: [measured(0.02, seconds=0.25)],
    }
    found = {bar.text: (bar.value and round(bar.value, 2), bar.verdict) for bar in bars(results)}
    assert found == {
        "CPU per token over Ray Serve LLM's, 128 paced streams": (0.1, "pass"),
        "CPU per token over its direct streaming's": (None, "not measured"),
        "CPU per token over the bare streamer's": (5.0, "FAIL"),
        "TTFT p50 over Ray Serve LLM's": (0.1, "pass"),
        "gap p99 over the engine's step": (1.0, "pass"),
        "tokens late, 512 streams of 5 tokens/s, in any repeat": (0, "pass"),
        "tokens/s over Ray Serve LLM's, unlimited, 32 streams": (4.0, "pass"),
        "tokens/s over the bare streamer's": (0.25, "FAIL"),
        "KB of memory per idle stream": (40.0, "pass"),
        "CPU per token of completions over chat's": (1.0, "pass"),
        "CPU per token of responses over chat's": (1.0, "pass"),
        "CPU per token of messages over chat's": (1.0, "pass"),
        "CPU per token of native over chat's": (1.0, "pass"),
        "ms more for a prompt of 100 KB": (2.0, "pass"),
        "ms more for a prompt of 1 MB": (49.0, "FAIL"),
    }
    assert "| Tokenyard, HAProxy: haproxy | 40.0 |" in (shown_tables := tables(results))
    assert "### slow chat 512" in shown_tables and "other" not in shown_tables
    assert {bar.verdict for bar in bars({})} == {"not measured"}


def test_plots_have_the_systems_of_which_everything_was_measured() -> None:
    whole, part = measured(0.1), measured(1.0, seconds=4.0)
    for count in COUNTS:
        whole.loads[name("paced", "chat", count)] = whole.loads[name("paced", "chat", 128)]
    drawn = plots({HAPROXY: [whole], PEER: [part]})
    assert drawn.keys() == PLOTS.keys()
    assert all(HAPROXY in picture and PEER not in picture for picture in drawn.values())
    assert plots({PEER: [part]}) == {}


def test_whoever_waits_is_told_what_was_found() -> None:
    assert "10,000 us of CPU per token" in summary(measured(0.03))


def test_a_limit_itself_is_good_enough() -> None:
    assert Bar("", 2.0, 2.0).verdict == Bar("", 2.0, 2.0, at_most=False).verdict == "pass"


def test_a_figure_shows_its_spread() -> None:
    assert shown(Figure.of([3.0, float("nan"), 1.0, 2.0]), ".1f") == "2.0 (1.0–3.0)"
    assert shown(Figure.of([2.0]), ".1f") == "2.0"
    assert shown(Figure.of([float("nan")]), ".1f") == "–"


def test_bars_are_read_from_loads_that_are_run() -> None:
    run = {system.name: {load.name for load in loads(system)} for system in SYSTEMS}
    assert all({name("paced", "chat", 128), name("unlimited", "chat", 32)} <= names for names in run.values())
    assert {name("paced", dialect, 128) for dialect in DIALECTS} <= run[HAPROXY]
    assert name("slow", "chat", 512) in run[HAPROXY]
