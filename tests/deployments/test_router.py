"""The shell between Serve's router and ours, run by Serve's own base class, without a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RunningReplica

from backends.base import ModelCard
from deployments import channel
from deployments.app import ROUTER
from deployments.channel import ChannelAddress
from deployments.replica import ReplicaMetadata
from deployments.router import ModelRouter
from deployments.routing import load, policy
from tests.deployments.fake_serve import DEPLOYMENT, FakeRunningReplica, pending
from tests.deployments.support import WITHIN_S, eventually, settle


class FakeHub:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, ChannelAddress]]] = []
        self.capacity = -1

    def set_replicas(self, model: str, addresses: Mapping[str, ChannelAddress], capacity: int) -> None:
        self.told.append((model, dict(addresses)))
        self.capacity = capacity


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    channel.install_hub(hub)  # type: ignore[arg-type]
    yield hub
    channel.install_hub(None)


def router(*replicas: FakeRunningReplica, cls: Callable[..., ModelRouter] = ModelRouter) -> ModelRouter:
    made = cls(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, initial_backoff_s=0.001)
    made.initialize_state()
    if replicas:
        made.update_replicas(list(replicas))
    return made


def metadata(port: int) -> dict[str, Any]:
    card = ModelCard(context_length=128, slots=4, engine="fake")
    return ReplicaMetadata(ChannelAddress("10.0.0.1", port, "secret"), card).to_plain()


def tokens(router: ModelRouter, now: float = 0.0) -> dict[str, int]:
    return router._load.snapshot(now)


async def chosen(router: ModelRouter, name: str) -> RunningReplica:
    """The replica Serve's own machinery ends up with."""
    async with asyncio.timeout(WITHIN_S):
        replica: RunningReplica = await router._choose_replica_for_request(pending(name, tokens=10))
    return replica


# --- ranks ------------------------------------------------------------------------------------------------------------


async def test_ranks_are_the_best_the_next_best_and_everybody() -> None:
    a, b, c = (FakeRunningReplica(name) for name in "abc")
    made = router(a, b, c)
    made._load.reserve("other1", "b", 20, 0.0)
    made._load.reserve("other2", "c", 10, 0.0)
    made._load.accept("other1", "b")
    made._load.accept("other2", "c")
    assert await made.choose_replicas([a, b, c], pending("q")) == [[a], [c], [a, b, c]]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
async def test_the_last_rank_is_everybody(count: int) -> None:
    """One full or slow replica must not hold a request that others could run."""
    replicas: list[RunningReplica] = [FakeRunningReplica(f"r{i}") for i in range(count)]
    ranks = await router().choose_replicas(replicas, pending("q"))
    assert ranks[-1] == replicas
    assert all(len(rank) == 1 for rank in ranks[:-1])
    assert len({rank[0].replica_id for rank in ranks[:-1]}) == min(count, 2)


async def test_without_candidates_there_is_nothing_to_choose() -> None:
    made = router()
    ranks = await made.choose_replicas([], pending("q"))
    assert [replica for rank in ranks for replica in rank] == []
    assert tokens(made) == {}


async def test_a_turn_in_which_all_are_full_is_not_repeated_at_once() -> None:
    request = pending("q")
    assert not request.routing_context.should_backoff
    await router().choose_replicas([FakeRunningReplica("a")], request)
    assert request.routing_context.should_backoff


async def test_idle_replicas_are_chosen_in_turn_and_in_no_fixed_order() -> None:
    replicas: list[RunningReplica] = [FakeRunningReplica(name) for name in "abcd"]
    orders = set()
    for round_ in range(40):
        made = router()
        ranks = [await made.choose_replicas(replicas, pending(f"{round_}-{i}", tokens=10)) for i in range(4)]
        firsts = tuple(str(rank[0][0]) for rank in ranks)
        assert sorted(firsts) == ["a", "b", "c", "d"], "each choice counts before the next is made"
        orders.add(firsts)
    assert len(orders) > 1


async def test_a_large_request_counts_more_than_small_ones() -> None:
    replicas: list[RunningReplica] = [FakeRunningReplica(name) for name in "ab"]
    made = router()
    (large,) = (await made.choose_replicas(replicas, pending("large", tokens=1000)))[0]
    for i in range(5):
        (small,) = (await made.choose_replicas(replicas, pending(f"small{i}", tokens=10)))[0]
        assert small is not large


async def test_without_a_request_all_candidates_are_ranked_and_nothing_is_reserved() -> None:
    """Serve calls it so in places of its own."""
    replicas: list[RunningReplica] = [FakeRunningReplica(name) for name in "abc"]
    made = router()
    ranks = await made.choose_replicas(replicas)
    assert ranks[-1] == replicas
    assert len(ranks) == 3
    assert tokens(made) == {}


async def test_an_exception_in_the_policy_leaves_all_candidates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve drops a request whose router raises, and its caller waits forever."""

    def broken(*_: object) -> list[str]:
        raise ZeroDivisionError

    monkeypatch.setattr(policy, "rank", broken)
    replicas = [FakeRunningReplica(name) for name in "ab"]
    request = pending("q")
    made = router(*replicas)
    assert await made.choose_replicas(list(replicas), request) == [replicas]
    assert request.routing_context.should_backoff
    assert await chosen(made, "q2") in replicas
    assert any(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)


@pytest.mark.parametrize("kwargs", [{}, {"hint": None}, {"hint": {"tokens": 5}}, {"hint": 5}])
async def test_a_request_without_a_usable_hint_is_routed_too(kwargs: dict[str, Any]) -> None:
    request = pending("q")
    request.kwargs = kwargs
    made = router()
    assert len(await made.choose_replicas([FakeRunningReplica("a")], request)) == 2
    assert tokens(made) == {"a": policy.TYPICAL_OUTPUT_TOKENS}


# --- through Serve's machinery ----------------------------------------------------------------------------------------


async def test_serve_takes_the_first_choice() -> None:
    made = router(*[FakeRunningReplica(name) for name in "abc"])
    first = await chosen(made, "q1")
    assert tokens(made) == {str(first): 10}
    assert await chosen(made, "q2") is not first


async def test_serve_passes_over_a_full_replica() -> None:
    full, free = FakeRunningReplica("full", max_ongoing_requests=1), FakeRunningReplica("free")
    full.queue_len = 1
    made = router(full, free)
    for i in range(8):
        assert await chosen(made, f"q{i}") is free


async def test_a_request_waits_while_all_are_full_and_others_go_on() -> None:
    only = FakeRunningReplica("only", max_ongoing_requests=1)
    only.queue_len = 1
    made = router(only)
    waiting = asyncio.create_task(chosen(made, "q"))
    await eventually(lambda: only.probes >= 3)
    assert not waiting.done()
    only.queue_len = 0
    assert await waiting is only


async def test_a_request_that_came_before_the_first_replica_gets_it() -> None:
    made = router()
    waiting = asyncio.create_task(chosen(made, "q"))
    await settle()
    assert not waiting.done()
    replica = FakeRunningReplica("late")
    made.update_replicas([replica])
    assert await waiting is replica


async def test_a_request_that_is_cancelled_while_it_waits_leaves_no_load() -> None:
    only = FakeRunningReplica("only", max_ongoing_requests=1)
    only.queue_len = 1
    made = router(only)
    waiting = asyncio.create_task(chosen(made, "q"))
    await eventually(lambda: only.probes >= 3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await settle()
    assert tokens(made, asyncio.get_running_loop().time() + load.RESERVATION_S + 60) == {}


async def test_the_class_serve_builds_from_the_config_shares_our_state(hub: FakeHub) -> None:
    """Serve pickles the router's module by value: what it keeps itself would be a second copy."""
    cls = RequestRouterConfig(request_router_class=ROUTER).get_request_router_class()  # type: ignore[arg-type]
    made = router(FakeRunningReplica("a", metadata(1)), cls=cls)
    assert len(hub.told) == 1
    await made.choose_replicas([FakeRunningReplica("a")], pending("q", tokens=10))
    assert tokens(made) == {"a": 10}, "a hint of the gateway is a hint of the router's class too"


# --- which replicas there are -----------------------------------------------------------------------------------------


async def test_the_hub_is_told_where_replicas_listen(hub: FakeHub) -> None:
    made = router(FakeRunningReplica("a", metadata(1)), FakeRunningReplica("b", metadata(2)))
    addresses = {"a": ChannelAddress("10.0.0.1", 1, "secret"), "b": ChannelAddress("10.0.0.1", 2, "secret")}
    assert hub.told == [("m", addresses)]
    made.update_replicas([])
    assert hub.told[1:] == [("m", {})]


@pytest.mark.parametrize(
    "foreign", [{}, {"port": 5}, {"channel": "tcp://x"}, {"channel": {"host": "h", "port": "no", "secret": "s"}}]
)
async def test_a_replica_with_foreign_metadata_is_routed_to_but_not_connected_to(
    hub: FakeHub, foreign: dict[str, Any]
) -> None:
    ours, theirs = FakeRunningReplica("ours", metadata(1)), FakeRunningReplica("theirs", foreign)
    made = router(ours, theirs)
    assert [set(addresses) for _, addresses in hub.told] == [{"ours"}]
    assert {await chosen(made, "q1"), await chosen(made, "q2")} == {ours, theirs}


async def test_metadata_survives_being_made_plain() -> None:
    plain = metadata(7)
    known = ReplicaMetadata.from_plain(plain)
    assert known is not None
    assert known.channel.port == 7
    assert known.to_plain() == plain
    assert all(type(value) is dict for value in plain.values())


async def test_without_a_hub_routing_goes_on() -> None:
    """A router may be made outside a gateway, in a driver or a proxy."""
    assert channel.current_hub() is None
    replica = FakeRunningReplica("a", metadata(1))
    assert await chosen(router(replica), "q") is replica


async def test_the_load_of_a_replica_that_is_gone_is_forgotten() -> None:
    a, b = FakeRunningReplica("a"), FakeRunningReplica("b")
    made = router(a, b)
    for i in range(4):
        await chosen(made, f"q{i}")
    assert tokens(made) == {"a": 20, "b": 20}
    made.update_replicas([b])
    assert tokens(made) == {"b": 20}


# --- load through the hooks -------------------------------------------------------------------------------------------


async def test_a_request_counts_from_its_choice_to_its_end() -> None:
    a = FakeRunningReplica("a")
    made = router(a)
    request = pending("q", tokens=30)
    await made.choose_replicas([a], request)
    assert tokens(made) == {"a": 30}
    made.on_request_routed(request, a.replica_id, None)
    assert tokens(made, now=1e12) == {"a": 30}
    made.on_request_completed(a.replica_id, "q")
    assert tokens(made) == {}


async def test_a_request_counts_where_it_went_not_where_it_was_meant_to_go() -> None:
    a, b = FakeRunningReplica("a"), FakeRunningReplica("b")
    made = router()
    request = pending("q", tokens=30)
    ((first, *_), (second, *_), _) = await made.choose_replicas([a, b], request)
    made.on_request_routed(request, second.replica_id, None)
    assert tokens(made) == {str(second): 30}
    assert first is not second


async def test_a_choice_nobody_accepts_stops_counting() -> None:
    a = FakeRunningReplica("a")
    made = router(a)
    await made.choose_replicas([a], pending("q", tokens=30))
    assert tokens(made, now=1e12) == {}


async def test_a_rejected_request_is_free_to_be_chosen_again() -> None:
    """Serve reports a rejection as a completion, and then asks for replicas anew."""
    a = FakeRunningReplica("a")
    made = router(a)
    request = pending("q", tokens=30)
    await made.choose_replicas([a], request)
    made.on_request_completed(a.replica_id, "q")
    await made.choose_replicas([a], request)
    made.on_request_routed(request, a.replica_id, None)
    assert tokens(made, now=1e12) == {"a": 30}
