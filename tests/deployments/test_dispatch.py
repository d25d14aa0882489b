"""From a request to its frames, with a scripted handle in place of Serve's, and a real step channel."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from backends.fake import FakeFault, FakeSettings
from deployments import catalog, dispatch, ray_compat, request_log
from deployments.asks import Asks
from deployments.catalog import Application, Catalog
from deployments.channel import ChannelHub, ChannelServer, ReturnAddress
from deployments.dispatch import GRPC_REQUEST_LIMIT_BYTES, Dispatcher
from deployments.models import ModelEntry
from deployments.replica import HANDED_OVER, Replica
from deployments.routing.hint import RoutingHint
from deployments.routing.key import PrefixKey, prefix_key
from deployments.routing.policy import PolicyOptions
from deployments.settings import GatewaySettings, ModelSettings
from protocols.collect import Collector, Completion
from protocols.errors import (
    BackendLost,
    ClientTooSlow,
    ContextOverflow,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.events import Failed, Frame, Started
from protocols.request import ChatPrompt, Message, Request, TextPart
from tests.deployments.fake_serve import FakeHandle, Items
from tests.deployments.support import (
    HELLO,
    STARTED,
    WITHIN_S,
    events,
    eventually,
    finished,
    request,
    settle,
    text,
    tokens,
)

encode = msgspec.msgpack.encode


@pytest.fixture
async def server(hub: ChannelHub) -> AsyncIterator[ChannelServer]:
    """A replica's end of the step channel, with the hub connected to it."""
    server = ChannelServer()
    hub.set_replicas("m", {"r": await server.start("127.0.0.1")})
    await eventually(lambda: server.link(hub.gateway))
    yield server
    await server.aclose()


Make = Callable[..., Dispatcher]


@pytest.fixture
def make(hub: ChannelHub, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A dispatcher that gets `handle` from Serve for its one model."""

    def make(handle: FakeHandle, hub: ChannelHub = hub, asks: Asks | None = None, **settings: Any) -> Dispatcher:
        def get_deployment_handle(deployment: str, app: str) -> FakeHandle:
            assert (deployment, app) == ("Model", "m")
            return handle

        monkeypatch.setattr(serve, "get_deployment_handle", get_deployment_handle)
        dispatcher = Dispatcher(GatewaySettings(**settings), hub, asks)
        dispatcher.catalog = Catalog(1000, source=lambda: {"m": Application(ModelEntry("m", 7), None)})
        return dispatcher

    return make


@pytest.fixture
def late_frames_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LATE_FRAMES_S", 0.01)


def over_handle(*steps: Frame | BaseException | asyncio.Event) -> Items:
    """A call that answers with its own items."""

    async def answer(request: bytes, **_: Any) -> AsyncIterator[bytes]:
        for step in steps:
            if isinstance(step, Frame):
                yield encode(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                raise step

    return answer


def over_channel(server: ChannelServer, *frames: Frame, late: int = 0) -> Items:
    """A call whose frames go over the channel; the last `late` of them only after the call is over."""

    async def answer(request: bytes, hint: Any, to: bytes) -> AsyncIterator[bytes]:
        address = msgspec.msgpack.decode(to, type=ReturnAddress)
        link = server.link(address.gateway)
        assert link is not None
        for frame in frames[: len(frames) - late]:
            assert link.push(address.stream, frame)
            await asyncio.sleep(0)
        yield HANDED_OVER
        loop = asyncio.get_running_loop()
        for index, frame in enumerate(frames[len(frames) - late :], 1):
            loop.call_later(0.01 * index, link.push, address.stream, frame)

    return answer


async def collect(dispatcher: Dispatcher, wanted: Request | None = None) -> list[Frame]:
    frames = []
    async with asyncio.timeout(WITHIN_S), aclosing(dispatcher.stream(wanted or request())) as stream:
        async for frame in stream:
            frames.append(frame)
    return frames


async def failure(dispatcher: Dispatcher, delivered: int = 0, wanted: Request | None = None) -> ServingError:
    """What the stream fails with, after `delivered` events."""
    frames: list[Frame] = []
    with pytest.raises(ServingError) as caught:
        async with asyncio.timeout(WITHIN_S), aclosing(dispatcher.stream(wanted or request())) as stream:
            async for frame in stream:
                frames.append(frame)
    assert sum(len(frame.events) for frame in frames) == delivered
    return caught.value


# --- frames -----------------------------------------------------------------------------------------------------------


async def test_frames_come_over_the_handle_where_there_is_no_channel(make: Make) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    frames = await collect(make(handle))
    assert events(frames) == events(HELLO)
    assert tokens(frames) == tokens(HELLO)


async def test_frames_come_over_the_channel_where_there_is_one(make: Make, server: ChannelServer) -> None:
    frames = await collect(make(FakeHandle(over_channel(server, *HELLO))))
    assert events(frames) == events(HELLO)
    assert tokens(frames) == tokens(HELLO)


async def test_the_acknowledgement_may_overtake_the_last_frames(make: Make, server: ChannelServer) -> None:
    """They are two connections."""
    handle = FakeHandle(over_channel(server, *HELLO, late=3))
    assert events(await collect(make(handle))) == events(HELLO)
    assert not handle.responses[0].cancelled


async def test_the_acknowledgement_may_even_be_first(make: Make, server: ChannelServer) -> None:
    handle = FakeHandle(over_channel(server, *HELLO, late=len(HELLO)))
    assert events(await collect(make(handle))) == events(HELLO)


async def test_a_stream_of_two_choices_ends_after_both(make: Make) -> None:
    script = [STARTED, text("a", 1), finished(), text("b", 2, choice=1), finished(choice=1)]
    frames = await collect(make(FakeHandle(over_handle(*script))), request(n=2))
    assert events(frames) == events(script)


async def test_the_replica_gets_the_request_as_it_is(make: Make) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    wanted = request(text="Grüße", max_tokens=7, resume=(1, 2))
    await collect(make(handle), wanted)
    (call,) = handle.calls
    assert msgspec.msgpack.decode(call["request"], type=Request) == wanted


async def test_the_replica_is_told_where_frames_go(make: Make, hub: ChannelHub) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    dispatcher = make(handle)
    for _ in range(2):
        await collect(dispatcher)
    addresses = [msgspec.msgpack.decode(call["to"], type=ReturnAddress) for call in handle.calls]
    assert {address.gateway for address in addresses} == {hub.gateway}
    assert len({address.stream for address in addresses}) == 2
    assert all(address.stream > 0 for address in addresses)


async def test_with_the_channel_turned_off_the_replica_is_told_to_answer_itself(make: Make) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    assert events(await collect(make(handle, step_channel=False))) == events(HELLO)
    assert msgspec.msgpack.decode(handle.calls[0]["to"], type=ReturnAddress).stream == 0


@pytest.mark.parametrize(
    ("characters", "messages", "inline"), [(50, 1, True), (2**20, 1, True), (9 * 2**20, 1, False), (5, 2001, False)]
)
async def test_the_router_gets_the_key_of_the_request(
    make: Make, characters: int, messages: int, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a large one is made where it holds nobody up."""
    threads = set()

    def in_thread(request: Request) -> PrefixKey:
        threads.add(threading.current_thread())
        return prefix_key(request)

    monkeypatch.setattr(dispatch, "prefix_key", in_thread)
    handle = FakeHandle(over_handle(*HELLO))
    message = Message("user", (TextPart("word " * (characters // 5)),))
    wanted = msgspec.structs.replace(request(), prompt=ChatPrompt((message,) * messages))
    await collect(make(handle), wanted)
    assert handle.calls[0]["hint"].key == prefix_key(wanted)
    assert handle.calls[0]["hint"].call == msgspec.msgpack.decode(handle.calls[0]["to"], type=ReturnAddress).stream
    assert (threading.main_thread() in threads) == inline


async def test_the_router_is_told_which_replicas_were_lost_under_the_request(make: Make, hub: ChannelHub) -> None:
    def lost_at(replica: str) -> Items:
        async def answer(request: bytes, hint: RoutingHint, to: bytes) -> AsyncIterator[bytes]:
            hub.routed(hint.call, replica)
            raise ActorDiedError
            yield

        return answer

    handle = FakeHandle(lost_at("a"), lost_at("b"), over_handle(*HELLO))
    assert events(await collect(make(handle))) == events(HELLO)
    hints = [call["hint"] for call in handle.calls]
    assert [hint.avoid for hint in hints] == [(), ("a",), ("a", "b")]
    assert hints[1].key is hints[0].key, "it is computed once"


async def test_what_the_engine_found_cached_is_told(make: Make, hub: ChannelHub) -> None:
    told: list[tuple[PrefixKey, int, int]] = []

    class Observer:
        def observe_started(self, *what: Any) -> None:
            told.append(what)

        def observe_digest(self, *_: object) -> None:
            raise AssertionError

    asks = Asks(hub, PolicyOptions())
    asks.observe("m", Observer())
    dispatcher = make(FakeHandle(over_handle(Frame((Started(30, 20),)), *HELLO[1:])), asks=asks)
    await collect(dispatcher)
    assert told == [(prefix_key(request()), 30, 20)]


async def test_a_call_does_not_inherit_the_context_it_is_made_in(make: Make) -> None:
    """Serve names a call after its context: two calls of one request would have one name."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen = []

    class Handle(FakeHandle):
        def remote(self, request: bytes, **kwargs: Any) -> Any:
            seen.append(variable.get())
            return super().remote(request, **kwargs)

    variable.set("the HTTP request")
    await collect(make(Handle(over_handle(*HELLO))))
    assert seen == ["none"]


@pytest.mark.parametrize(("size", "by_reference"), [(10, False), (GRPC_REQUEST_LIMIT_BYTES, True)])
async def test_only_large_requests_go_through_the_object_store(make: Make, size: int, by_reference: bool) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    await collect(make(handle), request(text="x" * size))
    assert handle.options_used == [{"stream": True, "_by_reference": by_reference}]


async def test_a_model_there_is_not_is_not_called(make: Make) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    error = await failure(make(handle), wanted=request(model="other"))
    assert isinstance(error, ModelNotFound)
    assert handle.calls == []


# --- failures ---------------------------------------------------------------------------------------------------------

LOST = [
    ActorDiedError(),
    ObjectLostError("secret detail", None, ""),
    ActorUnavailableError("gone", actor_id=None),
    ReplicaUnavailableError("r"),
    RequestCancelledError("q"),
]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
async def test_a_replica_that_is_lost_before_its_first_frame_is_replaced(make: Make, lost: Exception) -> None:
    handle = FakeHandle(over_handle(lost), over_handle(*HELLO))
    assert events(await collect(make(handle))) == events(HELLO)
    assert len(handle.calls) == 2
    assert handle.calls[0]["request"] == handle.calls[1]["request"]
    assert handle.calls[0]["to"] != handle.calls[1]["to"], "frames of the first call must not reach the second"


async def test_a_replica_that_says_it_lost_the_gateway_is_replaced(make: Make) -> None:
    handle = FakeHandle(over_handle(Frame((Failed(BackendLost("gone").info),))), over_handle(*HELLO))
    assert events(await collect(make(handle))) == events(HELLO)


async def test_a_replica_that_ends_before_its_first_frame_is_replaced(make: Make, late_frames_at_once: None) -> None:
    handle = FakeHandle(over_handle(), over_handle(*HELLO))
    assert events(await collect(make(handle))) == events(HELLO)


async def test_a_failure_that_comes_along_with_the_first_frames_is_retried_too(
    make: Make, server: ChannelServer
) -> None:
    """Nothing of what waited with the failure was delivered: all of it may come again."""

    async def answer(request: bytes, hint: Any, to: bytes) -> AsyncIterator[bytes]:
        address = msgspec.msgpack.decode(to, type=ReturnAddress)
        link = server.link(address.gateway)
        assert link is not None
        for frame in (STARTED, text("lost", 9), Frame((Failed(BackendLost("gone").info),))):
            link.push(address.stream, frame)  # one envelope
        yield HANDED_OVER

    handle = FakeHandle(answer, over_handle(*HELLO))
    assert events(await collect(make(handle))) == events(HELLO)


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_replicas_are_replaced_up_to_the_limit(make: Make, retries: int) -> None:
    handle = FakeHandle(over_handle(ActorDiedError()))
    assert isinstance(await failure(make(handle, retries=retries)), BackendLost)
    assert len(handle.calls) == retries + 1


REST = over_handle(STARTED, text("lo", 2), finished())
"""What a second replica sends to a request that resumes behind the first half of `HELLO`."""


def asked(handle: FakeHandle) -> list[Request]:
    return [msgspec.msgpack.decode(call["request"], type=Request) for call in handle.calls]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
async def test_an_answer_goes_on_where_its_replica_was_lost(make: Make, lost: Exception) -> None:
    gate = asyncio.Event()
    handle = FakeHandle(over_handle(STARTED, text("Hel", 1), gate, lost), REST)
    received = []
    async with aclosing(make(handle).stream(request())) as stream:
        async for frame in stream:
            received.append(frame)
            gate.set()
    assert events(received) == events(HELLO)
    assert tokens(received) == tokens(HELLO)
    assert [sent.resume for sent in asked(handle)] == [(), (1,)]


async def test_what_a_sink_took_is_not_asked_for_again(make: Make) -> None:
    begun, taken = asyncio.Event(), asyncio.Event()
    handle = FakeHandle(over_handle(STARTED, begun, text("Hel", 1), taken, ActorDiedError()), REST)
    received, sunk = [], []

    def sink(frame: Frame) -> bool:
        received.append(frame)
        sunk.append(frame)
        taken.set()
        return True

    async with asyncio.timeout(WITHIN_S), aclosing(make(handle).stream(request(), sink)) as stream:
        async for frame in stream:
            received.append(frame)
            begun.set()
    assert text("Hel", 1) in sunk
    assert events(received) == events(HELLO)
    assert tokens(received) == tokens(HELLO)
    assert [sent.resume for sent in asked(handle)] == [(), (1,)]


async def test_choices_that_go_on_side_by_side_have_no_sink(make: Make) -> None:
    """Two streams may not write to one client without anybody in between."""
    gate = asyncio.Event()

    async def rest(request: bytes, **_: Any) -> AsyncIterator[bytes]:
        sent = msgspec.msgpack.decode(request, type=Request)
        for frame in (STARTED, text("b", 2, sent.choice), finished(choice=sent.choice)):
            yield encode(frame)

    begin = [STARTED, text("a", 1), text("a", 1, choice=1)]
    handle = FakeHandle(over_handle(*begin, gate, ActorDiedError()), rest)
    moved = False

    def sink(frame: Frame) -> bool:
        assert not moved
        return False

    received = []
    async with asyncio.timeout(WITHIN_S), aclosing(make(handle).stream(request(n=2), sink)) as stream:
        async for frame in stream:
            received.append(frame)
            if len(tokens(received)) == 2:
                gate.set()
                moved = True
    assert sorted(tokens(received)) == [1, 1, 2, 2]


async def test_each_move_is_on_the_requests_record(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    record = request_log.Record()
    monkeypatch.setattr(request_log, "current", lambda: record)
    lost = over_handle(LOST[0])
    assert events(await collect(make(FakeHandle(lost, lost, over_handle(*HELLO))))) == events(HELLO)
    assert record.moves == 2


async def test_each_choice_goes_on_by_its_number(make: Make) -> None:
    gate = asyncio.Event()
    first = over_handle(STARTED, text("a", 1), text("b", 2, 1), finished(1), text("c", 3, 2), gate, ActorDiedError())

    async def rest(payload: bytes, **_: Any) -> AsyncIterator[bytes]:
        sent = msgspec.msgpack.decode(payload, type=Request)
        yield encode(Frame((Started(3, 0, sent.choice),), choice=sent.choice))
        yield encode(text(f" and {sent.resume}", 9, sent.choice))
        yield encode(finished(sent.choice))

    handle = FakeHandle(first, rest)
    collector = Collector(3)
    async with aclosing(make(handle).stream(request(n=3))) as stream:
        async for frame in stream:
            gate.set()
            for event in frame.events:
                collector.feed(event)
    assert [choice.text for choice in collector.result().choices] == ["a and (1,)", "b", "c and (3,)"]
    assert [(sent.n, sent.choice, sent.resume) for sent in asked(handle)] == [(3, 0, ()), (1, 0, (1,)), (1, 2, (3,))]


class Nodes:
    """What Ray knows of nodes: that those in `gone` are gone, but only after so many looks."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.known_after = 0
        self.looks = 0

    def __call__(self) -> frozenset[str]:
        self.looks += 1
        return frozenset(self.gone if self.looks > self.known_after else ())


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes()
    monkeypatch.setattr(ray_compat, "lost_nodes", nodes)
    monkeypatch.setattr(dispatch, "NODE_LOOK_EVERY_S", 0.001)
    return nodes


def dies_on(hub: ChannelHub, replica: str, *frames: Frame) -> Items:
    """A replica that says `frames` over the handle and dies."""

    async def answer(request: bytes, hint: RoutingHint, to: bytes) -> AsyncIterator[bytes]:
        hub.routed(hint.call, replica)
        for frame in frames:
            yield encode(frame)
        await settle()
        raise ActorDiedError

    return answer


async def test_a_request_that_two_replicas_died_of_is_refused(
    make: Make, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    handle = FakeHandle(over_handle(STARTED, text("Hel", 1), ActorDiedError()))
    assert isinstance(await failure(make(handle), delivered=3), InternalError)
    assert len(handle.calls) == 2
    assert nodes.looks == 1, "of replicas on no known node nothing will become known"
    assert "r1" in caplog.text


@pytest.mark.parametrize("looks_until_known", [0, 3])
async def test_a_replica_that_died_with_its_node_is_not_held_against_the_request(
    make: Make, nodes: Nodes, hub: ChannelHub, looks_until_known: int
) -> None:
    hub.set_replicas("m", {}, 0, {"a": "node a", "b": "node b"})
    await settle()
    nodes.gone, nodes.known_after = {"node a"}, looks_until_known
    handle = FakeHandle(dies_on(hub, "a", STARTED, text("Hel", 1)), dies_on(hub, "b", STARTED), REST)
    assert events(await collect(make(handle))) == events(HELLO)
    assert nodes.looks == looks_until_known + 1


async def test_a_request_is_refused_once_it_is_known_that_its_replicas_nodes_are_there(
    make: Make, nodes: Nodes, hub: ChannelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.set_replicas("m", {}, 0, {"a": "node a", "b": "node b"})
    await settle()
    reached: set[str] = set()
    monkeypatch.setattr(hub, "reaches", lambda node: node in reached)
    handle = FakeHandle(dies_on(hub, "a", STARTED, text("Hel", 1)), dies_on(hub, "b", STARTED))
    refused = asyncio.ensure_future(failure(make(handle), delivered=2))
    await eventually(lambda: nodes.looks > 3)
    assert not refused.done(), "one of the nodes may turn out to be gone"
    reached |= {"node a", "node b"}
    assert isinstance(await refused, InternalError)


async def test_a_request_is_refused_when_nothing_becomes_known_of_the_nodes(
    make: Make, nodes: Nodes, hub: ChannelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "NODE_LOSS_KNOWN_S", 0.02)
    hub.set_replicas("m", {}, 0, {"a": "node a", "b": "node b"})
    await settle()
    handle = FakeHandle(dies_on(hub, "a", STARTED, text("Hel", 1)), dies_on(hub, "b", STARTED))
    assert isinstance(await failure(make(handle), delivered=2), InternalError)
    assert nodes.looks > 1


async def test_nobody_waits_for_a_model_that_cannot_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It slept, was woken by the request, and its file is gone: Serve tells later requests, but not this one."""
    monkeypatch.setattr(dispatch, "LOOK_EVERY_S", 0.01)
    failure_of: dict[str, str | None] = {"m": None}
    dispatcher = make(FakeHandle(over_handle(asyncio.Event())))
    dispatcher.catalog = Catalog(0.01, source=lambda: {"m": Application(ModelEntry("m", 7), failure_of["m"])})
    monkeypatch.setattr(catalog, "REFRESH_AT_MOST_EVERY_S", 0.0)
    dispatcher.catalog.start()
    waiting = asyncio.ensure_future(failure(dispatcher))
    await asyncio.sleep(0.03)
    assert not waiting.done()
    failure_of["m"] = "no such file"
    error = await waiting
    assert isinstance(error, Unavailable)
    assert "failed to start" in error.message
    await dispatcher.catalog.aclose()


async def test_an_answer_that_takes_longer_than_its_client_waits_is_cut(make: Make) -> None:
    handle = FakeHandle(over_handle(STARTED, text("Hel", 1), asyncio.Event()))
    error = await failure(make(handle), delivered=2, wanted=request(timeout_s=0.05))
    assert isinstance(error, DeadlineExceeded)
    assert handle.responses[0].cancelled


async def test_the_operator_s_limit_holds_for_whoever_asks_for_none(make: Make) -> None:
    handle = FakeHandle(over_handle(STARTED, asyncio.Event()))
    assert isinstance(await failure(make(handle, request_timeout_s=0.05), delivered=1), DeadlineExceeded)


MAPPED: list[tuple[Exception, type[ServingError]]] = [
    (BackPressureError(num_queued_requests=3, max_queued_requests=2), Overloaded),
    (DeploymentUnavailableError(DeploymentID("Model", "m")), Unavailable),
    (RayTaskError("generate", "secret detail", ValueError("secret detail")), InternalError),
    (RayServeException("secret detail"), InternalError),
    (RuntimeError("secret detail"), InternalError),
    (InvalidRequest("raised as it is", param="n"), InvalidRequest),
]


@pytest.mark.parametrize(("raised", "expected"), MAPPED, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_failed_call_has_a_meaning_for_the_client(
    make: Make, raised: Exception, expected: type[ServingError], caplog: pytest.LogCaptureFixture
) -> None:
    handle = FakeHandle(over_handle(raised))
    error = await failure(make(handle, retries=0))
    assert type(error) is expected
    assert "secret" not in error.message
    assert len(handle.calls) == 1
    if expected is InternalError:
        assert error.message == InternalError.PUBLIC_MESSAGE
        assert "secret detail" in caplog.text
    assert (error.retry_after_s is not None) == (expected in (Overloaded, Unavailable))


async def test_an_item_that_is_no_frame_is_an_internal_error(make: Make) -> None:
    async def garbage(request: bytes, **_: Any) -> AsyncIterator[bytes]:
        yield b"\xc1 no frame"

    assert isinstance(await failure(make(FakeHandle(garbage))), InternalError)


@pytest.mark.parametrize(
    "raised", [ContextOverflow.of(9, 8), Overloaded("full", retry_after_s=3.0), Unavailable("going down")]
)
async def test_a_failed_frame_becomes_the_exception_it_stands_for(make: Make, raised: ServingError) -> None:
    handle = FakeHandle(over_handle(Frame((Failed(raised.info),))))
    error = await failure(make(handle, retries=0))
    assert type(error) is type(raised)
    assert error.info == raised.info
    assert not handle.responses[0].cancelled
    assert len(handle.calls) == 1


async def test_a_failure_in_the_middle_comes_after_all_that_had_arrived(make: Make) -> None:
    gate = asyncio.Event()
    failed = Frame((Failed(Unavailable("going down").info),))
    handle = FakeHandle(over_handle(STARTED, gate, text("Hel", 1), text("lo", 2), failed))
    received = []
    async with aclosing(make(handle, retries=0).stream(request())) as stream:
        received.append(await anext(stream))
        gate.set()
        await settle()  # the rest waits together now
        with pytest.raises(Unavailable, match="going down"):
            async for frame in stream:
                received.append(frame)
    assert events(received) == events([STARTED, text("Hel"), text("lo")])
    assert tokens(received) == [1, 2]


async def test_a_replica_that_ends_in_the_middle_is_lost(make: Make, late_frames_at_once: None) -> None:
    handle = FakeHandle(over_handle(STARTED, text("Hel")))
    error = await failure(make(handle, retries=0), delivered=2)
    assert isinstance(error, BackendLost)
    assert "ended the answer early" in error.message


async def test_frames_that_never_follow_the_acknowledgement_are_lost(
    make: Make, server: ChannelServer, late_frames_at_once: None
) -> None:
    handle = FakeHandle(over_channel(server, STARTED, text("Hel")))
    assert isinstance(await failure(make(handle, retries=0), delivered=2), BackendLost)


async def test_a_connection_that_breaks_in_the_middle_is_a_lost_replica(make: Make, server: ChannelServer) -> None:
    gate = asyncio.Event()

    async def answer(request: bytes, hint: Any, to: bytes) -> AsyncIterator[bytes]:
        address = msgspec.msgpack.decode(to, type=ReturnAddress)
        link = server.link(address.gateway)
        assert link is not None
        link.push(address.stream, STARTED)
        await gate.wait()
        link.transport.abort()
        await asyncio.Event().wait()
        yield HANDED_OVER

    handle = FakeHandle(answer)
    async with aclosing(make(handle, retries=0).stream(request())) as stream:
        assert await anext(stream) == STARTED
        gate.set()
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(BackendLost):
                await anext(stream)
    assert handle.responses[0].cancelled, "the replica must not go on for nobody"


async def test_a_client_that_does_not_read_is_cut_off(make: Make) -> None:
    small = ChannelHub(stream_buffer_frames=3)
    try:
        more = asyncio.Event()
        handle = FakeHandle(over_handle(STARTED, more, *(text("a", i) for i in range(10)), asyncio.Event()))
        async with aclosing(make(handle, small).stream(request())) as stream:
            await anext(stream)
            more.set()
            await settle(200)
            assert handle.responses[0].cancelled, "the slot is free before anybody comes to read"
            with pytest.raises(ClientTooSlow):
                await anext(stream)
        assert handle.responses[0].cancelled
        assert len(handle.calls) == 1
    finally:
        await small.aclose()


# --- time -------------------------------------------------------------------------------------------------------------


async def test_a_request_that_gets_no_frame_in_time_fails(make: Make) -> None:
    handle = FakeHandle(over_handle(asyncio.Event()))
    error = await failure(make(handle, first_frame_timeout_s=0.02))
    assert isinstance(error, DeadlineExceeded)
    assert error.message == "No replica began to answer within 0.02 seconds."
    assert len(handle.calls) == 1
    assert handle.responses[0].cancelled


async def test_after_the_first_frame_there_is_no_deadline(make: Make) -> None:
    gate = asyncio.Event()
    handle = FakeHandle(over_handle(STARTED, gate, *HELLO[1:]))
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert events(await collect(make(handle, first_frame_timeout_s=0.02))) == events(HELLO)


# --- the end of a call ------------------------------------------------------------------------------------------------


async def test_closing_the_stream_cancels_the_call(make: Make) -> None:
    handle = FakeHandle(over_handle(STARTED, asyncio.Event()))
    stream = make(handle).stream(request())
    await anext(stream)
    assert not handle.responses[0].cancelled
    await stream.aclose()
    assert handle.responses[0].cancelled
    await eventually(lambda: handle.responses[0].over)


async def test_cancelling_a_request_without_a_frame_cancels_the_call(make: Make) -> None:
    handle = FakeHandle(over_handle(asyncio.Event()))
    running = asyncio.create_task(collect(make(handle)))
    await eventually(lambda: handle.responses)
    await settle()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert handle.responses[0].cancelled
    assert len(handle.calls) == 1, "a cancelled request is not retried"
    await eventually(lambda: handle.responses[0].over)


async def test_a_call_that_is_complete_is_not_cancelled_but_read_to_its_end(make: Make, server: ChannelServer) -> None:
    """Serve's accounting of running requests hangs on it."""
    gate = asyncio.Event()

    async def answer(request: bytes, hint: Any, to: bytes) -> AsyncIterator[bytes]:
        async for _ in over_channel(server, *HELLO)(request, hint=hint, to=to):
            await gate.wait()
        yield HANDED_OVER

    handle = FakeHandle(answer)
    await collect(make(handle))
    (response,) = handle.responses
    await settle()
    assert not response.cancelled
    assert not response.over
    gate.set()
    await eventually(lambda: response.over)
    assert not response.cancelled


async def test_a_finished_request_leaves_nothing_behind(make: Make, hub: ChannelHub) -> None:
    before = asyncio.all_tasks()
    handle = FakeHandle(over_handle(*HELLO), over_handle(RuntimeError("no")), over_handle(STARTED, asyncio.Event()))
    dispatcher = make(handle)
    await collect(dispatcher)
    await failure(dispatcher)
    stream = dispatcher.stream(request())
    await anext(stream)
    await stream.aclose()
    for call in handle.calls:
        assert hub.inbox(msgspec.msgpack.decode(call["to"], type=ReturnAddress).stream) is None
    await eventually(lambda: asyncio.all_tasks() == before)
    assert dispatcher._readers == set()


# --- handles ----------------------------------------------------------------------------------------------------------


async def test_a_models_handle_is_made_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    dispatcher = make(handle)
    made = []

    def get_deployment_handle(*name: str) -> FakeHandle:
        made.append(name)
        return handle

    monkeypatch.setattr(serve, "get_deployment_handle", get_deployment_handle)
    for _ in range(3):
        await collect(dispatcher)
    assert made == [("Model", "m")]


async def test_a_new_models_router_is_made_before_its_first_request(make: Make) -> None:
    handle = FakeHandle(over_handle(*HELLO))
    dispatcher = make(handle)
    dispatcher._warm_up({"m"})
    assert handle.is_initialized
    assert handle.calls == []


async def test_a_model_that_was_deployed_again_gets_a_new_handle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeHandle(over_handle(*HELLO)), FakeHandle(over_handle(*HELLO))
    dispatcher = make(first)
    await collect(dispatcher)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: second)
    dispatcher._warm_up({"m"})
    await collect(dispatcher)
    assert (len(first.calls), len(second.calls)) == (1, 1)


@pytest.mark.parametrize("raised", [KeyError("Model does not exist"), RayServeException("no controller")])
async def test_a_model_that_is_gone_again_does_not_keep_others_from_being_prepared(
    make: Make, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    """Serve's status and its list of deployments are read one after the other."""
    handle = FakeHandle(over_handle(*HELLO))
    dispatcher = make(handle)

    def get_deployment_handle(deployment: str, app: str) -> FakeHandle:
        if app == "gone":
            raise raised
        return handle

    monkeypatch.setattr(serve, "get_deployment_handle", get_deployment_handle)
    dispatcher._warm_up(["gone", "m"])
    assert handle.is_initialized


async def test_models_are_those_of_the_catalog(make: Make) -> None:
    dispatcher = make(FakeHandle(over_handle(*HELLO)))
    await collect(dispatcher)
    assert dispatcher.models() == [ModelEntry("m", 7)]


# --- with a real replica ----------------------------------------------------------------------------------------------


def completion(frames: list[Frame], n: int = 1) -> Completion:
    collector = Collector(n)
    for event in events(frames):
        collector.feed(event)  # type: ignore[arg-type]
    return collector.result()


@pytest.fixture
async def replica(hub: ChannelHub) -> AsyncIterator[Callable[..., Any]]:
    """Starts replicas over the fake backend, connected to the hub or not."""
    started: list[Replica] = []

    async def start(connected: bool, **backend: Any) -> Replica:
        made = Replica(ModelSettings(backend=FakeSettings(**backend)), "127.0.0.1")
        await made.start()
        started.append(made)
        if connected:
            hub.set_replicas("m", {"r": made._metadata.channel})  # type: ignore[union-attr]
            await eventually(lambda: made._channel.link(hub.gateway))
        return made

    yield start
    for made in started:
        await made.aclose()


@pytest.mark.parametrize("n", [1, 2])
async def test_both_ways_give_the_same_answer(make: Make, replica: Callable[..., Any], n: int) -> None:
    answers = []
    for connected in (True, False):
        handle = FakeHandle((await replica(connected, tokens=50)).generate)
        frames = await collect(make(handle), request(n=n))
        # How long it took may differ.
        choices = [msgspec.structs.replace(choice, finished=None) for choice in completion(frames, n).choices]
        answers.append((choices, sorted(tokens(frames))))
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == 50 * n


@pytest.mark.parametrize("connected", [True, False])
async def test_a_backends_error_arrives_as_it_was_raised(
    make: Make, replica: Callable[..., Any], connected: bool
) -> None:
    handle = FakeHandle((await replica(connected, fail_at=FakeFault(kind="overloaded"))).generate)
    assert isinstance(await failure(make(handle)), Overloaded)


@pytest.mark.parametrize("connected", [True, False])
async def test_closing_the_stream_frees_the_slot(make: Make, replica: Callable[..., Any], connected: bool) -> None:
    made = await replica(connected, inter_token_s=0.001)
    stream = make(FakeHandle(made.generate)).stream(request(max_tokens=1000))
    await anext(stream)
    assert made.stats().running == 1
    await stream.aclose()
    await eventually(lambda: made.stats().running == 0)


async def test_a_lost_replica_is_replaced_by_a_real_one(make: Make, replica: Callable[..., Any]) -> None:
    dying = await replica(False, fail_at=FakeFault(kind="backend_lost"))
    handle = FakeHandle(dying.generate, (await replica(True, tokens=5)).generate)
    assert len(tokens(await collect(make(handle)))) == 5
