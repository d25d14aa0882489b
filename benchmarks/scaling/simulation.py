"""Serve's controller with more replicas than one machine has room for: one thread, its turns, its questions.

A turn looks at every replica, asks those that are due, and takes what was answered since the last one. If any replica
says something new, the list of all is built, and pickled for every gateway. Then the controller sleeps a tenth of a
second, in which it answers what has arrived. All of that is one thread's work, so with much of it turns come later, and
with them everything that depends on turns. Costs are those measured (`inputs.py`).
"""

from __future__ import annotations

import random

import msgspec

from benchmarks.scaling.inputs import INPUTS, Inputs
from deployments.app import ROUTING_STATS_S
from deployments.bench.report import percentile
from deployments.bookkeeping import LARGE_FLEET, LARGE_FLEET_STATS_S

SLEEP_S = 0.1
JITTER = 0.1
MOST_ARRIVING = 0.95
"""Cores: with more of it to answer than that the controller does not keep up at all, and nothing here is true."""
WARM_UP_S, SPAN_S = 30.0, 120.0


class Simulated(msgspec.Struct, frozen=True):
    """`busy`: the share of the time that the controller works. Ages in seconds, from a replica's saying something new
    until the last gateway has been sent it.
    """

    replicas: int
    gateways: int
    busy: float
    turn_s: float
    """From one turn's beginning to the next one's."""
    lists_per_s: float
    age_p50_s: float
    age_p99_s: float
    sent_bytes_per_s: float


def simulate(replicas: int, gateways: int, template_bytes: int, inputs: Inputs = INPUTS, seed: int = 1) -> Simulated:
    draw = random.Random(seed)
    every_s = LARGE_FLEET_STATS_S if replicas > LARGE_FLEET else ROUTING_STATS_S
    list_bytes = inputs.list_bytes(replicas, template_bytes)
    build_s, pickle_s = inputs.build_s(replicas, template_bytes), inputs.pickle_s(replicas)
    ask_at = [draw.uniform(0.0, ROUTING_STATS_S) for _ in range(replicas)]
    new_at = [draw.uniform(0.0, every_s) for _ in range(replicas)]
    arriving = min(inputs.arrivals_s(replicas), MOST_ARRIVING)
    asked: list[int] = []
    now, busy, turns, lists = 0.0, 0.0, 0, 0
    ages: list[float] = []
    while now < WARM_UP_S + SPAN_S:
        began, work = now, inputs.turn_s + replicas * inputs.turn_per_replica_s
        heard = [number for number in asked if new_at[number] <= began]
        for number in asked:
            ask_at[number] = began + ROUTING_STATS_S * draw.uniform(1 - JITTER, 1 + JITTER)
        said_at = [new_at[number] for number in heard]
        for number in heard:
            new_at[number] = began + every_s * draw.uniform(1 - JITTER, 1 + JITTER)
        asked = [number for number in range(replicas) if ask_at[number] <= began]
        for number in asked:
            ask_at[number] = float("inf")
        if heard:
            work += build_s + gateways * pickle_s
        now += work
        if began >= WARM_UP_S:
            turns, lists, busy = turns + 1, lists + bool(heard), busy + work
            ages += [now - said for said in said_at]
        # What arrives while the turn and the sleep last is answered in the sleep, which takes longer if it has to.
        asleep = max(SLEEP_S, arriving * work / (1 - arriving))
        now += asleep
        if began >= WARM_UP_S:
            busy += arriving * (work + asleep)
    span = now - WARM_UP_S
    return Simulated(
        replicas,
        gateways,
        busy / span,
        span / turns,
        lists / span,
        percentile(ages, 0.5),
        percentile(ages, 0.99),
        lists / span * gateways * list_bytes,
    )
