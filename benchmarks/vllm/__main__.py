"""The vLLM benchmark: our gateway in front of vLLM beside `vllm serve`, which is vLLM's own server.

    make bench-vllm

The same checkpoint, the same engine settings, the same requests, on this machine: vLLM's server, ours in one process
(`tokenyard serve --local`), and ours on Ray behind HAProxy. All are up all the time, and each load goes to one after
the other, each time in another order. A load is so many clients that each ask twice: for a stream of greedy tokens,
with a prompt that no cache has seen. Figures are medians over the repeats, ratios ours over vLLM's.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from backends.vllm.loading import engine_arguments
from backends.vllm.settings import VllmSettings
from benchmarks.processes import child, wait_for_http, wait_for_output
from deployments.bench import load
from deployments.bench.client import Outcome, Server
from deployments.bench.dialects import body
from deployments.bench.prompts import generated
from deployments.bench.report import summary
from tests.backends.vllm.checkpoint import made

ROOT = Path(__file__).parents[2]
MODEL = "m"
THEIRS, LOCAL, ON_RAY = "vllm serve", "Tokenyard, one process", "Tokenyard on Ray"
PORTS = {THEIRS: 8131, LOCAL: 8132, ON_RAY: 8133}
LEVELS = (1, 8)
ASKS_EACH = 2
SETTLE_S = 15.0
"""Ray is busy for about this long after a deployment."""
PAUSE_S = 0.5
"""Between loads: vLLM's threads spin for a moment after their last step."""
LEAST_TOKENS_PER_S, MOST_TTFT = 0.95, 1.1
"""Of the ratios."""


class Figures(msgspec.Struct):
    tokens_per_s: float
    ttft_p50_ms: float


Results = dict[str, dict[int, list[Figures]]]
"""By system and clients, one for each repeat."""


def settings() -> VllmSettings:
    return VllmSettings(
        model=str(made()), device="cpu", slots=max(LEVELS), context_length=1024, kv_cache_mib=512, block_size=32
    )


def serve_arguments(settings: VllmSettings) -> list[str]:
    """The engine's arguments as we pass them, on the command line of vLLM's server."""
    given = engine_arguments(settings)
    found = ["--served-model-name", MODEL]
    for name, value in given.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                found.append(f"--{flag}")
            case False:
                found.append(f"--no-{flag}")
            case dict():
                found += [f"--{flag}", json.dumps(value)]
            case _:
                found += [f"--{flag}", str(value)]
    return found


@contextmanager
def theirs(settings: VllmSettings) -> Iterator[None]:
    port = PORTS[THEIRS]
    # What `vllm serve` runs. The command itself asks for a package named vllm, and the one for CPUs has another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *serve_arguments(settings)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-enable-log-requests"]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with child(command, quiet) as server:
        wait_for_http(f"http://127.0.0.1:{port}/health", server)
        yield


@contextmanager
def ours(settings: VllmSettings, name: str) -> Iterator[None]:
    options = ["--local"] if name == LOCAL else ["--front", "haproxy", "--ray", "local"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm.yaml"
        path.write_text(json.dumps(config(settings, PORTS[name])))
        command = [sys.executable, "-m", "deployments.cli", "serve", str(path), *options]
        with child(command, {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}) as server:
            wait_for_output("Tokenyard is ready", server)
            if name == ON_RAY:
                time.sleep(SETTLE_S)
            yield


def config(settings: VllmSettings, port: int) -> dict[str, Any]:
    backend = settings.model_dump(exclude_unset=True) | {"kind": "vllm"}
    targets: dict[str, tuple[str | None, dict[str, Any]]] = {"gateway": ("/", {}), MODEL: (None, {"backend": backend})}
    applications = [
        {
            "name": name,
            "route_prefix": route,
            "import_path": f"deployments.app:{'gateway' if name == 'gateway' else 'model'}",
            "args": args,
        }
        for name, (route, args) in targets.items()
    ]
    options = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": options, "applications": applications}


def bodies(clients: int, repeat: int, tokens: int, words: int) -> list[bytes]:
    extra = {"temperature": 0, "ignore_eos": True}
    prompts = islice(generated(words, 0, seed=1000 * repeat + clients), clients * ASKS_EACH)
    return [body("chat", MODEL, prompt, tokens, extra) for prompt in prompts]


def measured(name: str, clients: int, asked: Sequence[bytes], tokens: int) -> tuple[Figures, int]:
    """And how many tokens the prompts had, as the server counts them."""
    outcomes: list[Outcome] = []
    server = Server(f"http://127.0.0.1:{PORTS[name]}", "chat")
    schedule = load.Schedule(concurrency=clients, requests=len(asked))
    asyncio.run(load.run(server, schedule, iter(asked), outcomes.append))
    found = summary(outcomes)
    if found.failures or found.tokens != tokens * len(asked) or found.first_output is None:
        sys.exit(f"{name}: not every stream was whole: {found.tokens} tokens, {found.failures}")
    return Figures(found.tokens_per_s, found.first_output.p50 * 1e3), found.prompt_tokens


def measure(names: Sequence[str], repeats: int, tokens: int, words: int) -> Results:
    results: Results = {name: {clients: [] for clients in LEVELS} for name in names}
    for repeat in range(-1, repeats):  # the first is for warming up
        for clients in LEVELS:
            asked = bodies(clients, repeat, tokens, words)
            first = (repeat + LEVELS.index(clients)) % len(names)
            order = [*names[first:], *names[:first]]
            counts = set()
            for name in order if repeat % 2 else order[::-1]:
                time.sleep(PAUSE_S)
                figures, prompt_tokens = measured(name, clients, asked, tokens)
                counts.add(prompt_tokens)
                if repeat >= 0:
                    results[name][clients].append(figures)
            if len(counts) > 1:
                sys.exit(f"the prompts are not the same to all: {counts} tokens")
            print(f"[{repeat + 1}/{repeats}] {clients} clients", file=sys.stderr, flush=True)
    return results


def median(runs: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(run, name) for run in runs) for name in Figures.__struct_fields__))


def report(results: Results) -> str:
    lines = ["| streams | system | tokens/s | ratio | TTFT p50 | ratio | |", "|---|---|---|---|---|---|---|"]
    for clients in LEVELS:
        base = median(results[THEIRS][clients])
        for name, levels in results.items():
            found = median(levels[clients])
            row = f"| {clients} | {name} | {found.tokens_per_s:.1f} "
            if name == THEIRS:
                lines.append(f"{row}| | {found.ttft_p50_ms:.0f} ms | | |")
                continue
            speed, ttft = found.tokens_per_s / base.tokens_per_s, found.ttft_p50_ms / base.ttft_p50_ms
            word = "pass" if speed >= LEAST_TOKENS_PER_S and ttft <= MOST_TTFT else "fail"
            lines.append(f"{row}| {speed:.2f} | {found.ttft_p50_ms:.0f} ms | {ttft:.2f} | {word} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=50)
    parser.add_argument("--ray", action=argparse.BooleanOptionalAction, default=True, help="ours on Ray too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = settings()
    names = [THEIRS, LOCAL, *([ON_RAY] if args.ray else [])]
    with ExitStack() as servers:
        for name in names:
            servers.enter_context(theirs(given) if name == THEIRS else ours(given, name))
            print(f"{name} is up", file=sys.stderr, flush=True)
        results = measure(names, args.repeats, args.tokens, args.prompt_words)
    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"SmolLM2-135M, bfloat16, {args.tokens} tokens each; median of {args.repeats}; {cores}\n")
    print(report(results))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


if __name__ == "__main__":
    main()
