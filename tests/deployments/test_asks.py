"""Questions to replicas over real connections: who is asked, what is heard in time, and that nothing else suffers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from deployments import asks as asks_module
from deployments import channel
from deployments.asks import LARGE_FLEET, LARGE_FLEET_TURNS, Asks, Heard
from deployments.channel import ChannelHub, ChannelServer, GatewayLink
from deployments.routing.ask import VERSION, Ask, AskReply, Digest, DigestPull, Intent, ToGateway, ToReplica
from deployments.routing.key import PrefixKey
from deployments.routing.policy import PolicyOptions
from tests.deployments.support import HELLO, WITHIN_S, eventually, tokens

HOST = "127.0.0.1"
ASK = Ask(VERSION, (1, 2, 3))
SHORT_S = 0.003


class FakeReplica:
    """Answers as `answer` says, on a real connection; remembers what it heard."""

    def __init__(self, answer: Callable[[ToReplica], object] | None = None) -> None:
        self.server = ChannelServer()
        self.server.on_aside = self._hear
        self.answer = answer or (lambda m: ToGateway(m.number, AskReply(VERSION, 1, 2, 30, 4)) if m.ask else None)
        self.heard: list[ToReplica] = []
        self.last: GatewayLink | None = None

    def _hear(self, link: GatewayLink, message: bytes) -> None:
        self.last = link
        self.heard.append(msgspec.msgpack.decode(message, type=ToReplica))
        answer = self.answer(self.heard[-1])
        if answer is not None:
            link.send(answer)


class Connect:
    def __init__(self, hub: ChannelHub) -> None:
        self._hub = hub
        self._servers: list[ChannelServer] = []

    async def __call__(self, **replicas: FakeReplica) -> Asks:
        asks = Asks(self._hub, PolicyOptions())
        addresses = {name: await replica.server.start(HOST) for name, replica in replicas.items()}
        self._servers += [replica.server for replica in replicas.values()]
        self._hub.set_replicas("m", addresses)
        await eventually(lambda: all(replica.server.link(self._hub.gateway) for replica in replicas.values()))
        return asks

    async def aclose(self) -> None:
        for server in self._servers:
            await server.aclose()


@pytest.fixture
async def connect(hub: ChannelHub) -> AsyncIterator[Connect]:
    connect = Connect(hub)
    yield connect
    await connect.aclose()


def mute(_: ToReplica) -> None:
    return None


def asked(heard: Heard) -> set[str]:
    return set(heard.asked)


async def test_all_that_are_asked_answer(connect: Connect) -> None:
    replicas = {name: FakeReplica() for name in "abc"}
    heard = await (await connect(**replicas)).ask("m", ["a", "b"], ASK, WITHIN_S)
    assert asked(heard) == {"a", "b"}
    assert heard.replies == dict.fromkeys("ab", AskReply(VERSION, 1, 2, 30, 4))
    assert [message.ask for message in replicas["a"].heard] == [ASK]
    assert replicas["c"].heard == []


async def test_answers_of_several_questions_do_not_mix(connect: Connect) -> None:
    def echo(message: ToReplica) -> ToGateway:
        assert message.ask is not None
        return ToGateway(message.number, AskReply(VERSION, 1, message.ask.rungs[0], 0, 0))

    asks = await connect(a=FakeReplica(echo), b=FakeReplica(echo))
    heard = await asyncio.gather(*[asks.ask("m", ["a", "b"], Ask(VERSION, (i,)), WITHIN_S) for i in range(20)])
    assert [{reply.depth for reply in one.replies.values()} for one in heard] == [{i} for i in range(20)]


async def test_who_is_not_connected_is_not_asked(connect: Connect) -> None:
    asks = await connect(a=FakeReplica())
    assert asked(await asks.ask("m", ["a", "unknown"], ASK, WITHIN_S)) == {"a"}
    assert await asks.ask("m", ["unknown"], ASK, WITHIN_S) == Heard()
    assert await asks.ask("other model", ["a"], ASK, WITHIN_S) == Heard()


async def test_what_does_not_answer_in_time_is_done_without(connect: Connect) -> None:
    asks = await connect(a=FakeReplica(mute))
    heard = await asks.ask("m", ["a"], ASK, SHORT_S)
    assert (asked(heard), dict(heard.replies)) == ({"a"}, {})


async def test_what_came_while_the_loop_was_busy_was_in_time(connect: Connect) -> None:
    def slowly(message: ToReplica) -> ToGateway:
        """The replica is in this process, so it keeps the gateway busy past the deadline."""
        until = loop.time() + 2 * SHORT_S
        while loop.time() < until:
            pass
        return ToGateway(message.number, AskReply(VERSION, 1, 1, 0, 0))

    loop = asyncio.get_running_loop()
    asks = await connect(a=FakeReplica(slowly))
    assert (await asks.ask("m", ["a"], ASK, SHORT_S)).replies.keys() == {"a"}


async def test_a_late_answer_is_nobodys(connect: Connect, hub: ChannelHub) -> None:
    replica = FakeReplica(mute)
    asks = await connect(a=replica)
    await asks.ask("m", ["a"], ASK, SHORT_S)
    assert replica.last is not None
    replica.last.send(ToGateway(replica.heard[0].number, AskReply(VERSION, 1, 1, 0, 0)))
    replica.answer = lambda m: ToGateway(m.number, AskReply(VERSION, 1, 3, 0, 0))
    heard = await asks.ask("m", ["a"], ASK, SHORT_S)
    assert [reply.depth for reply in heard.replies.values()] == [3]


async def test_a_connection_that_breaks_is_not_waited_for(connect: Connect) -> None:
    def hang_up(_: ToReplica) -> None:
        assert replica.last is not None
        replica.last.transport.abort()

    replica = FakeReplica(hang_up)
    asks = await connect(a=replica, b=FakeReplica())
    heard = await asks.ask("m", ["a", "b"], ASK, WITHIN_S)
    assert asked(heard) == {"a", "b"}
    assert heard.replies.keys() == {"b"}


@pytest.mark.parametrize(
    "garbage",
    [{}, {"number": "x"}, {"number": 1, "reply": [9, 9]}, {"number": 10**6, "reply": None}, {"later": [1, 2]}],
)
async def test_answers_of_another_version_are_passed_over_and_streams_go_on(
    connect: Connect, hub: ChannelHub, garbage: dict[str, Any]
) -> None:
    replica = FakeReplica(lambda _: garbage)
    asks = await connect(a=replica)
    assert dict((await asks.ask("m", ["a"], ASK, SHORT_S)).replies) == {}
    assert replica.last is not None
    with hub.open() as inbox:
        for frame in HELLO:
            assert replica.last.push(inbox.stream, frame)
        received = []
        async with asyncio.timeout(WITHIN_S):
            while not inbox.drained:
                received.append(await inbox.get())
    assert tokens(received) == tokens(HELLO)


async def test_questions_of_another_version_leave_the_connection_alone(connect: Connect, hub: ChannelHub) -> None:
    replica = FakeReplica()
    await connect(a=replica)
    link = hub.link("m", "a")
    assert link is not None
    link.send({"number": 1, "later": "kind"})
    await eventually(lambda: replica.heard)
    assert replica.heard == [ToReplica(1)]
    assert hub.link("m", "a") is link


async def test_the_chosen_one_is_told_before_it_is_asked_again(connect: Connect) -> None:
    replica = FakeReplica()
    asks = await connect(a=replica)
    intent = Intent(VERSION, 3, 1, 500, False)
    asks.chosen("m", "a", intent)
    asks.chosen("m", "a", None)
    asks.chosen("m", "unknown", intent)
    await asks.ask("m", ["a"], ASK, WITHIN_S)
    assert [message.intent for message in replica.heard] == [intent, None]


async def test_a_router_on_another_thread_asks_and_tells_too(connect: Connect) -> None:
    replica = FakeReplica()
    asks = await connect(a=replica)
    intent = Intent(VERSION, 3, 1, 500, False)
    found: list[Heard] = []

    async def route() -> None:
        asks.chosen("m", "a", intent)
        found.append(await asks.ask("m", ["a"], ASK, WITHIN_S))

    thread = threading.Thread(target=lambda: asyncio.run(route()))
    thread.start()
    await eventually(lambda: found)
    thread.join()
    assert found[0].replies == {"a": AskReply(VERSION, 1, 2, 30, 4)}
    assert [message.intent for message in replica.heard] == [intent, None]


async def test_a_router_on_another_thread_does_not_wait_for_a_busy_gateway(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> Heard:
        await asyncio.Event().wait()
        raise AssertionError

    asks = await connect(a=FakeReplica(mute))
    monkeypatch.setattr(asks_module, "OTHER_LOOP_S", 0.01)
    monkeypatch.setattr(asks, "_ask", never)
    assert await asyncio.to_thread(lambda: asyncio.run(asks.ask("m", ["a"], ASK, SHORT_S))) == Heard()


async def test_a_stuck_connection_is_not_asked(
    connect: Connect, hub: ChannelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = await connect(a=FakeReplica())
    monkeypatch.setattr(channel, "MAX_UNSENT_BYTES", -1)
    assert await asks.ask("m", ["a"], ASK, WITHIN_S) == Heard()


# --- digests ----------------------------------------------------------------------------------------------------------


class Observed:
    def __init__(self) -> None:
        self.digests: list[tuple[str, Digest]] = []
        self.error: Exception | None = None

    def observe_started(self, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None:
        raise AssertionError

    def observe_digest(self, replica: str, digest: Digest) -> None:
        self.digests.append((replica, digest))
        if self.error is not None:
            raise self.error


def landed(message: ToReplica) -> ToGateway | None:
    if message.pull is None:
        return None
    return ToGateway(message.number, digest=Digest(VERSION, 1, message.pull.since + 5, ((1, 2),)))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks_module, "DIGESTS_S", 0.001)


async def fetching(connect: Connect, replicas: dict[str, FakeReplica], digests: int) -> tuple[Asks, Observed]:
    """Until so many digests were seen."""
    asks = await connect(**replicas)
    observed = Observed()
    asks.observe("m", observed)
    asks.start()
    await eventually(lambda: len(observed.digests) >= digests)
    return asks, observed


async def test_each_digest_goes_on_where_the_last_one_ended(connect: Connect, at_once: None) -> None:
    replicas = {name: FakeReplica(landed) for name in "ab"}
    asks, observed = await fetching(connect, replicas, digests=8)
    asks.aclose()
    positions = [digest.position for name, digest in observed.digests if name == "a"]
    assert positions[:3] == [5, 10, 15]
    pull = replicas["a"].heard[0].pull
    assert pull == DigestPull(VERSION, 0, 2)


async def test_a_new_connection_begins_anew(connect: Connect, hub: ChannelHub, at_once: None) -> None:
    replicas = {name: FakeReplica(landed) for name in "ab"}
    asks, _ = await fetching(connect, replicas, digests=4)
    assert replicas["a"].last is not None
    replicas["a"].last.transport.abort()
    count = len(replicas["a"].heard)
    await eventually(lambda: len(replicas["a"].heard) > count + 1)
    asks.aclose()
    pulls = [message.pull for message in replicas["a"].heard if message.pull is not None]
    assert len([pull for pull in pulls if pull.since == 0]) >= 2


async def test_a_digest_that_breaks_the_router_does_not_break_the_connection(
    connect: Connect, hub: ChannelHub, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    asks = await connect(a=FakeReplica(landed), b=FakeReplica(landed))
    link = hub.link("m", "a")
    observed = Observed()
    observed.error = ZeroDivisionError()
    asks.observe("m", observed)
    asks.start()
    await eventually(lambda: len(observed.digests) >= 4)
    asks.aclose()
    assert hub.link("m", "a") is link
    assert any(record.exc_info for record in caplog.records)


async def test_one_replica_has_nothing_to_say(connect: Connect, hub: ChannelHub, at_once: None) -> None:
    replica = FakeReplica(landed)
    asks = await connect(a=replica)
    asks.observe("m", Observed())
    for _ in range(5):
        asks._pull()
    await asks.ask("m", ["a"], ASK, WITHIN_S)
    asks.aclose()
    assert [message.pull for message in replica.heard] == [None]


async def test_many_replicas_are_asked_for_digests_more_rarely(
    hub: ChannelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    class Link:
        def send(self, message: ToReplica) -> None:
            assert message.pull is not None and message.pull.replicas == count
            sent.append("x")

    count = LARGE_FLEET + 1
    monkeypatch.setattr(hub, "replicas", lambda: {"m": {f"r{i}" for i in range(count)}})
    monkeypatch.setattr(hub, "link", lambda model, replica: Link())
    asks = Asks(hub, PolicyOptions())
    asks.observe("m", Observed())
    for _ in range(2 * LARGE_FLEET_TURNS):
        asks._pull()
        asks.aclose()
    assert len(sent) == 2 * count


async def test_without_asks_no_digest_is_fetched(hub: ChannelHub) -> None:
    asks = Asks(hub, PolicyOptions(asks=False))
    asks.start()
    assert asks._timer is None


async def test_the_installed_asks_are_the_current_ones(hub: ChannelHub) -> None:
    asks = Asks(hub, PolicyOptions())
    asks_module.install(asks)
    assert asks_module.current() is asks
    asks_module.install(None)
    assert asks_module.current() is None
