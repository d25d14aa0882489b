"""The shell between Serve's router and ours, run by Serve's own base class, without a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentHandleSource
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RunningReplica

from backends.base import ModelCard
from deployments import asks, channel
from deployments.app import ROUTER
from deployments.asks import Heard
from deployments.channel import ChannelAddress
from deployments.replica import ReplicaMetadata
from deployments.router import STATS_AT_ONCE, ModelRouter
from deployments.routing.ask import VERSION, Ask, AskReply, Digest, Intent
from deployments.routing.decision import BEST
from deployments.routing.hint import UNKNOWN
from deployments.routing.key import PrefixKey, bare_key
from deployments.routing.policy import Policy, PolicyOptions
from tests.deployments.fake_serve import DEPLOYMENT, FakeRunningReplica, pending
from tests.deployments.support import WITHIN_S, eventually, settle


class FakeHub:
    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, ChannelAddress]]] = []
        self.nodes: dict[str, str] = {}
        self.capacity = -1

    def set_replicas(
        self, model: str, addresses: Mapping[str, ChannelAddress], capacity: int, nodes: Mapping[str, str]
    ) -> None:
        self.told.append((model, dict(addresses)))
        self.nodes = dict(nodes)
        self.capacity = capacity


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    channel.install_hub(hub)  # type: ignore[arg-type]
    yield hub
    channel.install_hub(None)


class FakeAsks:
    """Replicas that answer with what the test says they hold; `holding` and `queued` are by replica id."""

    def __init__(self) -> None:
        self.options = PolicyOptions(seed=1)
        self.holding: dict[str, int] = {}
        self.queued: dict[str, int] = {}
        self.dead: set[str] = set()
        self.asked: list[tuple[str, ...]] = []
        self.intents: list[tuple[str, Intent | None]] = []
        self.taken: list[tuple[int, str]] = []
        self.observers: dict[str, Any] = {}
        self.answering = asyncio.Event()
        self.answering.set()

    def observe(self, model: str, observer: Any) -> None:
        self.observers[model] = observer

    async def ask(self, model: str, replicas: Collection[str], ask: Ask, within_s: float) -> Heard:
        self.asked.append(tuple(replicas))
        await asyncio.sleep(0)
        await self.answering.wait()
        replies = {id_: AskReply(VERSION, 1, self.holding.get(id_, 0), self.queued.get(id_, 0), 0) for id_ in replicas}
        return Heard(replicas, replies)

    def chosen(self, model: str, replica: str, intent: Intent | None) -> None:
        self.intents.append((replica, intent))

    def routed(self, call: int, replica: str) -> None:
        self.taken.append((call, replica))

    def broken(self, model: str) -> Collection[str]:
        return self.dead


@pytest.fixture
def asking() -> Iterator[FakeAsks]:
    fake = FakeAsks()
    asks.install(fake)  # type: ignore[arg-type]
    yield fake
    asks.install(None)


def router(*replicas: FakeRunningReplica, cls: Callable[..., ModelRouter] = ModelRouter) -> ModelRouter:
    made = cls(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True, initial_backoff_s=0.001)
    made.initialize_state()
    if replicas:
        made.update_replicas(list(replicas))
    return made


def metadata(port: int, version: int = VERSION) -> dict[str, Any]:
    card = ModelCard(context_length=128, slots=4, engine="fake")
    return ReplicaMetadata(ChannelAddress("10.0.0.1", port, "secret"), card, version, 1000.0).to_plain()


def replica(name: str, **options: Any) -> FakeRunningReplica:
    return FakeRunningReplica(name, metadata(1), **options)


def key(*rungs: int, tokens: int = 5000) -> PrefixKey:
    """A prompt of some seconds, with a rung for each of `rungs` at equal distances."""
    ends = tuple(tokens * (i + 1) // len(rungs) for i in range(len(rungs)))
    return PrefixKey(VERSION, rungs, ends, (0,) if rungs else (), tokens, in_tokens=True)


def counts(router: ModelRouter) -> dict[str, int]:
    """Requests this router thinks each replica has of it."""
    load, slots = router._policy._load.counts(), router._policy._fleet.slot_of
    return {id_: int(load[slot]) for id_, slot in slots.items() if load[slot]}


async def ranks(router: ModelRouter, request: Any) -> list[list[str]]:
    return [[str(r) for r in rank] for rank in await router.choose_replicas(router._replicas_list, request)]


async def first(router: ModelRouter, name: str, prompt: PrefixKey, **options: Any) -> str:
    return (await ranks(router, pending(name, prompt, **options)))[0][0]


async def chosen(router: ModelRouter, name: str, prompt: PrefixKey | None = None) -> RunningReplica:
    """The replica Serve's own machinery ends up with."""
    async with asyncio.timeout(WITHIN_S):
        found: RunningReplica = await router._choose_replica_for_request(pending(name, prompt or bare_key(36)))
    return found


# --- ranks ------------------------------------------------------------------------------------------------------------


async def test_the_only_replica_is_the_only_rank() -> None:
    """Each rank is tried: a full one would be asked twice. What it was sent is known when a second one comes."""
    a, b = replica("a"), replica("b")
    made = router(a)
    assert await ranks(made, pending("q", key(1, 2))) == [["a"]]
    made.update_replicas([a, b])
    assert counts(made) == {"a": 1}
    assert made._policy.plan(key(1, 2, 3), time.monotonic()).evidence
    made._policy.check_integrity()


@pytest.mark.parametrize("count", [2, 3, 7])
async def test_ranks_are_the_best_ones_then_everybody(count: int) -> None:
    """One full or slow replica must not hold a request that others could run."""
    replicas = [replica(f"r{i}") for i in range(count)]
    found = await ranks(router(*replicas), pending("q", key(1, 2)))
    assert sorted(found[-1]) == [f"r{i}" for i in range(count)]
    assert all(len(rank) == 1 for rank in found[:-1])
    assert len({rank[0] for rank in found[:-1]}) == len(found) - 1 == min(count, BEST)


async def test_without_candidates_there_is_nothing_to_choose() -> None:
    made = router()
    assert [r for rank in await made.choose_replicas([], pending("q", key(1))) for r in rank] == []


async def test_candidates_the_router_was_not_told_of_are_ranked_too() -> None:
    made = router(replica("a"))
    strangers: list[RunningReplica] = [replica("b"), replica("c")]
    found = await made.choose_replicas(strangers, pending("q", key(1)))
    assert {str(rank[0]) for rank in found[:2]} == {"b", "c"}
    assert sorted(map(str, found[-1])) == ["b", "c"]


async def test_a_turn_in_which_all_are_full_is_not_repeated_at_once() -> None:
    request = pending("q")
    assert not request.routing_context.should_backoff
    await router(replica("a")).choose_replicas([replica("a")], request)
    assert request.routing_context.should_backoff


async def test_idle_replicas_are_chosen_in_turn_and_in_no_fixed_order() -> None:
    orders = set()
    for round_ in range(40):
        made = router(*[replica(name) for name in "abcd"])
        firsts = tuple([await first(made, f"{round_}-{i}", bare_key(3600)) for i in range(4)])
        assert sorted(firsts) == ["a", "b", "c", "d"], "each choice counts before the next is made"
        orders.add(firsts)
    assert len(orders) > 1


async def test_a_large_request_counts_more_than_small_ones() -> None:
    made = router(*[replica(name) for name in "ab"])
    large = await first(made, "large", bare_key(36_000))
    for i in range(5):
        assert await first(made, f"small{i}", bare_key(360)) != large


async def test_without_a_request_all_candidates_are_ranked_and_nothing_is_reserved(asking: FakeAsks) -> None:
    """Serve calls it so in places of its own."""
    made = router(*[replica(name) for name in "abc"])
    found = await made.choose_replicas(made._replicas_list)
    assert [len(rank) for rank in found] == [2, 3]
    assert asking.asked == [] and counts(made) == {}


@pytest.mark.parametrize("broken", ["plan", "rank", "charge"])
async def test_an_exception_leaves_the_shorter_queue_of_two(
    broken: str, asking: FakeAsks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve drops a request whose router raises, and its caller waits forever."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Policy, broken, fail)
    replicas = [replica(name) for name in "abc"]
    request = pending("q", key(1, 2))
    made = router(*replicas)
    two, everybody = await made.choose_replicas(list(replicas), request)
    assert len(two) == 2 and everybody == replicas
    assert request.routing_context.should_backoff
    assert await chosen(made, "q2", key(1)) in replicas
    assert any(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)


@pytest.mark.parametrize("kwargs", [{}, {"hint": None}, {"hint": {"key": 5}}, {"hint": 5}])
async def test_a_request_without_a_usable_hint_is_routed_too(kwargs: dict[str, Any]) -> None:
    request = pending("q")
    request.kwargs = kwargs
    made = router(replica("a"))
    assert await ranks(made, request) == [["a"]]
    assert counts(made) == {"a": 1}


# --- asking -----------------------------------------------------------------------------------------------------------


async def test_the_replica_that_holds_the_prefix_is_the_first(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    for holder in "abc":
        asking.holding = {holder: 2}
        assert await first(made, f"q-{holder}", key(ord(holder), 1000 + ord(holder))) == holder
    assert all(set(asked) == {"a", "b", "c"} for asked in asking.asked)


async def test_a_long_queue_is_worth_more_than_a_prefix(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "ab"])
    asking.holding, asking.queued = {"a": 2}, {"a": 100_000}
    assert await first(made, "q", key(1, 2)) == "b"


async def test_the_chosen_replica_is_told_before_the_next_request_is_routed(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    winner = await first(made, "q", key(1, 2))
    ((told, intent),) = asking.intents
    assert told == winner
    assert intent is not None and (intent.leaf, intent.uncached_tokens) == (2, 5000)


async def test_requests_of_one_moment_do_not_all_go_to_one_replica(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abcd"])
    firsts = await asyncio.gather(*[first(made, f"q{i}", key(100 + i)) for i in range(8)])
    assert Counter(firsts) == dict.fromkeys("abcd", 2)


async def test_a_second_look_at_a_waiting_request_asks_nobody(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    request = pending("q", key(1, 2))
    before = await ranks(made, request)
    assert await ranks(made, request) == before
    assert len(asking.asked) == 1
    assert counts(made) == {before[0][0]: 1}


async def test_a_replica_that_refused_comes_last_at_the_second_look(asking: FakeAsks) -> None:
    """Serve reports a refusal as a completion, and then asks for replicas anew."""
    made = router(*[replica(name) for name in "abc"])
    request = pending("q", key(1, 2))
    (refusing,), (second,), *_ = await ranks(made, request)
    made.on_request_completed(made._replicas_list[ord(refusing) - ord("a")].replica_id, "q")
    assert counts(made) == {}
    assert (await ranks(made, request))[:3] == [[second], [*({*"abc"} - {refusing, second})], [refusing]]
    assert counts(made) == {second: 1}
    assert len(asking.asked) == 1


async def test_a_replica_whose_connection_broke_comes_after_all_others(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abcde"])
    asking.holding, asking.dead = {"a": 2}, {"a", "b"}
    *best, others, everybody = await ranks(made, pending("q", key(1, 2)))
    assert {rank[0] for rank in best} == set(others) == {"c", "d", "e"}
    assert sorted(everybody) == [*"abcde"]
    assert "a" not in counts(made)


async def test_a_replica_whose_connection_broke_is_not_asked_until_it_is_back(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    asking.dead, asking.holding = {"a"}, {"a": 2}
    assert await first(made, "q1", key(1, 2)) != "a"
    assert set(asking.asked[-1]) == {"b", "c"}
    asking.dead = set()
    assert await first(made, "q2", key(3, 4)) == "a"


async def test_if_all_may_be_dead_they_are_tried_all_the_same(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "ab"])
    asking.dead = {"a", "b"}
    assert [sorted(rank) for rank in await ranks(made, pending("q", key(1, 2)))] == [["a", "b"]]


async def test_replicas_that_were_lost_under_the_request_are_avoided(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    asking.holding = {"a": 2}
    found = await ranks(made, pending("q", key(1, 2), avoid=("a",)))
    assert all("a" not in rank for rank in found[:-1])
    assert await first(made, "q2", key(3, 4)) == "a", "for this request only"


async def test_a_replica_whose_actor_died_is_no_candidate(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    asking.holding = {"a": 2}
    made.on_replica_actor_died(made._replicas_list[0].replica_id)
    assert await first(made, "q", key(1, 2)) != "a"
    assert "a" not in asking.asked[-1]


async def test_the_call_learns_who_took_it(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "ab"])
    request = pending("q", key(1), call=7)
    await ranks(made, request)
    made.on_request_routed(request, made._replicas_list[1].replica_id, None)
    assert asking.taken == [(7, "b")]
    made.on_request_routed(pending("q2", key(1)), made._replicas_list[1].replica_id, None)
    assert len(asking.taken) == 1


async def test_what_an_engine_found_and_digests_reach_the_policy(
    asking: FakeAsks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = router(*[replica(name) for name in "ab"])
    observer = asking.observers["m"]
    for _ in range(50):
        observer.observe_started(key(1), 5000, 4900)
    assert made._policy.affinity_weight == 3.0
    digests: list[Any] = []
    monkeypatch.setattr(made._policy, "observe_digest", lambda *told: digests.append(told[:2]))
    observer.observe_digest("a", Digest(VERSION, 1, 1, ((1, 2),)))
    assert digests == [("a", Digest(VERSION, 1, 1, ((1, 2),)))]


async def test_a_router_on_another_loop_is_told_there(asking: FakeAsks) -> None:
    """Unless our environment is set, Serve runs routers on a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    seen: list[threading.Thread] = []
    try:

        async def make() -> ModelRouter:
            return router(replica("a"), replica("b"))

        made = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))
        made._policy.observe_started = lambda *_: seen.append(threading.current_thread())  # type: ignore[method-assign]
        asking.observers["m"].observe_started(key(1), 10, 5)
        await eventually(lambda: seen)
        assert seen == [thread]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# --- what replicas say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stats",
    [
        {},
        None,
        "text",
        {"v": VERSION + 1, "q": 10**9},
        {"v": VERSION, "q": float("nan"), "n": "many", "r": -5, "k": [], "g": {}, "a": None},
        {"v": VERSION, "q": 10**400, "n": -1, "r": 0, "k": 10**9, "g": -1, "a": float("inf")},
    ],
)
async def test_poisoned_stats_are_no_reason_not_to_route(stats: object, asking: FakeAsks) -> None:
    made = router(replica("a", routing_stats=stats), replica("b"))
    made._policy.check_integrity()
    assert {await first(made, f"q{i}", key(i + 1)) for i in range(8)} <= {"a", "b"}
    made._policy.check_integrity()


async def test_stats_are_taken_into_account() -> None:
    busy = {"v": VERSION, "g": 1, "q": 10**6, "n": 4, "r": 1000, "k": 100, "a": 0}
    made = router(replica("a", routing_stats=busy), replica("b"))
    assert {await first(made, f"q{i}", bare_key(36)) for i in range(8)} == {"b"}


async def test_stats_are_read_in_turns_and_a_failure_stops_none_of_the_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router()
    heard: list[str] = []

    def observe(name: str, stats: object, now: float) -> None:
        heard.append(name)
        if name == "r0":
            raise RuntimeError("planted")

    monkeypatch.setattr(made._policy, "observe_stats", observe)
    names = [f"r{n}" for n in range(2 * STATS_AT_ONCE + 1)]
    made.update_replicas([replica(name) for name in names])
    assert heard == ["r0"], "the rest of a turn that failed is lost until Serve repeats it"
    for _ in range(3):
        await asyncio.sleep(0)
    assert heard == ["r0", *names[STATS_AT_ONCE:]] and not made._unread
    made.update_replicas([replica(name) for name in names[1:4]])
    assert heard[-3:] == names[1:4]


@pytest.mark.parametrize("version", [0, VERSION + 1])
async def test_a_replica_of_another_version_is_not_asked_but_routed_to(asking: FakeAsks, version: int) -> None:
    other = FakeRunningReplica("other", metadata(2, version))
    made = router(replica("a"), replica("b"), other)
    firsts = {await first(made, f"q{i}", key(i + 1)) for i in range(12)}
    assert firsts == {"a", "b", "other"}
    assert all("other" not in asked for asked in asking.asked)


async def test_an_error_in_an_update_does_not_end_serves_updates(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Policy, "observe_stats", fail)
    made = router(replica("a"))
    assert await chosen(made, "q") is made._replicas_list[0]
    assert any(record.exc_info for record in caplog.records)


# --- through Serve's machinery ----------------------------------------------------------------------------------------


async def test_serve_takes_the_first_choice(asking: FakeAsks) -> None:
    made = router(*[replica(name) for name in "abc"])
    asking.holding = {"b": 2}
    assert str(await chosen(made, "q1", key(1, 2))) == "b"
    assert counts(made) == {"b": 1}


async def test_serve_passes_over_a_full_replica(asking: FakeAsks) -> None:
    full, free = replica("full", max_ongoing_requests=1), replica("free")
    full.queue_len = 1
    asking.holding = {"full": 2}
    made = router(full, free)
    for i in range(8):
        assert await chosen(made, f"q{i}", key(1, 2)) is free


async def test_a_request_waits_while_all_are_full_and_others_go_on(asking: FakeAsks) -> None:
    only = replica("only", max_ongoing_requests=1)
    only.queue_len = 1
    made = router(only)
    waiting = asyncio.create_task(chosen(made, "q", key(1)))
    await eventually(lambda: only.probes >= 3)
    assert not waiting.done()
    only.queue_len = 0
    assert await waiting is only
    assert len(asking.asked) <= 1


async def test_a_request_that_came_before_the_first_replica_gets_it() -> None:
    made = router()
    waiting = asyncio.create_task(chosen(made, "q"))
    await settle()
    assert not waiting.done()
    late = replica("late")
    made.update_replicas([late])
    assert await waiting is late


async def test_a_request_that_is_cancelled_while_it_is_asked_about_leaves_no_load(asking: FakeAsks) -> None:
    made = router(replica("a"), replica("b"))
    asking.answering.clear()
    waiting = asyncio.create_task(chosen(made, "q", key(1, 2)))
    await eventually(lambda: asking.asked)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    asking.answering.set()
    await settle()
    assert counts(made) == {}


async def test_the_class_serve_builds_from_the_config_shares_our_state(
    hub: FakeHub, asking: FakeAsks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve pickles the router's module by value: what it keeps itself would be a second copy."""
    # Unpickled where it was pickled, a class is found again; in a gateway it is not.
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
    config = RequestRouterConfig(request_router_class=ROUTER)  # type: ignore[arg-type]
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
    cls = config.get_request_router_class()
    assert cls is not ModelRouter
    made = router(replica("a"), replica("b"), cls=cls)
    assert len(hub.told) == 1
    assert asking.observers == {"m": made}
    asking.holding = {"b": 2}
    assert await first(made, "q", key(1, 2)) == "b", "a hint of the gateway is a hint of the router's class too"
    assert "routing failed" not in caplog.text


# --- which replicas there are -----------------------------------------------------------------------------------------


async def test_the_hub_is_told_where_replicas_listen(hub: FakeHub) -> None:
    made = router(FakeRunningReplica("a", metadata(1)), FakeRunningReplica("b", metadata(2)))
    addresses = {"a": ChannelAddress("10.0.0.1", 1, "secret"), "b": ChannelAddress("10.0.0.1", 2, "secret")}
    assert hub.told == [("m", addresses)]
    assert hub.capacity == 20
    assert hub.nodes == {"a": "node", "b": "node"}
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
    assert all(not isinstance(value, ModelCard) for value in plain.values())


async def test_the_metadata_of_an_older_version_is_read() -> None:
    plain = metadata(7)
    del plain["routing_version"], plain["prefill_rate"]
    known = ReplicaMetadata.from_plain(plain)
    assert known is not None and known.routing_version == 0


async def test_without_a_hub_routing_goes_on() -> None:
    """A router may be made outside a gateway, in a driver or a proxy."""
    assert channel.current_hub() is None and asks.current() is None
    found = replica("a")
    assert await chosen(router(found), "q", key(1)) is found


async def test_the_load_of_a_replica_that_is_gone_is_forgotten() -> None:
    a, b = replica("a"), replica("b")
    made = router(a, b)
    for i in range(4):
        await chosen(made, f"q{i}")
    assert counts(made) == {"a": 2, "b": 2}
    made.update_replicas([b])
    assert counts(made) == {"b": 2}


# --- load through the hooks -------------------------------------------------------------------------------------------


async def test_a_request_counts_from_its_choice_to_its_end() -> None:
    a = replica("a")
    made = router(a)
    request = pending("q", bare_key(36))
    await ranks(made, request)
    assert counts(made) == {"a": 1}
    made.on_request_routed(request, a.replica_id, None)
    assert counts(made) == {"a": 1}
    made.on_request_completed(a.replica_id, "q")
    assert counts(made) == {}


async def test_a_request_counts_where_it_went_not_where_it_was_meant_to_go() -> None:
    a, b = replica("a"), replica("b")
    made = router(a, b)
    request = pending("q", UNKNOWN.key)
    (_, (second,), _) = await made.choose_replicas([a, b], request)
    made.on_request_routed(request, second.replica_id, None)
    assert counts(made) == {str(second): 1}
