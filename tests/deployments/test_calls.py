"""One question, one answer: from the pool of either kind, through a replica, to the backend's method."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from backends.fake import FakeBackend, FakeSettings
from deployments.catalog import Application, Catalog
from deployments.channel import ChannelHub
from deployments.dispatch import GRPC_REQUEST_LIMIT_BYTES, Dispatcher
from deployments.local import LocalPool
from deployments.models import ModelEntry, ModelPool
from deployments.replica import Replica, decode_answer
from deployments.routing.policy import RoutingHint
from deployments.settings import GatewaySettings, ModelSettings
from protocols.calls import (
    Adapter,
    CountTokens,
    EmbeddingRequest,
    EraseSlot,
    GetAdapters,
    GetCard,
    GetSlots,
    GetStats,
    ModelCall,
    RerankRequest,
    RestoreSlot,
    SaveSlot,
    SetAdapters,
    SlotState,
    Tokenize,
)
from protocols.card import BackendStats, ModelCard
from protocols.errors import (
    BackendLost,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.request import LoraScale, TextPrompt
from tests.deployments.fake_serve import FakeUnaryHandle, Reply
from tests.deployments.support import WITHIN_S, eventually, request, settle

BACKEND = {"slots": 2, "context_length": 64, "adapters": ("a.gguf", "b.gguf")}
HINT = RoutingHint(1)
encode = msgspec.msgpack.encode

EMBED = EmbeddingRequest("r1", "m", (TextPrompt("one two"), TextPrompt("three")))
STATS = GetStats("r1", "m")


# --- a replica --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    replica = Replica(ModelSettings(backend=FakeSettings(**BACKEND)), "127.0.0.1")
    await replica.start()
    yield replica
    await replica.aclose()


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(FakeSettings(**BACKEND))
    await backend.start()
    yield backend
    await backend.aclose()


Make = Callable[..., Dispatcher]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """A dispatcher that gets `handle` from Serve for its one model."""
    hub = ChannelHub(10)

    def make(handle: FakeUnaryHandle, **settings: Any) -> Dispatcher:
        monkeypatch.setattr(serve, "get_deployment_handle", lambda deployment, app: handle)
        dispatcher = Dispatcher(GatewaySettings(**settings), hub)
        dispatcher.catalog = Catalog(1000, source=lambda: {"m": Application(ModelEntry("m", 7), None)})
        return dispatcher

    yield make
    await hub.aclose()


@pytest.fixture(params=["local", "serve"])
def pool(request: pytest.FixtureRequest, make: Make, replica: Replica, backend: FakeBackend) -> ModelPool:
    return LocalPool({"m": backend}, {"m": 1}) if request.param == "local" else make(FakeUnaryHandle(replica.call))


async def test_every_answer_arrives_as_the_backend_gave_it(pool: ModelPool, backend: FakeBackend) -> None:
    assert await pool.call(EMBED) == await backend.embed(EMBED)
    ranking = RerankRequest("r1", "m", "two", ("one two", "three"))
    assert await pool.call(ranking) == await backend.rerank(ranking)
    assert await pool.call(CountTokens("r1", "m", request(text="one two"))) == 3
    stats: BackendStats = await pool.call(STATS)
    assert stats.slots == 2
    card = await pool.call(GetCard("r1", "m"))
    assert isinstance(card, ModelCard) and card == backend.card()
    assert await pool.call(GetSlots("r1", "m")) == await backend.slots()
    saved = await pool.call(SaveSlot("r1", "m", 1, "f"))
    assert (saved.slot, saved.filename) == (1, "f")
    assert await pool.call(RestoreSlot("r1", "m", 1, "f")) == saved
    assert await pool.call(EraseSlot("r1", "m", 1)) == 0
    await pool.call(SetAdapters("r1", "m", (LoraScale(1, 0.5),)))
    assert await pool.call(GetAdapters("r1", "m")) == [Adapter(0, "a.gguf", 0.0), Adapter(1, "b.gguf", 0.5)]


async def test_the_backends_errors_arrive_as_they_are(pool: ModelPool) -> None:
    with pytest.raises(NotSupported, match="does not give its tokens away"):
        await pool.call(Tokenize("r1", "m", ("text",)))
    with pytest.raises(InvalidRequest) as caught:
        await pool.call(EmbeddingRequest("r1", "m", ()))
    assert caught.value.param == "input"


async def test_a_model_there_is_not_is_not_asked(pool: ModelPool) -> None:
    with pytest.raises(ModelNotFound, match="The model 'other' does not exist. Available: m"):
        await pool.call(GetStats("r1", "other"))


async def test_leaving_a_call_ends_it_in_the_backend(pool: ModelPool, backend: FakeBackend, replica: Replica) -> None:
    """Erasing waits for a busy slot, here without an end."""
    waiting = {backend: 0, replica._backend: 0}
    for each in waiting:
        assert isinstance(each, FakeBackend)

        async def wait(slot: int, each: Any = each) -> int:
            waiting[each] += 1
            try:
                await asyncio.Event().wait()
            finally:
                waiting[each] -= 1
            return 0

        each.erase_slot = wait  # type: ignore[method-assign]
    call = asyncio.ensure_future(pool.call(EraseSlot("r1", "m", 0)))
    await eventually(lambda: sum(waiting.values()) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(lambda: sum(waiting.values()) == 0)


async def test_a_backend_that_breaks_is_an_internal_error_whose_detail_stays_in_the_replica(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: EmbeddingRequest) -> Any:
        raise ZeroDivisionError("secret detail")

    replica._backend.embed = broken  # type: ignore[assignment, method-assign]
    reply = await replica.call(encode(EMBED), HINT)
    with pytest.raises(InternalError):
        decode_answer(EMBED, [reply])
    assert b"secret" not in reply
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("question", msgspec.inspect.type_info(ModelCall).types, ids=lambda info: info.cls.__name__)  # type: ignore[attr-defined]
def test_every_question_names_the_type_of_its_answer(question: msgspec.inspect.StructType) -> None:
    assert question.cls.answer_type() is not None  # type: ignore[attr-defined]


# --- every replica ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    """Two of one model."""
    both = [Replica(ModelSettings(backend=FakeSettings(**BACKEND)), "127.0.0.1", name) for name in ("beta", "alpha")]
    for replica in both:
        await replica.start()
    yield both
    for replica in both:
        await replica.aclose()


async def test_the_slots_are_those_of_all_replicas(make: Make, replicas: list[Replica]) -> None:
    handle = FakeUnaryHandle(*(replica.call for replica in replicas))
    slots: list[SlotState] = await make(handle).call(GetSlots("r1", "m"))
    assert [(slot.replica, slot.id) for slot in slots] == [("alpha", 0), ("alpha", 1), ("beta", 0), ("beta", 1)]


async def test_adapters_are_scaled_in_all_replicas(make: Make, replicas: list[Replica]) -> None:
    handle = FakeUnaryHandle(*(replica.call for replica in replicas))
    await make(handle).call(SetAdapters("r1", "m", (LoraScale(1, 0.5),)))
    for replica in replicas:
        assert [adapter.scale for adapter in replica._backend.adapters()] == [0.0, 0.5]
    with pytest.raises(InvalidRequest):
        await make(handle).call(SetAdapters("r1", "m", (LoraScale(7, 0.5),)))


async def test_where_one_of_all_replicas_is_lost_all_are_asked_again(make: Make, replica: Replica) -> None:
    lost = iter([ActorDiedError()])

    async def lost_once(call: bytes, hint: Any) -> bytes:
        for error in lost:
            raise error
        return await replica.call(call, hint)

    handle = FakeUnaryHandle(lost_once, replica.call)
    slots: list[SlotState] = await make(handle).call(GetSlots("r1", "m"))
    assert (len(slots), len(handle.calls)) == (4, 2)


async def test_all_replicas_have_only_so_much_time(make: Make, replica: Replica) -> None:
    with pytest.raises(DeadlineExceeded):
        await make(FakeUnaryHandle(replica.call, never), first_frame_timeout_s=0.01).call(GetSlots("r1", "m"))


# --- a full queue -----------------------------------------------------------------------------------------------------


async def test_where_the_queue_is_full_nothing_more_is_computed_but_questions_are_answered(
    backend: FakeBackend,
) -> None:
    pool = LocalPool({"m": backend}, {"m": 0})
    running = [pool.stream(request(max_tokens=50)) for _ in range(2)]
    for stream in running:
        await anext(stream)
    with pytest.raises(Overloaded):
        await pool.call(EMBED)
    assert (await pool.call(STATS)).running == 2
    for stream in running:
        await stream.aclose()


# --- through Serve ----------------------------------------------------------------------------------------------------


def replying(*steps: BaseException | Replica) -> list[Reply]:
    """Calls that end like this, one after another."""

    def reply(step: BaseException | Replica) -> Reply:
        async def answer(call: bytes, hint: Any) -> bytes:
            if isinstance(step, BaseException):
                raise step
            return await step.call(call, hint)

        return answer

    return [reply(step) for step in steps]


async def test_a_lost_replica_is_replaced(make: Make, replica: Replica) -> None:
    handle = FakeUnaryHandle(*replying(ActorDiedError(), replica))
    stats: BackendStats = await make(handle).call(STATS)
    assert stats.slots == 2
    assert [call["call"] for call in handle.calls] == [encode(STATS)] * 2


async def test_replicas_are_replaced_up_to_the_limit(make: Make) -> None:
    handle = FakeUnaryHandle(*replying(ActorDiedError()))
    with pytest.raises(BackendLost):
        await make(handle, retries=2).call(STATS)
    assert len(handle.calls) == 3


@pytest.mark.parametrize(
    "call",
    [
        SaveSlot("r1", "m", 0, "f"),
        RestoreSlot("r1", "m", 0, "f"),
        EraseSlot("r1", "m", 0),
        SetAdapters("r1", "m", ()),
    ],
    ids=lambda call: type(call).__name__,
)
async def test_what_changes_a_replica_is_asked_once(make: Make, call: Any) -> None:
    """Another replica's slots hold other prompts."""
    handle = FakeUnaryHandle(*replying(ActorDiedError()))
    with pytest.raises(BackendLost):
        await make(handle).call(call)
    assert len(handle.calls) == 1


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), Overloaded),
        (RayTaskError("call", "secret detail", ValueError("secret detail")), InternalError),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_other_failures_are_not_retried(make: Make, raised: Exception, error: type[ServingError]) -> None:
    handle = FakeUnaryHandle(*replying(raised))
    with pytest.raises(error) as caught:
        await make(handle).call(STATS)
    assert "secret" not in caught.value.message
    assert len(handle.calls) == 1


async def never(call: bytes, hint: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


async def test_a_call_that_is_not_answered_in_time_is_cancelled(make: Make) -> None:
    handle = FakeUnaryHandle(never)
    with pytest.raises(DeadlineExceeded):
        await make(handle, first_frame_timeout_s=0.01).call(STATS)
    assert handle.responses[0].cancelled


async def test_a_call_that_serve_cancels_is_a_lost_replica(make: Make) -> None:
    """Serve raises `CancelledError` into whoever awaits a cancelled call."""
    handle = FakeUnaryHandle(never)
    call = asyncio.ensure_future(make(handle, retries=0).call(STATS))
    await eventually(lambda: handle.responses)
    await settle()
    handle.responses[0].cancel()
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(BackendLost):
            await call


@pytest.mark.parametrize(
    ("call", "by_reference"),
    [(STATS, False), (EMBED, True), (Tokenize("r1", "m", ("x" * (GRPC_REQUEST_LIMIT_BYTES // 2),)), True)],
    ids=lambda value: type(value).__name__,
)
async def test_large_answers_go_through_the_object_store(
    make: Make, replica: Replica, call: Any, by_reference: bool
) -> None:
    handle = FakeUnaryHandle(replica.call)
    try:
        await make(handle).call(call)
    except NotSupported:
        pass
    assert handle.options_used == [{"stream": False, "_by_reference": by_reference}]


async def test_a_replica_that_is_closed_says_so(make: Make, replica: Replica) -> None:
    await replica.aclose()
    with pytest.raises(Unavailable):
        await make(FakeUnaryHandle(replica.call)).call(EMBED)
