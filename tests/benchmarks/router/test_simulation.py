"""The simulator that compares routers: what it must never get wrong, whatever the rule."""

from __future__ import annotations

import random

import pytest

from benchmarks.router import generated, ladder, legs, workloads
from benchmarks.router.fleet import OVERHEAD_S, Fleet, PrefixIndex
from benchmarks.router.legs import RULES
from benchmarks.router.measures import Result
from benchmarks.router.ours import Ours
from benchmarks.router.simulation import Add, Drain, Kill, RestartGateway, Scenario, Simulation
from benchmarks.router.workloads import Raw, Workload, workload
from deployments.bench import svg

CHANGES = (Kill(3.0, 1), Add(5.0, 2), Drain(6.0, 0), RestartGateway(7.0, 0))


def small(seed: int = 1, count: int = 120) -> Workload:
    """Conversations of up to 6 turns that begin with one of two system prompts."""
    draw, chains, raws = random.Random(seed), generated.Chains(), []
    for session in range(count // 4):
        turns = draw.randint(2, 6)
        names = [("system", draw.randrange(2))] * 2 + [(session, n) for n in range(2 * turns)]
        start = draw.uniform(0, 8)
        for turn in range(1, turns + 1):
            blocks = chains.of(enumerate(names[: 2 + 2 * turn]))
            ends = tuple(range(2, len(blocks) + 1, 2))
            raws.append(Raw(start + turn, len(blocks) * 128, 20, blocks, ends, session, turn > 1))
    return workload("small", 128, raws)


def run(rule: str, given: Workload, **settings: object) -> Result:
    scenario = Scenario("small", 0.8, replicas=4, gateways=2, **settings)  # type: ignore[arg-type]
    return Simulation(scenario, given, RULES[rule]).run()


@pytest.mark.parametrize("rule", RULES)
def test_every_request_ends_once_through_failures_and_scaling(rule):
    given = small()
    result = run(rule, given, changes=CHANGES)  # the recorder and the fleet check their own books at the end
    assert result.requests == len(given.requests)
    assert result.ttft_p50_s >= OVERHEAD_S


@pytest.mark.parametrize("rule", RULES)
def test_the_same_seed_gives_the_same_run(rule):
    assert run(rule, small()) == run(rule, small())


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_hits_more_than_an_infinite_shared_cache(rule):
    given = small()
    result = run(rule, given)
    assert 0 <= result.hit <= given.bound
    assert 0 <= result.follow_up_hit <= 1


def test_the_oracle_leaves_no_replica_that_would_have_been_sooner():
    assert run("oracle", small()).spurious == 0
    assert run("random", small()).spurious > 0


def test_one_replica_with_room_reaches_the_bound():
    given = small()
    scenario = Scenario("small", 0.5, replicas=1, gateways=1)
    assert Simulation(scenario, given, RULES["random"]).run().hit == pytest.approx(given.bound)


def test_lost_asks_still_route_every_request():
    assert run("ours C", small(), ask_loss=1.0).requests == len(small().requests)


def test_the_production_modules_add_up_after_failures_and_scaling():
    scenario = Scenario("small", 0.8, replicas=4, gateways=2, changes=CHANGES)
    simulation = Simulation(scenario, small(), RULES["ours C"])
    simulation.run()
    assert isinstance(simulation.rule, Ours)
    simulation.rule.check()


def test_bound_counts_what_came_before_and_never_the_last_token():
    raws = [Raw(0.0, 256, 1, (1, 2)), Raw(1.0, 256, 1, (1, 2)), Raw(2.0, 384, 1, (1, 2, 3))]
    assert [request.cacheable for request in workload("w", 128, raws).requests] == [0, 255, 256]


def test_a_trace_has_message_ends_where_prompts_part_or_end():
    raws = [Raw(0.0, 400, 1, (1, 2, 3, 4)), Raw(1.0, 384, 1, (1, 2, 5))]
    first, second = workload("w", 128, raws).requests
    assert first.message_ends == (2, 3)
    assert second.message_ends == (2, 3)


def test_prefix_index_agrees_with_walking_each_replica():
    draw, index = random.Random(4), PrefixIndex(5)
    held = [set(draw.sample(range(12), 8)) for _ in range(5)]
    for replica, blocks in enumerate(held):
        for block in blocks:
            index.add(block, replica)
    index.discard(next(iter(held[0])), 0)
    held[0].discard(next(iter(held[0])))
    for _ in range(50):
        asked = draw.sample(range(14), 6)
        expected = [next((n for n, block in enumerate(asked) if block not in blocks), 6) for blocks in held]
        assert index.depths(asked).tolist() == expected


def test_a_replica_evicts_leaves_before_roots_and_queues_in_order():
    fleet = Fleet(1, rate=100.0, capacity_blocks=3, max_sequences=1)
    fleet.start([0])
    first = fleet.serve(0, (1, 2), 0, 200, decode_s=1.0, now=0.0)
    second = fleet.serve(0, (3, 4), 0, 200, decode_s=1.0, now=0.0)
    assert second.began_at == first.finished_at  # one sequence at a time
    assert fleet.resident.depths((1, 2)).tolist() == [1]
    assert fleet.resident.depths((3, 4)).tolist() == [2]


def test_a_session_that_grows_keeps_its_rungs():
    chains = generated.Chains()
    raws = [Raw(float(n), n * 128, 1, chains.of(range(n)), tuple(range(2, n + 1, 2))) for n in (6, 10, 40)]
    keys = [ladder.key_of(request, 128) for request in workload("w", 128, raws).requests]
    for shorter, longer in zip(keys, keys[1:], strict=False):
        assert [shorter.rungs[n] for n in shorter.trunk] == [longer.rungs[n] for n in longer.trunk][
            : len(shorter.trunk)
        ]
        assert all(end <= longer.size for end in longer.ends)


@pytest.mark.parametrize("name", ["chat", "agents", "rag"])
def test_generated_prompts_are_the_same_every_time(name):
    make = generated.WORKLOADS[name]
    assert make() == make()


def test_legs_name_rules_and_workloads_that_exist():
    for quick in (False, True):
        for leg in legs.legs(quick=quick):
            assert set(leg.rules) <= RULES.keys()
            assert all(workloads.available(scenario.workload) for scenario in leg.scenarios.values())


def test_chart_draws_a_line_for_each_rule():
    drawn = svg.chart("title", ["1", "8"], {"a": [1.0, 2.0], "b & c": [3.0, 0.5]}, log=True)
    assert drawn.count("<polyline") == 2
    assert "b &amp; c" in drawn
