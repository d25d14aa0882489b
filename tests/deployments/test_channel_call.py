"""Requests over the step channel, as Serve's router sees them: both ends, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray import ActorID
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from backends.fake import FakeSettings
from deployments import channel
from deployments.channel import ChannelHub, ChannelServer, GatewayLink, Inbox, ReturnAddress, Run
from deployments.channel_call import ChannelCall, ChannelReplica
from deployments.replica import Replica, ReplicaMetadata
from deployments.routing.hint import RoutingHint
from deployments.routing.key import bare_key
from deployments.settings import ModelSettings
from protocols.errors import BackendLost, InternalError, ServingError
from protocols.events import Failed, Frame
from protocols.request import Request
from tests.deployments.fake_serve import DEPLOYMENT
from tests.deployments.support import WITHIN_S, eventually, request, settle, tokens

ACTOR = ActorID.from_random()
SERVES_OWN = object()
"""What Serve's own wrapper would return."""

Start = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def hub() -> AsyncIterator[ChannelHub]:
    hub = ChannelHub(1000)
    channel.install_hub(hub)
    yield hub
    channel.install_hub(None)
    await hub.aclose()


@pytest.fixture
async def started(hub: ChannelHub) -> AsyncIterator[Start]:
    """Starts a replica that the hub is connected to."""
    replicas: list[Replica] = []

    async def start(**backend: Any) -> Replica:
        replica = Replica(ModelSettings(backend=FakeSettings(**backend)), "127.0.0.1")
        replicas.append(replica)
        await replica.start()
        metadata = ReplicaMetadata.from_plain(replica.record_replica_metadata())
        assert metadata is not None
        hub.set_replicas(DEPLOYMENT.app_name, {"r": metadata.channel})
        await eventually(lambda: replica._channel.link(hub.gateway))
        await eventually(lambda: hub.link(DEPLOYMENT.app_name, "r"))
        return replica

    yield start
    for replica in replicas:
        await replica.aclose()


@pytest.fixture
def serves_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was left to Serve's own wrapper."""
    left: list[str] = []

    def send(_: RunningReplica, pr: PendingRequest, with_rejection: bool) -> object:
        left.append(pr.metadata.call_method)
        return SERVES_OWN

    async def count(_: RunningReplica, *, deadline_s: float) -> int:
        left.append("get_queue_len")
        return 7

    monkeypatch.setattr(RunningReplica, "try_send_request", send)
    monkeypatch.setattr(RunningReplica, "get_queue_len", count)
    yield left


def wrapper(limit: int = 10) -> ChannelReplica:
    info = SimpleNamespace(
        replica_id=ReplicaID("r", DEPLOYMENT),
        multiplexed_model_ids=(),
        is_cross_language=False,
        max_ongoing_requests=limit,
        get_actor_handle=lambda: SimpleNamespace(_actor_id=ACTOR),
    )
    return ChannelReplica(info)  # type: ignore[arg-type]  # of Serve's own it takes these


def pending(
    stream: int, gateway: str, wanted: Request | None = None, method: str = "generate", by_reference: bool = False
) -> PendingRequest:
    encode = msgspec.msgpack.encode
    kwargs = {"hint": RoutingHint(bare_key(1)), "to": encode(ReturnAddress(gateway, stream))}
    about = RequestMetadata("r-1", "1", call_method=method, is_streaming=True, _by_reference=by_reference)
    return PendingRequest(args=[encode(wanted or request())], kwargs=kwargs, metadata=about)


class Sent:
    """A request that was sent, and what Serve's callback was told of its end."""

    def __init__(self, hub: ChannelHub, inbox: Inbox, wanted: Request | None = None, limit: int = 10) -> None:
        self.ends: list[object] = []
        result = wrapper(limit).try_send_request(pending(inbox.stream, hub.gateway, wanted), with_rejection=True)
        assert isinstance(result, ChannelCall)
        self.call = result
        self.call.add_done_callback(self.ends.append)

    async def verdict(self) -> tuple[bool, int]:
        async with asyncio.timeout(WITHIN_S):
            found = await self.call.get_rejection_response()
        return found.accepted, found.num_ongoing_requests

    async def end(self) -> BaseException:
        """What whoever reads the call as a stream sees."""
        try:
            async with asyncio.timeout(WITHIN_S):
                await self.call.__anext__()
        except BaseException as error:
            return error
        raise AssertionError("it has an item")


async def read(inbox: Inbox) -> list[Frame]:
    frames = []
    async with asyncio.timeout(WITHIN_S):
        while not inbox.drained:
            frames.append(await inbox.get())
    return frames


async def test_a_request_is_taken_runs_and_is_over(hub: ChannelHub, started: Start) -> None:
    replica = await started(tokens=5)
    with hub.open() as inbox:
        sent = Sent(hub, inbox)
        assert await sent.verdict() == (True, 1)
        assert inbox.routed_to == "r" and inbox.carried
        assert isinstance(await sent.end(), StopAsyncIteration)
        assert sent.ends == []
        assert len(tokens(await read(inbox))) == 5
        await eventually(lambda: sent.ends)
        assert sent.ends == [None]
        sent.call.add_done_callback(sent.ends.append)
        assert sent.ends == [None, None]
    await eventually(lambda: replica._ongoing == 0)
    link = hub.link(DEPLOYMENT.app_name, "r")
    assert link is not None and link.idle


async def test_a_full_replica_refuses(hub: ChannelHub, started: Start) -> None:
    await started(slots=4)
    with hub.open() as first, hub.open() as second:
        running = Sent(hub, first, request(max_tokens=10_000), limit=1)
        assert await running.verdict() == (True, 1)
        refused = Sent(hub, second, limit=1)
        assert await refused.verdict() == (False, 1)
        assert refused.ends == [None]
        refused.call.cancel()  # as Serve does
        assert second.routed_to == "" and second.replica is None
        assert await Sent(hub, second, limit=2).verdict() == (True, 2)
        running.call.cancel()


async def test_calls_of_serves_count_as_well(hub: ChannelHub, started: Start) -> None:
    replica = await started(inter_token_s=0.001)
    with hub.open() as inbox:
        to = msgspec.msgpack.encode(ReturnAddress("nobody", 1))
        by_serve = replica.generate(msgspec.msgpack.encode(request(max_tokens=10_000)), RoutingHint(bare_key(1)), to)
        await anext(by_serve)
        assert await Sent(hub, inbox, limit=1).verdict() == (False, 1)
        await by_serve.aclose()
        assert await Sent(hub, inbox, limit=1).verdict() == (True, 1)


async def test_whoever_leaves_frees_the_slot(hub: ChannelHub, started: Start) -> None:
    replica = await started(inter_token_s=0.001)
    with hub.open() as inbox:
        sent = Sent(hub, inbox, request(max_tokens=10_000))
        await sent.verdict()
        await eventually(lambda: replica.stats().running == 1)
        sent.call.cancel()
        sent.call.cancel()
        assert isinstance(await sent.end(), asyncio.CancelledError)
    await eventually(lambda: replica.stats().running == 0 and replica._ongoing == 0)
    assert len(sent.ends) == 1


async def test_an_answer_without_an_end_is_lost(
    hub: ChannelHub, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await started()

    async def frames(_: Request, sink: object) -> AsyncGenerator[Frame, None]:
        yield Frame((), (1,))

    monkeypatch.setattr(replica, "_frames", frames)
    with hub.open() as inbox:
        await Sent(hub, inbox).verdict()
        assert (await inbox.get()).tokens == (1,)
        with pytest.raises(BackendLost):
            await inbox.get()


async def test_a_connection_lost_before_the_verdict_is_anothers_chance(
    hub: ChannelHub, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve tries another replica, with the same inbox."""
    replica = await started()
    monkeypatch.setattr(replica._channel, "on_order", lambda *_: None)
    with hub.open() as inbox:
        sent = Sent(hub, inbox)
        waiting = asyncio.create_task(sent.verdict())
        await settle()
        of(replica, hub).transport.abort()
        with pytest.raises(ActorUnavailableError):
            await waiting
        assert isinstance(sent.ends[0], ActorUnavailableError)
        inbox.put(Frame((), (1,)))  # from the other one
        assert (await inbox.get()).tokens == (1,)


async def test_a_connection_lost_in_the_middle_fails_the_stream_and_ends_the_work(
    hub: ChannelHub, started: Start
) -> None:
    replica = await started(inter_token_s=0.001)
    with hub.open() as inbox:
        sent = Sent(hub, inbox, request(max_tokens=10_000))
        await sent.verdict()
        await inbox.get()
        of(replica, hub).transport.abort()
        with pytest.raises(BackendLost):
            while True:
                await inbox.get()
        assert isinstance(await sent.end(), ActorUnavailableError)
        assert isinstance(sent.ends[0], ActorUnavailableError)
    await eventually(lambda: replica.stats().running == 0 and replica._ongoing == 0)


async def test_a_replica_that_drains_finishes_what_it_has_and_takes_no_more(hub: ChannelHub, started: Start) -> None:
    replica = await started(tokens=20, inter_token_s=0.01)
    with hub.open() as first, hub.open() as second:
        await Sent(hub, first).verdict()
        await first.get()
        closing = asyncio.create_task(replica.aclose())
        await settle()
        accepted, ongoing = await Sent(hub, second).verdict()
        assert not accepted and ongoing > 10**9  # or Serve would think that there is room, and ask at once again
        assert await wrapper().get_queue_len(deadline_s=1) == ongoing
        assert len(tokens(await read(first))) > 15
        async with asyncio.timeout(WITHIN_S):
            await closing


async def test_a_request_that_cannot_be_read_fails_and_nothing_else(hub: ChannelHub, started: Start) -> None:
    await started(tokens=5)
    with hub.open() as broken, hub.open() as other:
        sent = Sent(hub, other)
        link = hub.link(DEPLOYMENT.app_name, "r")
        assert link is not None
        ChannelCall(link, broken, Run(broken.stream, 10, b"?", b"?"), "r", lambda: ActorUnavailableError("", b""))
        (event,) = (await read(broken))[0].events
        assert isinstance(event, Failed)
        assert type(ServingError.from_info(event.error)) is InternalError
        assert await sent.verdict() == (True, 1)
        assert len(tokens(await read(other))) == 5


async def test_the_number_of_requests_is_asked_over_the_connection(
    hub: ChannelHub, started: Start, serves_own: list[str]
) -> None:
    replica = await started(inter_token_s=0.001)
    with hub.open() as inbox:
        assert await wrapper().get_queue_len(deadline_s=1) == 0
        await Sent(hub, inbox, request(max_tokens=10_000)).verdict()
        assert await wrapper().get_queue_len(deadline_s=1) == 1
    assert serves_own == []
    lost = asyncio.create_task(wrapper().get_queue_len(deadline_s=1))
    await asyncio.sleep(0)
    of(replica, hub).transport.abort()
    link = hub.link(DEPLOYMENT.app_name, "r")
    assert link is not None
    link.transport.abort()
    with pytest.raises(ActorUnavailableError):
        await lost
    hub.set_replicas(DEPLOYMENT.app_name, {})
    await eventually(lambda: not hub.connected)
    assert await wrapper().get_queue_len(deadline_s=1) == 7
    assert serves_own == ["get_queue_len"]


async def test_what_the_channel_does_not_carry_is_left_to_serve(
    hub: ChannelHub, started: Start, serves_own: list[str]
) -> None:
    await started()

    async def sent(**how: Any) -> object:
        return wrapper().try_send_request(pending(gateway=hub.gateway, **how), with_rejection=True)

    with hub.open() as inbox:
        assert await sent(stream=inbox.stream, method="call") is SERVES_OWN
        assert await sent(stream=inbox.stream, by_reference=True) is SERVES_OWN
        assert await sent(stream=0) is SERVES_OWN  # the channel is switched off
        # Serve's router may have a loop of its own.
        assert await asyncio.to_thread(asyncio.run, sent(stream=inbox.stream)) is SERVES_OWN
        hub.set_replicas(DEPLOYMENT.app_name, {})
        await settle()
        assert await sent(stream=inbox.stream) is SERVES_OWN
        earlier = ChannelServer()  # a replica of an earlier version
        hub.set_replicas(DEPLOYMENT.app_name, {"r": await earlier.start("127.0.0.1")})
        await eventually(lambda: hub.link(DEPLOYMENT.app_name, "r"))
        assert await sent(stream=inbox.stream) is SERVES_OWN
        await earlier.aclose()
        channel.install_hub(None)
        assert await sent(stream=inbox.stream) is SERVES_OWN
    assert serves_own == ["call", *["generate"] * 6]


def of(replica: Replica, hub: ChannelHub) -> GatewayLink:
    link = replica._channel.link(hub.gateway)
    assert link is not None
    return link
