"""The whole system beside llama.cpp's own server: the same model, threads, slots and conversations.

    make bench-e2e        or        python -m benchmarks.e2e --repeats 3

Users hold conversations of several turns that begin with one of a few long system prompts. They are answered by three
llama.cpp replicas behind a gateway and HAProxy, routed by our rule or by Serve's default (the shorter queue of two), or
by llama-server alone with the sum of the replicas' threads, slots and memory. Each system is started afresh in every
repeat, in alternating order; every repeat has conversations of its own, the same for all systems. The load generator
runs on the same cores. Tables and bars are of medians; everything that ran is kept in `--out`, with plots.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from pathlib import Path

import msgspec

from benchmarks.e2e import report
from benchmarks.e2e.report import Run
from benchmarks.e2e.systems import System, running, systems
from benchmarks.engine import llama_server
from benchmarks.relay.load import tree_cpu_s
from benchmarks.relay.report import bar_table
from benchmarks.router_live.system import MODEL, Shape
from benchmarks.router_live.workload import Conversation, conversations, run

OUT = Path(__file__).parents[2] / ".cache" / "e2e"
WARM_UP = [Conversation("", ("Hello.",), (0.0,))]


def measure(system: System, shape: Shape, plan: list[Conversation], args: argparse.Namespace) -> Run:
    def progress(done: int) -> None:
        print(f"\r  {done} requests", end="", file=sys.stderr, flush=True)

    with running(system, shape) as server:
        asyncio.run(run(server.url, MODEL, WARM_UP, 1, 2, 0, lambda _: None))
        before = tree_cpu_s(server.pid)
        turns = asyncio.run(run(server.url, MODEL, plan, args.users, args.answer, 0, progress))
        cpu_s = tree_cpu_s(server.pid) - before
    print(file=sys.stderr)
    return Run.of(turns, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the systems whose name has this in it")
    parser.add_argument("--shorter", type=int, default=1, help="divide the number of conversations, to try it out")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--slots", type=int, default=5, help="of each replica")
    parser.add_argument("--users", type=int, default=12, help="conversations that are live at once")
    parser.add_argument("--conversations", type=int, default=36)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between an answer and the next question")
    parser.add_argument("--systems", type=int, default=4, help="system prompts that the conversations begin with")
    parser.add_argument("--system-words", type=int, default=600, help="words of each, of 1.3 tokens")
    parser.add_argument("--first-words", type=int, default=60, help="words of a first question")
    parser.add_argument("--ttft-limit", type=float, default=2.0, help="seconds, for the goodput in the table")
    parser.add_argument("--prompt-cache-mib", type=int, default=512, help="of each replica; llama-server has the sum")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    llama_server.build()
    args.out.mkdir(parents=True, exist_ok=True)
    shape = Shape(
        args.replicas,
        args.slots,
        args.gateways,
        threads=args.threads,
        prompt_cache_mib=args.prompt_cache_mib,
    )
    chosen = [system for system in systems(shape) if args.only.lower() in system.name.lower()]
    results: dict[str, list[Run]] = {system.name: [] for system in chosen}
    for repeat in range(args.repeats):
        plan = conversations(
            args.seed + repeat,
            max(args.conversations // args.shorter, 1),
            args.turns,
            args.pause,
            systems=args.systems,
            system_words=args.system_words,
            first_words=args.first_words,
        )
        for number, system in enumerate(chosen if repeat % 2 == 0 else chosen[::-1]):
            done = repeat * len(chosen) + number + 1
            print(f"[{done}/{args.repeats * len(chosen)}] {system.name}", file=sys.stderr, flush=True)
            results[system.name].append(measure(system, shape, plan, args))
            # What there is, also where a later one fails.
            (args.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    (args.out / "goodput.svg").write_text(report.goodput_plot(results))
    (args.out / "ttft.svg").write_text(report.ttft_plot(results))
    load = f"load average {os.getloadavg()[0]:.1f}"
    cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}, {load}"
    print(
        f"{args.replicas} replicas of {args.threads} threads and {args.slots} slots, {args.gateways} gateways; "
        f"{args.users} users, {len(plan)} conversations of {args.turns} turns; "
        f"median (least–most) of {args.repeats}; {cores}\n\n{report.table(results, args.ttft_limit)}\n\n"
        f"{bar_table(report.bars(results))}"
    )


if __name__ == "__main__":
    main()
