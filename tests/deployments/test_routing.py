"""Routers of two gateways and three replicas that keep prompts in their slots, over real connections, without Serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from backends.fake import FakeSettings
from deployments import asks as asks_module
from deployments import channel
from deployments.asks import Asks
from deployments.channel import ChannelHub, ReturnAddress
from deployments.replica import Replica, decode_frame
from deployments.router import ModelRouter
from deployments.routing import policy
from deployments.routing.ask import VERSION, Ask
from deployments.routing.hint import RoutingHint
from deployments.routing.key import prefix_key
from deployments.routing.policy import PolicyOptions
from deployments.settings import ModelSettings
from protocols.events import Started
from protocols.request import ChatPrompt, Message, Request, TextPart
from tests.deployments.fake_serve import FakeRunningReplica, pending
from tests.deployments.support import WITHIN_S, eventually
from tests.deployments.test_router import router

encode = msgspec.msgpack.encode


class Gateway:
    """A gateway's share of it: connections, questions, and the router Serve would make."""

    def __init__(self, options: PolicyOptions) -> None:
        self.hub = ChannelHub(1000)
        self.asks = Asks(self.hub, options)

    def route_to(self, replicas: list[FakeRunningReplica]) -> ModelRouter:
        channel.install_hub(self.hub)
        asks_module.install(self.asks)
        try:
            self.router = router(*replicas)
            return self.router
        finally:
            channel.install_hub(None)
            asks_module.install(None)


class System:
    def __init__(self, options: PolicyOptions) -> None:
        self.gateways = [Gateway(options), Gateway(options)]
        self.replicas: dict[str, Replica] = {}
        self._calls = 0

    async def start(self) -> None:
        for name in "abc":
            replica = Replica(ModelSettings(backend=FakeSettings(slots=8, prefix_cache=True)), "127.0.0.1", name)
            await replica.start()
            self.replicas[name] = replica
        for gateway in self.gateways:
            gateway.route_to(
                [FakeRunningReplica(name, r.record_replica_metadata()) for name, r in self.replicas.items()]
            )
            await eventually(lambda gateway=gateway: len(gateway.hub.connected) == 3)  # type: ignore[misc]

    async def aclose(self) -> None:
        for gateway in self.gateways:
            await gateway.hub.aclose()
        for replica in self.replicas.values():
            await replica.aclose()

    async def run(self, wanted: Request) -> tuple[str, Started]:
        """Through one gateway after the other: which replica took the request, and what it found."""
        self._calls += 1
        gateway = self.gateways[self._calls % 2]
        made = gateway.router
        hint = RoutingHint(prefix_key(wanted))
        call = pending(f"q{self._calls}", hint.key)
        ((first,), *_) = await made.choose_replicas(made._replicas_list, call)
        made.on_request_routed(call, first.replica_id, None)
        # So it knows of the request, as a slow call's does.
        await gateway.asks.ask("m", [str(first)], Ask(VERSION, ()), WITHIN_S)
        items = self.replicas[str(first)].generate(encode(wanted), hint, encode(ReturnAddress("", 0)))
        frames = [decode_frame(item) async for item in items]
        made.on_request_completed(first.replica_id, f"q{self._calls}")
        (started,) = frames[0].events
        assert isinstance(started, Started)
        return str(first), started


@pytest.fixture
async def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    monkeypatch.setattr(policy, "PATIENCE_S", (WITHIN_S, WITHIN_S))
    system = System(PolicyOptions())
    await system.start()
    yield system
    await system.aclose()


def conversation(name: str, turns: int) -> Request:
    messages = [Message("user", (TextPart(f"{name} asks " + f"{name} " * 300),))]
    for turn in range(turns - 1):
        messages.append(Message("assistant", (TextPart(f"answer {turn}"),)))
        messages.append(Message("user", (TextPart(f"and more {turn} " * 20),)))
    return Request("r", "m", ChatPrompt(tuple(messages)), max_tokens=3)


async def test_the_turns_of_a_conversation_find_their_prefix_through_either_gateway(system: System) -> None:
    homes: dict[str, set[str]] = {}
    before: dict[str, int] = {}
    for turns in range(1, 6):
        for name in ("ann", "bob", "eve", "joe", "kim"):  # five: each turn by another gateway
            home, started = await system.run(conversation(name, turns))
            homes.setdefault(name, set()).add(home)
            assert started.cached_tokens >= before.get(name, 0)
            before[name] = started.prompt_tokens
    assert all(len(taken) == 1 for taken in homes.values()), homes
    assert len(set.union(*homes.values())) > 1


async def test_a_conversation_goes_on_elsewhere_when_its_replica_is_gone(system: System) -> None:
    home, _ = await system.run(conversation("ann", 1))
    await system.replicas[home].aclose()
    for gateway in system.gateways:
        await eventually(lambda gateway=gateway: gateway.hub.broken("m") == {home})  # type: ignore[misc]
    second, started = await system.run(conversation("ann", 2))
    assert second != home
    third, again = await system.run(conversation("ann", 3))
    assert third == second and again.cached_tokens >= started.prompt_tokens


async def test_what_one_gateway_sent_off_its_owner_the_other_learns_from_digests(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    first, second = system.gateways
    monkeypatch.setattr(second.router._policy, "observe_digest", lambda *told: seen.append(told))
    owner, _ = await system.run(conversation("ann", 1))
    made = (first if system._calls % 2 == 0 else second).router
    hint = RoutingHint(prefix_key(conversation("ann", 1)), avoid=(owner,))
    ((other,), *_) = await made.choose_replicas(made._replicas_list, pending("off", hint.key, avoid=(owner,)))
    second.asks._pull()
    second.asks.aclose()
    await eventually(lambda: [told for told in seen if told[1].landed])
    assert [told[0] for told in seen if told[1].landed] == [str(other)]
