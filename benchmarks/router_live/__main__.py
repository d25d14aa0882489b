"""The router on real replicas: which rule finds the most of each prompt already computed?

    make bench-router-live        or        python -m benchmarks.router_live --repeats 3

Three llama.cpp replicas of SmolLM2-135M behind two gateways and HAProxy; generated conversations, more of them live
than one replica has slots; our router, Serve's default (the shorter queue of two), and Ray Serve LLM's prefix router,
in random order, in one run. Cached tokens are what the engines report in the answers' usage. `--kill` instead ends one
replica at a third and one gateway at two thirds of a run with our router.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import threading
from pathlib import Path

import msgspec
import psutil

from benchmarks.processes import Child
from benchmarks.router_live.system import MODEL, URL, Shape, running
from benchmarks.router_live.workload import Turn, conversations, run
from deployments.bench.report import percentile

RULES = {
    "Tokenyard": None,
    "Serve's default": "benchmarks.router_live.routers.PowerOfTwo",
    "Ray's prefix router": "benchmarks.router_live.routers.PrefixAffinity",
}


class Summary(msgspec.Struct, frozen=True):
    requests: int
    failed: int
    retried: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float

    @property
    def hit(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def process_of(server: Child, title: str) -> psutil.Process:
    """One of the server's replica processes, by the title that Ray gives them."""
    found = [p for p in psutil.Process(server.pid).children(recursive=True) if title in " ".join(p.cmdline())]
    if not found:
        sys.exit(f"no process of the server is titled {title}")
    return found[0]


def measure(rule: str | None, args: argparse.Namespace, seed: int) -> tuple[list[Turn], list[int]]:
    """The turns of a run, and how many of them had begun at each kill."""
    plan = conversations(seed, args.conversations, args.turns, args.pause)
    total = len(plan) * args.turns
    kills = {total // 3: "ServeReplica:" + MODEL, 2 * total // 3: "ServeReplica:gateway"} if args.kill else {}
    killed: list[int] = []
    with running(rule, Shape(args.replicas, args.slots)) as server:

        def progress(done: int) -> None:
            print(f"\r  {done}/{total} requests", end="", file=sys.stderr, flush=True)
            if done in kills:
                victim = process_of(server, kills[done])
                threading.Thread(target=victim.kill).start()
                killed.append(done)
                print(f"\n  killed {kills[done]} (pid {victim.pid})", file=sys.stderr)

        turns = asyncio.run(run(URL, MODEL, plan, args.users, args.answer, 1 if args.kill else 0, progress))
    print(file=sys.stderr)
    return turns, killed


def summary(turns: list[Turn]) -> Summary:
    ttfts = [turn.ttft_s for turn in turns if not turn.failed]
    return Summary(
        requests=len(turns),
        failed=sum(bool(turn.failed) for turn in turns),
        retried=sum(turn.retries for turn in turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        seconds=turns[-1].began_s,
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
    )


def table(rows: dict[str, list[Summary]]) -> str:
    """Medians over the repeats; in brackets the lowest and the highest."""
    lines = [
        "| router | cached tokens | of the prompts' | TTFT mean | TTFT p50 | TTFT p99 | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        hits = [100 * row.hit for row in runs]
        means = [row.ttft_mean_s for row in runs]
        lines.append(
            f"| {name} | {statistics.median(row.cached_tokens for row in runs):,.0f} "
            f"| {statistics.median(hits):.1f} % ({min(hits):.1f}–{max(hits):.1f}) "
            f"| {statistics.median(means):.2f} s ({min(means):.2f}–{max(means):.2f}) "
            f"| {statistics.median(row.ttft_p50_s for row in runs):.2f} s "
            f"| {statistics.median(row.ttft_p99_s for row in runs):.2f} s | {sum(row.failed for row in runs)} |"
        )
    return "\n".join(lines)


def recovery(turns: list[Turn], killed: list[int]) -> str:
    """How often a conversation's turn found less than its turn before had left, between and after the kills."""
    lines = []
    bounds = [0, *killed, len(turns)]
    names = ["before", "after the replica's end", "after the gateway's end"]
    previous: dict[int, int] = {}
    misses: list[dict[int, int]] = [{} for _ in names]
    for position, turn in enumerate(turns):
        phase = max(index for index, bound in enumerate(bounds[:-1]) if position >= bound)
        left = previous.get(turn.conversation)
        if left is not None and not turn.failed and turn.cached_tokens < 0.9 * left:
            misses[phase][turn.conversation] = misses[phase].get(turn.conversation, 0) + 1
        previous[turn.conversation] = turn.prompt_tokens
    for index, name in enumerate(names[: len(bounds) - 1]):
        phase_turns = turns[bounds[index] : bounds[index + 1]]
        row = summary(phase_turns)
        lines.append(
            f"{name:26} {row.requests:4} requests, {row.failed} failed, {row.retried} retried by the client, "
            f"hit {100 * row.hit:.1f} %, conversations that lost their prefix: {len(misses[index])}, "
            f"most often in one: {max(misses[index].values(), default=0)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--slots", type=int, default=5, help="of each replica")
    parser.add_argument("--users", type=int, default=12, help="conversations that are live at once")
    parser.add_argument("--conversations", type=int, default=36)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--pause", type=float, default=4.0, help="mean seconds between an answer and the next question")
    parser.add_argument("--only", default="", help="run only the rules whose name has this in it")
    parser.add_argument("--kill", action="store_true", help="one run with our router, losing a replica and a gateway")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    if args.kill:
        turns, killed = measure(None, args, args.seed)
        print(cores)
        print(recovery(turns, killed))
        failed = [turn for turn in turns if turn.failed]
        for turn in failed:
            print(f"failed: {turn.failed}, begun at {turn.began_s:.1f} s, ended at {turn.ended_s:.1f} s")
        return
    rows: dict[str, list[Summary]] = {name: [] for name in RULES if args.only in name}
    order = random.Random(args.seed)
    for repeat in range(args.repeats):
        for name in order.sample(list(rows), len(rows)):
            print(f"repeat {repeat + 1} of {args.repeats}: {name}", file=sys.stderr, flush=True)
            turns, _ = measure(RULES[name], args, args.seed + repeat)
            rows[name].append(summary(turns))
            print(f"  {rows[name][-1]}", file=sys.stderr, flush=True)
    print(
        f"{args.replicas} replicas of {args.slots} slots, {args.users} users, {args.conversations} conversations of "
        f"{args.turns} turns; median of {args.repeats} (lowest–highest); {cores}\n"
    )
    print(table(rows))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    main()
