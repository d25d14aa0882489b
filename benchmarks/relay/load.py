"""A load of streaming requests over raw sockets, cheap enough not to be what is measured.

    python -m benchmarks.relay.load http://127.0.0.1:8000 --model fake --streams 128 --tokens 100

Prints one JSON object: tokens/s, TTFT and inter-chunk gap percentiles, and the CPU seconds that the server's processes
(or, without `--server-pid`, all others of the machine) spent per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args
from urllib.parse import urlsplit

import msgspec
import psutil
import uvloop

from deployments.bench.dialects import PATHS, Dialect, body
from deployments.bench.prompts import Prompt, Turn
from deployments.bench.report import percentile

_TEXT = rb'((?:[^"\\]|\\.)+)"'
PIECES: dict[Dialect, re.Pattern[bytes]] = {
    "chat": re.compile(rb'"delta": ?\{"content": ?"' + _TEXT),
    "completions": re.compile(rb'"text": ?"' + _TEXT),
    "responses": re.compile(rb'"delta": ?"' + _TEXT),
    "messages": re.compile(rb'_delta","text": ?"' + _TEXT),
    "native": re.compile(rb'"content": ?"' + _TEXT),
}
"""A piece of output that is not empty, as compact and as spaced JSON writes it."""
WORD = b" token"
"""What a token of the engines that are not there begins with. Of their pieces the words are counted: where frames have
waited, one piece holds several. Any other piece is one token.
"""
ENDS: dict[Dialect, bytes] = {
    "chat": b"[DONE]",
    "completions": b"[DONE]",
    "responses": b"event: response.incomplete",  # the fake always runs into the limit
    "messages": b"event: message_stop",
    "native": b'"stop":true',
}
_OVERLAP = 32
"""No shorter than what an end takes."""
_LONGEST_PIECE = 65536
STREAM_WITHIN_S = 300.0
HI = Prompt((Turn("user", "hi"),))


class StreamResult(msgspec.Struct):
    ttft_s: float
    arrivals: list[float]
    """When each token was read; `time.perf_counter`."""
    complete: bool

    @property
    def tokens(self) -> int:
        return len(self.arrivals)

    @property
    def gaps_s(self) -> list[float]:
        """Between reads with tokens."""
        reads = list(dict.fromkeys(self.arrivals))
        return [after - before for before, after in zip(reads, reads[1:], strict=False)]


class LoadResult(msgspec.Struct):
    streams: int
    tokens: int
    lost_tokens: int
    unfinished_streams: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    lateness_p50_ms: float
    lateness_p99_ms: float
    lateness_max_ms: float
    """See `lateness`; NaN without a step."""
    late_tokens: int
    """That came when the next one was due already."""
    server_cpu_s_per_1000_tokens: float


def tree(root: int | None) -> list[psutil.Process]:
    """Process `root` and all its descendants, or all processes but this one."""
    if root is None:
        return [process for process in psutil.process_iter() if process.pid != os.getpid()]
    return [psutil.Process(root), *psutil.Process(root).children(recursive=True)]


def tree_cpu_s(root: int | None) -> float:
    """CPU seconds so far of a `tree`.

    Processes that end take theirs along: let things settle before, and measure over a span in which none ends.
    """
    total = 0.0
    for process in tree(root):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def tree_memory_bytes(root: int | None) -> Counter[str]:
    """What the processes of a `tree` would free if they ended, by their names."""
    found: Counter[str] = Counter()
    for process in tree(root):
        try:
            found[process_name(process.cmdline())] += process.memory_full_info().uss
        except psutil.Error:  # gone, or none of ours
            continue
    return found


def process_name(command: Sequence[str]) -> str:
    """The program's; of one of Ray's actors, what Ray calls it."""
    title = command[0] if command else "?"
    return title if title.startswith("ray::") else title.rsplit("/", 1)[-1]


def lateness(arrivals: Sequence[float], step_s: float) -> list[float]:
    """Seconds each token but the first came after the engine's beat, which the earliest of them is taken to be on.

    The first is not on the beat: it comes when the prompt is done.
    """
    offsets = [arrival - number * step_s for number, arrival in enumerate(arrivals)][1:]
    return [offset - min(offsets) for offset in offsets]


def request(path: str, host: str, content: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    )
    return head.encode() + b"connection: close\r\n\r\n" + content


async def stream(host: str, port: int, dialect: Dialect, content: bytes) -> StreamResult:
    """One request, read to its end. One that is refused, cut off or too slow has what came until then."""
    found = StreamResult(float("nan"), [], False)
    with contextlib.suppress(OSError):  # a TimeoutError is one
        async with asyncio.timeout(STREAM_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                began = time.perf_counter()
                writer.write(request(PATHS[dialect], host, content))
                await _read(reader, dialect, found)
            finally:
                writer.close()
    if found.arrivals:
        found.ttft_s = found.arrivals[0] - began
    return found


async def _read(reader: asyncio.StreamReader, dialect: Dialect, found: StreamResult) -> None:
    pattern, end = PIECES[dialect], ENDS[dialect]
    unread, tail = b"", b""
    while chunk := await reader.read(65536):
        now = time.perf_counter()
        tail += chunk
        found.complete = found.complete or end in tail
        tail = tail[-_OVERLAP:]
        window = unread + chunk
        read = 0
        for piece in pattern.finditer(window):
            found.arrivals += [now] * max(piece[1].count(WORD), 1)
            read = piece.end()
        unread = window[max(read, len(window) - _LONGEST_PIECE) :]


def result(
    streams: Sequence[StreamResult], tokens: int, seconds: float, cpu_s: float, step_s: float | None = None
) -> LoadResult:
    """Of streams that asked for `tokens` tokens each."""
    total = sum(one.tokens for one in streams)
    gaps = [gap for one in streams for gap in one.gaps_s]
    ttfts = [one.ttft_s for one in streams if one.arrivals]
    late = [value for one in streams for value in lateness(one.arrivals, step_s)] if step_s else []
    return LoadResult(
        streams=len(streams),
        tokens=total,
        lost_tokens=len(streams) * tokens - total,
        unfinished_streams=sum(not one.complete for one in streams),
        seconds=seconds,
        tokens_per_s=total / seconds,
        requests_per_s=len(streams) / seconds,
        ttft_p50_ms=percentile(ttfts, 0.5) * 1e3,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1e3,
        gap_p50_ms=percentile(gaps, 0.5) * 1e3,
        gap_p99_ms=percentile(gaps, 0.99) * 1e3,
        lateness_p50_ms=percentile(late, 0.5) * 1e3,
        lateness_p99_ms=percentile(late, 0.99) * 1e3,
        lateness_max_ms=percentile(late, 1) * 1e3,
        late_tokens=sum(value > step_s for value in late) if step_s else 0,
        server_cpu_s_per_1000_tokens=1000 * cpu_s / total if total else float("nan"),
    )


async def load(
    url: str,
    model: str,
    streams: int,
    tokens: int,
    *,
    dialect: Dialect = "chat",
    stagger_s: float = 0.01,
    step_s: float | None = None,
    extra: Mapping[str, object] | None = None,
    server_pid: int | None = None,
) -> LoadResult:
    """`streams` requests of `tokens` tokens each, begun `stagger_s` apart. One request before, to warm the path.

    `step_s` is the engine's, to tell which tokens are late.
    """
    host, port = address(url)
    content = body(dialect, model, HI, tokens, extra)
    await stream(host, port, dialect, body(dialect, model, HI, 2, extra))

    async def one(index: int) -> StreamResult:
        await asyncio.sleep(index * stagger_s)
        return await stream(host, port, dialect, content)

    cpu, began = tree_cpu_s(server_pid), time.perf_counter()
    results = await asyncio.gather(*[one(index) for index in range(streams)])
    return result(results, tokens, time.perf_counter() - began, tree_cpu_s(server_pid) - cpu, step_s)


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


async def idle_stream_bytes(
    url: str, model: str, streams: int, settle_s: float, extra: Mapping[str, object] | None, server_pid: int | None
) -> dict[str, float]:
    """What a stream costs each of the server's processes after its first token, when no more come.

    One stream is there before.
    """
    host, port = address(url)
    content = request(PATHS["chat"], host, body("chat", model, HI, 16, extra))
    held: list[asyncio.StreamWriter] = []

    async def hold() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        held.append(writer)
        writer.write(content)
        window = b""
        while PIECES["chat"].search(window) is None:
            if not (chunk := await reader.read(65536)):
                raise RuntimeError(f"a stream ended: {window!r}")
            window += chunk

    await hold()
    await asyncio.sleep(settle_s)
    before = tree_memory_bytes(server_pid)
    for first in range(0, streams, 32):  # in groups: a burst would be measured with its own buffers
        await asyncio.gather(*[hold() for _ in range(first, min(first + 32, streams))])
    await asyncio.sleep(settle_s)
    grown = tree_memory_bytes(server_pid)
    grown.subtract(before)
    for writer in held:
        writer.close()
    await asyncio.sleep(settle_s)
    return {name: count / streams for name, count in grown.items() if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--dialect", choices=get_args(Dialect), default="chat")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--stagger", type=float, default=0.01, help="seconds between the starts of two streams")
    parser.add_argument("--server-pid", type=int, help="count the CPU of this process and its descendants only")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into the body")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(
            load(
                args.url,
                args.model,
                args.streams,
                args.tokens,
                dialect=args.dialect,
                stagger_s=args.stagger,
                extra=args.extra,
                server_pid=args.server_pid,
            )
        )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
