"""The simulated controller: what it says where the answer can be worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.scaling.inputs import Inputs
from benchmarks.scaling.simulation import simulate
from deployments.app import ROUTING_STATS_S
from deployments.bookkeeping import LARGE_FLEET_STATS_S

REST_S = 0.1
FREE = Inputs(
    turn_s=0.0,
    turn_per_replica_s=0.0,
    list_s=0.0,
    list_per_replica_s=0.0,
    list_per_template_byte_s=0.0,
    sent_s=0.0,
    sent_per_replica_s=0.0,
    sent_per_template_byte_s=0.0,
)


def test_a_controller_to_which_nothing_costs_anything_only_sleeps() -> None:
    found = simulate(10, 2, 0, FREE, REST_S)

    assert found.busy == 0.0
    assert found.turn_s == pytest.approx(REST_S)
    assert 0.0 < found.age_p99_s <= 1.1 * ROUTING_STATS_S + 2 * REST_S


def test_a_replica_of_a_large_fleet_says_something_new_every_ten_seconds() -> None:
    found = simulate(40, 2, 0, FREE, REST_S)

    # Each of 40 in 10 s or the time to the next question more, some of them in the same turn.
    assert 40 / (1.1 * LARGE_FLEET_STATS_S + 1.1 * ROUTING_STATS_S) * 0.7 < found.lists_per_s
    assert found.lists_per_s < 40 / (0.9 * LARGE_FLEET_STATS_S)


def test_turns_take_what_their_replicas_cost_and_the_sleep() -> None:
    found = simulate(100, 2, 0, msgspec.structs.replace(FREE, turn_s=0.05, turn_per_replica_s=0.0005), REST_S)

    assert found.turn_s == pytest.approx(0.05 + 0.05 + REST_S)
    assert found.busy == pytest.approx(0.5)


def test_a_list_costs_making_it_once_and_sending_it_to_each_gateway() -> None:
    # 30 replicas, each with something new every 2 s: in every turn. A list takes 0.1 s, and 3 times 0.1 s to send.
    slow = msgspec.structs.replace(FREE, list_s=0.1, sent_per_template_byte_s=0.1 / 30 / 50)
    found = simulate(30, 3, 50, slow, REST_S)

    lists_per_turn = found.lists_per_s * found.turn_s
    assert 0.95 < lists_per_turn <= 1.0
    assert found.turn_s == pytest.approx(REST_S + 0.4 * lists_per_turn)


def test_every_gateway_is_sent_the_whole_list() -> None:
    sized = msgspec.structs.replace(FREE, bytes_per_replica=1000.0)
    one, four = simulate(100, 1, 500, sized), simulate(100, 4, 500, sized)

    assert one.sent_bytes_per_s == pytest.approx(one.lists_per_s * 100 * 1500)
    assert four.sent_bytes_per_s == pytest.approx(4 * one.sent_bytes_per_s)


def test_sending_to_many_gateways_makes_lists_rarer_and_older() -> None:
    slow = msgspec.structs.replace(FREE, sent_per_replica_s=1e-3)
    few, many = simulate(200, 1, 0, slow), simulate(200, 16, 0, slow)

    assert many.lists_per_s < few.lists_per_s
    assert many.age_p50_s > few.age_p50_s
    assert many.busy > few.busy
