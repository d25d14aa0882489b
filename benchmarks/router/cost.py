"""What a decision costs the gateway: CPU time and memory of the production policy, without a network.

    python -m benchmarks.router.cost

Each decision makes the key of a chat prompt of 32 KB, plans, hears the replicas that it wanted to ask, ranks all, and
charges the best. Conversations go on for 8 turns, so that there is something to find. CPU is this thread's, of the
batch of decisions that other processes disturbed least; "longest" is of all batches: how long an event loop stands
still. Memory is what Python had allocated for the policy at the end, and the process's own size.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import time
import tracemalloc
from collections.abc import Mapping

import msgspec
import psutil

from benchmarks.router.generated import Chains
from benchmarks.router.ladder import key_of
from benchmarks.router.report import Bar
from benchmarks.router.workloads import Raw, workload
from deployments.router import STATS_AT_ONCE
from deployments.routing.ask import VERSION, AskReply
from deployments.routing.decision import Decision
from deployments.routing.fleet import ReplicaFacts
from deployments.routing.key import PrefixKey, prefix_key
from deployments.routing.policy import Policy, PolicyOptions
from protocols.request import ChatPrompt, Message, Request, TextPart

PROMPT_BYTES = 32 * 1024
SYSTEM_BYTES, MESSAGE_BYTES = 2048, 256
TURNS = 8
SESSIONS = 64
SIZES = (10, 100, 1000)
BATCH = 500
MEMORY_KEYS = 20_000
MAX_P99_MS, MAX_STALL_MS, MAX_MB = 0.3, 5.0, 64.0


class Cost(msgspec.Struct, frozen=True):
    """Milliseconds of CPU: of the key, of everything else that one decision needs, and of both."""

    replicas: int
    key_p50: float
    key_p99: float
    rest_p50: float
    rest_p99: float
    whole_p50: float
    whole_p99: float
    longest: float


def request(session: int, turn: int) -> Request:
    """A prompt of about 32 KB: a document, and questions and answers about it, all but the last as a turn before."""
    text = [f"session {session}, message {n}: ".ljust(MESSAGE_BYTES, "x") for n in range(1, 2 * turn + 1)]
    text.insert(0, f"session {session}, document: ".ljust(PROMPT_BYTES - 2 * TURNS * MESSAGE_BYTES - SYSTEM_BYTES, "d"))
    messages = [Message("system", (TextPart("You are a helpful assistant. ".ljust(SYSTEM_BYTES, "s")),))]
    messages += [Message("assistant" if n % 2 else "user", (TextPart(t),)) for n, t in enumerate(text)]
    return Request("benchmark", "m", ChatPrompt(tuple(messages)))


def facts(replicas: int) -> dict[str, ReplicaFacts]:
    return {f"replica-{n}": ReplicaFacts(256, 512, 5000.0) for n in range(replicas)}


def new_policy(replicas: int) -> tuple[Policy, dict[str, str]]:
    policy = Policy(PolicyOptions(seed=1))
    policy.update_replicas(facts(replicas), 0.0)
    return policy, {f"replica-{n}": f"replica-{n}" for n in range(replicas)}


def stalls(replicas: int) -> tuple[float, float]:
    """Milliseconds of the first list of replicas, and of the longest turn in which all have said something new."""
    policy, ids = Policy(PolicyOptions(seed=1)), facts(replicas)
    began = time.thread_time_ns()
    policy.update_replicas(ids, 0.0)
    listed = time.thread_time_ns() - began
    words = {"v": VERSION, "g": 1, "n": 3, "k": 98, "a": 100}
    said = {id_: words | {"q": 5 * n, "r": 5000 + n} for n, id_ in enumerate(ids)}
    longest = 0
    for start in range(0, replicas, STATS_AT_ONCE):
        began = time.thread_time_ns()
        for id_ in list(said)[start : start + STATS_AT_ONCE]:
            policy.observe_stats(id_, said[id_], 1.0)
        longest = max(longest, time.thread_time_ns() - began)
    return listed / 1e6, longest / 1e6


def answers(key: PrefixKey, asked: tuple[str, ...], draw: random.Random) -> dict[str, AskReply]:
    def answer() -> AskReply:
        return AskReply(VERSION, 1, draw.randrange(len(key.rungs) + 1), draw.randrange(20_000), 8, 0, 5000)

    return {replica: answer() for replica in asked}


def decide(
    policy: Policy, candidates: Mapping[str, str], name: str, key: PrefixKey, now: float, draw: random.Random
) -> int:
    """Nanoseconds of CPU, without what the replicas do. `candidates` stand for Serve's objects, by id."""
    began = time.thread_time_ns()
    plan = policy.plan(key, now)
    planned = time.thread_time_ns()
    replies = answers(key, plan.ask, draw)
    heard = time.thread_time_ns()
    order = policy.rank(plan, replies, now)
    best = Decision(plan, order).ranks(candidates, ())[0][0]
    policy.charge(name, plan, best, now)
    policy.accepted(name, best, now)
    return planned - began + time.thread_time_ns() - heard


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def measure(replicas: int, decisions: int) -> Cost:
    (policy, candidates), draw = new_policy(replicas), random.Random(1)
    requests = [[request(session, turn) for turn in range(TURNS)] for session in range(SESSIONS)]
    key_ms, rest_ms = [], []
    warm_up = decisions // 10
    gc.collect()
    for n in range(-warm_up, decisions):
        asked = requests[n % SESSIONS][n // SESSIONS % TURNS]
        began = time.thread_time_ns()
        key = prefix_key(asked)
        key_ns = time.thread_time_ns() - began
        rest_ns = decide(policy, candidates, str(n), key, n * 0.01, draw)
        if n >= 0:
            key_ms.append(key_ns / 1e6)
            rest_ms.append(rest_ns / 1e6)
        policy.complete(str(n - 100), n * 0.01)
    whole = [key + rest for key, rest in zip(key_ms, rest_ms, strict=True)]
    starts = range(0, max(decisions - BATCH, 0) + 1, BATCH)
    best = min(starts, key=lambda start: percentile(whole[start : start + BATCH], 0.5))
    batches = [ms[best : best + BATCH] for ms in (key_ms, rest_ms, whole)]
    parts = [percentile(ms, share) for ms in batches for share in (0.5, 0.99)]
    return Cost(replicas, *[*parts, max(whole)])


def memory_mb(replicas: int, count: int) -> float:
    """What a policy holds after `count` long prompts of which none is like another."""
    chains = Chains()
    raws = [Raw(float(n), 24 * 512, 1, chains.of((n, k) for k in range(24))) for n in range(count)]
    keys = [key_of(one, 512) for one in workload("memory", 512, raws).requests]
    draw = random.Random(1)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    policy, candidates = new_policy(replicas)
    for n, key in enumerate(keys):
        decide(policy, candidates, str(n), key, n * 0.01, draw)
        policy.complete(str(n - 100), n * 0.01)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--keys", type=int, default=MEMORY_KEYS, help="prompts before memory is measured")
    args = parser.parse_args()

    machine = f"{platform.machine()}, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}"
    print(f"{machine}; CPU ms, prompt of 32 KB\n")
    columns = ("replicas", "key p50", "p99", "the rest p50", "p99", "both p50", "p99", "longest")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    costs = [measure(replicas, args.decisions) for replicas in SIZES]
    for cost in costs:
        print(f"| {cost.replicas:,} | {' | '.join(f'{value:.3f}' for value in msgspec.structs.astuple(cost)[1:])} |")
    rss = psutil.Process().memory_info().rss / 2**20
    held = memory_mb(SIZES[-1], args.keys)
    print(f"\nprocess: {rss:.0f} MB; of the policy after {args.keys:,} prompts: {held:.1f} MB\n")
    listed, read = min(stalls(SIZES[-1]) for _ in range(5))
    print(f"1,000 replicas listed at once: {listed:.1f} ms; all with something new to say: {read:.1f} ms in one turn\n")
    print("| bar | value | limit | |\n|---|---|---|---|")
    print(Bar("CPU ms per decision, p99, 1,000 replicas", costs[-1].whole_p99, MAX_P99_MS).line())
    longest = max(listed, read, *(cost.longest for cost in costs))
    print(Bar("CPU ms of the event loop's longest turn", longest, MAX_STALL_MS).line())
    print(Bar("MB of a policy", held, MAX_MB).line())


if __name__ == "__main__":
    main()
