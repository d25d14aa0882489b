"""A load of streaming chat requests over raw sockets, cheap enough not to be what is measured.

    python -m benchmarks.relay.load http://127.0.0.1:8000 --model fake --streams 128 --tokens 100

Prints one JSON object: tokens/s, TTFT and inter-chunk gap percentiles, and the CPU seconds that the server's processes
(or, without `--server-pid`, all others of the machine) spent per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from urllib.parse import urlsplit

import msgspec
import psutil

TOKENS = re.compile(rb'"delta": ?\{"content": ?"[^"]')
"""A content delta that is not empty, as compact and as spaced JSON writes it."""
_OVERLAP = 24


class StreamResult(msgspec.Struct):
    ttft_s: float
    gaps_s: list[float]
    tokens: int
    complete: bool


class LoadResult(msgspec.Struct):
    streams: int
    tokens: int
    lost_tokens: int
    unfinished_streams: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    server_cpu_s_per_1000_tokens: float


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def tree_cpu_s(root: int | None) -> float:
    """CPU seconds so far of process `root` and all its descendants, or of all processes but this one.

    Processes that end take theirs along: let things settle before, and measure over a span in which none ends.
    """
    if root is None:
        processes = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    else:
        processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def stream(host: str, port: int, path: str, body: bytes) -> StreamResult:
    """One request. A token is a content delta that is not empty; a gap is the time between two reads with tokens."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    began = time.perf_counter()
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
    ttft, last, tokens, gaps, tail = float("nan"), 0.0, 0, [], b""
    while chunk := await reader.read(65536):
        now = time.perf_counter()
        window = tail + chunk
        ends = [match.end() for match in TOKENS.finditer(window)]
        tail = window[max(len(window) - _OVERLAP, *ends[-1:], 0) :]  # what was counted is not seen again
        if ends:
            if tokens == 0:
                ttft = now - began
            else:
                gaps.append(now - last)
            last = now
            tokens += len(ends)
    writer.close()
    return StreamResult(ttft, gaps, tokens, complete=b"[DONE]" in tail)


async def load(
    url: str,
    model: str,
    streams: int,
    tokens: int,
    stagger_s: float = 0.01,
    path: str = "/v1/chat/completions",
    extra: dict[str, object] | None = None,
    server_pid: int | None = None,
) -> LoadResult:
    """`streams` requests of `tokens` tokens each, begun `stagger_s` apart. One request before, to warm the path."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
        **(extra or {}),
    }
    encoded = json.dumps(body).encode()
    await stream(host, port, path, encoded)

    async def one(index: int) -> StreamResult:
        await asyncio.sleep(index * stagger_s)
        return await stream(host, port, path, encoded)

    cpu, began = tree_cpu_s(server_pid), time.perf_counter()
    results = await asyncio.gather(*[one(index) for index in range(streams)])
    seconds, cpu = time.perf_counter() - began, tree_cpu_s(server_pid) - cpu
    total = sum(result.tokens for result in results)
    gaps = [gap for result in results for gap in result.gaps_s]
    ttfts = [result.ttft_s for result in results]
    return LoadResult(
        streams=streams,
        tokens=total,
        lost_tokens=streams * tokens - total,
        unfinished_streams=sum(not result.complete for result in results),
        seconds=seconds,
        tokens_per_s=total / seconds,
        ttft_p50_ms=percentile(ttfts, 0.5) * 1e3,
        ttft_p99_ms=percentile(ttfts, 0.99) * 1e3,
        gap_p50_ms=percentile(gaps, 0.5) * 1e3,
        gap_p99_ms=percentile(gaps, 0.99) * 1e3,
        server_cpu_s_per_1000_tokens=1000 * cpu / total if total else float("nan"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="fake")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--stagger", type=float, default=0.01, help="seconds between the starts of two streams")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--server-pid", type=int, help="count the CPU of this process and its descendants only")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into the body")
    args = parser.parse_args()
    result = asyncio.run(
        load(args.url, args.model, args.streams, args.tokens, args.stagger, args.path, args.extra, args.server_pid)
    )
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main()
