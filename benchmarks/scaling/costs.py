"""What a list of replicas, a question and a connection cost, measured in this process, without a cluster.

    python -m benchmarks.scaling.costs

Every change of a replica's stats makes Serve's controller send the whole list of its model's replicas to every gateway.
Here the list is built, compared, pickled, unpickled and given to our router as Serve does it, with Serve's own classes.
CPU is this thread's, the least of some repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import platform
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import psutil
from ray import cloudpickle
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    DeploymentTargetInfo,
    ReplicaID,
    RunningReplicaInfo,
)
from ray.serve._private.long_poll import UpdatedObject
from ray.serve.request_router import RunningReplica

from backends.base import BackendStats, ModelCard
from benchmarks.router.cost import request
from benchmarks.scaling.tiny import TEMPLATE_BYTES, metadata, routing_stats
from deployments.bookkeeping import Book
from deployments.channel import ChannelAddress, ChannelHub, ChannelServer, framed
from deployments.router import ModelRouter
from deployments.routing.ask import VERSION, Ask, DigestPull, Intent, ToGateway, ToReplica
from deployments.routing.key import prefix_key

SIZES = (10, 100, 1000)
REPEATS = 7
MESSAGES = 2000
CONNECTIONS = 1000
DEPLOYMENT_ID = DeploymentID(name="Model", app_name="smollm2-135m")


class ListCost(msgspec.Struct, frozen=True):
    """Of one list of all replicas: its bytes, and milliseconds of CPU."""

    replicas: int
    template_bytes: int
    size: int
    build_ms: float
    """The controller's: the list, and whether it is another than the last."""
    pickle_ms: float
    """The controller's, for each gateway."""
    unpickle_ms: float
    """A gateway's, as the rest."""
    first_ms: float
    """The first list, all replicas of which are new. Without looking up their actors."""
    update_ms: float


class Messages(msgspec.Struct, frozen=True):
    """Bytes on the wire and microseconds of CPU at the replica, reading and answering included."""

    ask_bytes: int
    reply_bytes: int
    ask_us: float
    intent_bytes: int
    intent_us: float
    digest_us: float
    digest_bytes: int
    """Of 200 requests, the most there can be."""


def cpu_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.thread_time_ns()
        work()
        best = min(best, (time.thread_time_ns() - began) / 1e6)
    return best


def pickled(what: object) -> bytes:
    """As Ray does it."""
    data: bytes = cloudpickle.dumps(what)  # type: ignore[no-untyped-call]  # cloudpickle does not type it
    return data


def infos(replicas: int, count: int, template_bytes: int) -> list[RunningReplicaInfo]:
    """What the controller knows of `replicas`, each as it came from its replica: no two share a string."""
    return [
        RunningReplicaInfo(
            replica_id=ReplicaID(f"replica{n:06d}", DEPLOYMENT_ID),
            node_id="n" * 56,
            node_ip="10.0.0.1",
            availability_zone=None,
            actor_name=f"SERVE_REPLICA::smollm2-135m#Model#replica{n:06d}",
            max_ongoing_requests=64,
            routing_stats=routing_stats(count + n),
            replica_metadata=pickle.loads(pickle.dumps(metadata(n, template_bytes))),
        )
        for n in range(replicas)
    ]


def list_cost(replicas: int, template_bytes: int) -> ListCost:
    old = infos(replicas, 0, template_bytes)
    parts = [(one.routing_stats, one.replica_metadata) for one in infos(replicas, 1, template_bytes)]

    def build() -> list[RunningReplicaInfo]:
        new = [
            RunningReplicaInfo(
                replica_id=one.replica_id,
                node_id=one.node_id,
                node_ip=one.node_ip,
                availability_zone=None,
                actor_name=one.actor_name,
                max_ongoing_requests=64,
                routing_stats=stats,
                replica_metadata=described,
            )
            for one, (stats, described) in zip(old, parts, strict=True)
        ]
        assert set(old) != set(new)
        return new

    update = {"key": UpdatedObject(DeploymentTargetInfo(True, build()), 7, 0.0)}
    data = pickled(update)
    first_ms, update_ms = asyncio.run(_router_ms([infos(replicas, n, template_bytes) for n in range(REPEATS + 1)]))
    return ListCost(
        replicas,
        template_bytes,
        len(data),
        cpu_ms(build),
        cpu_ms(lambda: pickled(update)),
        cpu_ms(lambda: pickle.loads(data)),
        first_ms,
        update_ms,
    )


class _Router(ModelRouter):
    async def _probe_queue_lens(self, replicas: list[RunningReplica], backoff_index: int) -> list[Any]:
        return []  # there are none


async def _router_ms(lists: list[list[RunningReplicaInfo]]) -> tuple[float, float]:
    """Of the first list that a router gets, and of each one that follows, what replicas say of themselves included."""
    with mock.patch.object(RunningReplicaInfo, "get_actor_handle", lambda _: mock.Mock()):
        first, later = float("inf"), float("inf")
        for _ in range(3):
            source = DeploymentHandleSource.REPLICA
            router = _Router(DEPLOYMENT_ID, source, create_replica_wrapper_func=RunningReplica)
            router.initialize_state()
            for number, one in enumerate(lists):
                if not number:  # the look-ups of actors, before
                    router._replicas = {info.replica_id: RunningReplica(info) for info in one}
                began = time.thread_time_ns()
                router._update_running_replicas(one)
                while router._unread:
                    await asyncio.sleep(0)
                took = (time.thread_time_ns() - began) / 1e6
                first, later = (min(first, took), later) if not number else (first, min(later, took))
        return first, later


def messages() -> Messages:
    card = ModelCard(context_length=8192, slots=8, engine="llamacpp", parameters=134_515_008)
    sent: list[bytes] = []

    class Link:
        def send(self, message: object) -> None:
            sent.append(bytes(framed(message)))

    book, link, draw = Book(card, lambda: BackendStats(slots=8, running=0, waiting=0), 64), Link(), random.Random(1)
    keys = [prefix_key(request(session, 7)) for session in range(64)]
    for n, key in enumerate(keys):
        book.tracker.admit(str(n), key, n * 0.01)
        book.tracker.intend(Intent(VERSION, key.rungs[-1], key.rungs[0], 5000, True), n * 0.01)

    def us(parts: list[bytes]) -> float:
        def all_of_them() -> None:
            for part in parts:
                book.on_aside(link, part)  # type: ignore[arg-type]  # only sends
                sent.clear()

        return 1e3 * cpu_ms(all_of_them) / len(parts)

    def packed(message: ToReplica) -> bytes:
        return msgspec.msgpack.encode(message)

    asks = [packed(ToReplica(n, ask=Ask(VERSION, draw.choice(keys).rungs))) for n in range(MESSAGES)]
    intents = [
        packed(ToReplica(intent=Intent(VERSION, draw.getrandbits(63), draw.getrandbits(63), 5000, True)))
        for _ in range(MESSAGES)
    ]
    book.on_aside(link, asks[0])  # type: ignore[arg-type]  # only sends
    reply = len(sent[0])
    intent_us = us(intents)
    pulls = [packed(ToReplica(n, pull=DigestPull(VERSION, 0, 1000))) for n in range(MESSAGES // 10)]
    sent.clear()
    book.on_aside(link, pulls[0])  # type: ignore[arg-type]  # only sends
    digest = len(sent[0])
    assert msgspec.msgpack.decode(sent[0][4:], type=ToGateway).digest is not None
    return Messages(max(map(len, asks)) + 4, reply, us(asks), max(map(len, intents)) + 4, intent_us, us(pulls), digest)


async def connection_bytes(count: int) -> float:
    """Of this process, which has both ends of every connection; the kernel's buffers are not among it."""
    server, hub = ChannelServer(), ChannelHub(4096, max_connections=count)
    own = await server.start("0.0.0.0")
    process = psutil.Process()
    before = process.memory_full_info().uss
    addresses = {
        str(n): ChannelAddress(f"127.0.{1 + n // 250}.{1 + n % 250}", own.port, own.secret) for n in range(count)
    }
    hub.set_replicas("m", addresses)
    while len(hub.connected) < count:
        await asyncio.sleep(0.05)
    held = process.memory_full_info().uss - before
    hub.set_replicas("m", {})
    await server.aclose()
    return held / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    args = parser.parse_args()

    held = asyncio.run(connection_bytes(args.connections))  # first: memory that others have freed would hide it
    load = f"load average {os.getloadavg()[0]:.1f}"
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {load}; ms of CPU\n")
    print("| replicas | template, bytes | list, KB | build | pickle | unpickle | first list | a list |")
    print("|---|---|---|---|---|---|---|---|")
    for template_bytes in (0, TEMPLATE_BYTES):
        for replicas in SIZES:
            cost = list_cost(replicas, template_bytes)
            times = (cost.build_ms, cost.pickle_ms, cost.unpickle_ms, cost.first_ms, cost.update_ms)
            print(
                f"| {replicas:,} | {template_bytes:,} | {cost.size / 1000:,.0f} | "
                f"{' | '.join(f'{value:.2f}' for value in times)} |"
            )
    found = messages()
    print(
        f"\nask: {found.ask_bytes} + {found.reply_bytes} bytes, {found.ask_us:.1f} µs at the replica; intent: "
        f"{found.intent_bytes} bytes, {found.intent_us:.1f} µs; digest of 200: {found.digest_bytes:,} bytes, "
        f"{found.digest_us:.1f} µs"
    )
    print(f"memory of a connection, both ends together: {held / 1000:.1f} KB ({args.connections:,} of them)")


if __name__ == "__main__":
    main()
