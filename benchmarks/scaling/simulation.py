"""Serve's controller with more replicas than one machine has room for: one thread, its turns, its questions.

A turn looks at every replica, asks those that are due, and takes what was answered since the last one. If any replica
says something new, the list of all is made, and sent to every gateway. Then the controller rests for a while. With much
to do turns come later, and with them everything that depends on turns. Costs are those measured.
"""

from __future__ import annotations

import random

import msgspec

from benchmarks.scaling.inputs import INPUTS, Inputs
from deployments.app import ROUTING_STATS_S
from deployments.bench.report import percentile
from deployments.bookkeeping import LARGE_FLEET, LARGE_FLEET_STATS_S
from deployments.settings import CONTROL_LOOP_S

JITTER = 0.1
WARM_UP_S, SPAN_S = 30.0, 120.0


class Simulated(msgspec.Struct, frozen=True):
    """Ages in seconds: from when a replica has something new to say until all gateways have been sent it."""

    replicas: int
    gateways: int
    busy: float
    """The share of the time that the controller works."""
    turn_s: float
    """From one turn's beginning to the next one's."""
    lists_per_s: float
    age_p50_s: float
    age_p99_s: float
    sent_bytes_per_s: float


def simulate(
    replicas: int,
    gateways: int,
    template_bytes: int,
    inputs: Inputs = INPUTS,
    rest_s: float = CONTROL_LOOP_S,
    seed: int = 1,
) -> Simulated:
    draw = random.Random(seed)
    every_s = LARGE_FLEET_STATS_S if replicas > LARGE_FLEET else ROUTING_STATS_S
    turn_s = inputs.turn_s + replicas * inputs.turn_per_replica_s
    list_s = inputs.made_s(replicas, template_bytes) + gateways * inputs.sending_s(replicas, template_bytes)
    ask_at = [draw.uniform(0.0, ROUTING_STATS_S) for _ in range(replicas)]
    new_at = [draw.uniform(0.0, every_s) for _ in range(replicas)]
    asked: list[int] = []
    now, busy, turns, lists = 0.0, 0.0, 0, 0
    ages: list[float] = []
    while now < WARM_UP_S + SPAN_S:
        began = now
        said_at = [new_at[number] for number in asked if new_at[number] <= began]
        for number in asked:
            ask_at[number] = began + ROUTING_STATS_S * draw.uniform(1 - JITTER, 1 + JITTER)
            if new_at[number] <= began:
                new_at[number] = began + every_s * draw.uniform(1 - JITTER, 1 + JITTER)
        asked = [number for number in range(replicas) if ask_at[number] <= began]
        for number in asked:
            ask_at[number] = float("inf")
        work = turn_s + (list_s if said_at else 0.0)
        now += work
        if began >= WARM_UP_S:
            turns, lists, busy = turns + 1, lists + bool(said_at), busy + work
            ages += [now - said for said in said_at]
        now += rest_s
    span = turns * rest_s + busy
    return Simulated(
        replicas,
        gateways,
        busy / span,
        span / turns,
        lists / span,
        percentile(ages, 0.5),
        percentile(ages, 0.99),
        lists / span * gateways * inputs.list_bytes(replicas, template_bytes),
    )
