"""What a replica believes to hold, from the requests and frames that pass, and what it answers to routers."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from backends.base import BackendStats, ModelCard
from deployments import bookkeeping
from deployments.bookkeeping import LARGE_FLEET, Book
from deployments.routing.ask import VERSION, Ask, AskReply, Digest, DigestPull, Intent, ToGateway, ToReplica
from deployments.routing.hint import UNKNOWN, RoutingHint
from deployments.routing.key import PrefixKey
from deployments.routing.tracker import Tracker
from protocols.events import Failed, Frame, Progress, Started
from tests.deployments.support import finished, text

encode = msgspec.msgpack.encode
CARD = ModelCard(context_length=10_000, slots=2, engine="fake")


class Link:
    """A gateway's connection that only records what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


class Engine:
    def __init__(self) -> None:
        self.stats = BackendStats(slots=2, running=0, waiting=0)

    def __call__(self) -> BackendStats:
        return self.stats


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def book(engine: Engine) -> Book:
    return Book(CARD, engine, max_ongoing=3)


def hint(*rungs: int, tokens: int = 1000) -> RoutingHint:
    ends = tuple(tokens * (i + 1) // len(rungs) for i in range(len(rungs)))
    return RoutingHint(PrefixKey(VERSION, rungs, ends, (0,), tokens, in_tokens=True))


def said(book: Book, message: object) -> list[Any]:
    link = Link()
    book.on_aside(link, encode(message))  # type: ignore[arg-type]
    return link.sent


def asked(book: Book, *rungs: int) -> AskReply:
    (answer,) = said(book, ToReplica(7, ask=Ask(VERSION, rungs)))
    assert isinstance(answer, ToGateway) and answer.number == 7 and answer.reply is not None
    return answer.reply


async def test_a_request_is_held_and_queued_from_its_arrival(book: Book) -> None:
    async with book.enter(hint(1, 2)):
        reply = asked(book, 1, 2, 3)
        assert (reply.depth, reply.queued_tokens, reply.ongoing) == (2, 1000, 1)
    assert asked(book, 1, 2, 3).depth == 2
    assert (asked(book, 1).queued_tokens, asked(book, 1).ongoing) == (0, 0)


async def test_its_start_comes_before_its_prefill_and_the_first_token_after_it(book: Book) -> None:
    async with book.enter(hint(1, 2)) as entry:
        entry.observe(Frame((Started(1000, 400),)))
        assert asked(book, 1).queued_tokens == 600
        entry.observe(Frame((Progress(700, 400, 1000, 5.0),)))
        assert asked(book, 1).queued_tokens == 600
        entry.observe(text("a", 1))
        assert asked(book, 1).queued_tokens == 0
        entry.observe(finished())
    book.tracker.check_integrity()


@pytest.mark.parametrize("frame", [Frame((), (5,)), text("a"), finished()], ids=["tokens", "text", "end"])
async def test_the_prefill_ends_with_whatever_comes_of_the_answer(book: Book, frame: Frame) -> None:
    async with book.enter(hint(1)) as entry:
        entry.observe(Frame((Started(1000, 0),)))
        entry.observe(frame)
        assert asked(book, 1).queued_tokens == 0


async def test_a_request_that_fails_or_is_cancelled_leaves_no_queue(book: Book) -> None:
    with pytest.raises(ZeroDivisionError):
        async with book.enter(hint(1)) as entry:
            entry.observe(Frame((Started(1000, 0),)))
            raise ZeroDivisionError
    from protocols.errors import ErrorInfo

    async with book.enter(hint(2)) as entry:
        entry.observe(Frame((Failed(ErrorInfo("internal", "x")),)))
        assert asked(book, 1).queued_tokens > 0, "that nothing is computed any more, only the end tells"
    assert asked(book, 1).queued_tokens == 0
    book.tracker.check_integrity()


async def test_requests_of_one_client_and_one_id_are_two(book: Book) -> None:
    async with book.enter(hint(1)), book.enter(hint(1)):
        assert asked(book, 1).ongoing == 2
    assert asked(book, 1).ongoing == 0


async def test_the_engines_own_count_of_queued_tokens_is_told(book: Book, engine: Engine) -> None:
    async with book.enter(hint(1)):
        engine.stats = BackendStats(slots=2, running=1, waiting=0, uncached_tokens_queued=777)
        assert asked(book, 1).queued_tokens == 777
        assert 600 < book.stats()["q"] < 900
        engine.stats = BackendStats(slots=2, running=1, waiting=0)
        assert asked(book, 1).queued_tokens == 1000


@pytest.mark.parametrize(("prompt", "counts"), [(256, True), (255, False)])
async def test_the_engines_rate_counts_after_prompts_that_say_something(
    book: Book, engine: Engine, prompt: int, counts: bool
) -> None:
    engine.stats = BackendStats(slots=2, running=1, waiting=0, prefill_tokens_per_s=2000.0)
    before = book.tracker.rate
    async with book.enter(hint(1)) as entry:
        entry.observe(Frame((Started(prompt + 50, 50),)))
        entry.observe(text("a", 1))
    assert (book.tracker.rate == 2000.0) == counts
    assert before != 2000.0


async def test_an_intent_counts_until_the_request_comes(book: Book) -> None:
    assert said(book, ToReplica(intent=Intent(VERSION, 2, 1, 500, False))) == []
    assert (asked(book, 1).queued_tokens, asked(book, 1).ongoing) == (500, 1)
    async with book.enter(hint(1, 2)):
        assert (asked(book, 1).queued_tokens, asked(book, 1).ongoing) == (1000, 1)


async def test_requests_that_landed_off_their_owner_are_in_the_digest(book: Book) -> None:
    said(book, ToReplica(intent=Intent(VERSION, 20, 10, 500, True)))
    said(book, ToReplica(intent=Intent(VERSION, 21, 11, 500, False)))
    (answer,) = said(book, ToReplica(5, pull=DigestPull(VERSION, 0, 2)))
    digest = answer.digest
    assert isinstance(digest, Digest)
    assert (answer.number, digest.landed, digest.position) == (5, ((10, 20),), 1)
    assert digest.generation == asked(book, 1).generation
    (answer,) = said(book, ToReplica(6, pull=DigestPull(VERSION, 1, 2)))
    assert answer.digest.landed == ()


@pytest.mark.parametrize(
    "message",
    [{}, {"later": 1}, {"ask": [VERSION, "text"]}, [1], "text", {"pull": [VERSION + 1, 0, 2]}],
)
async def test_messages_of_another_version_are_passed_over(book: Book, message: object) -> None:
    assert said(book, message) == []


async def test_another_versions_question_is_answered_with_the_load_only(book: Book) -> None:
    async with book.enter(hint(1, 2)):
        (answer,) = said(book, ToReplica(1, ask=Ask(VERSION + 1, (1, 2))))
        assert (answer.reply.depth, answer.reply.queued_tokens) == (0, 1000)


async def test_a_question_that_breaks_the_book_does_not_break_the_connection(
    book: Book, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Tracker, "answer", fail)
    assert said(book, ToReplica(1, ask=Ask(VERSION, (1,)))) == []
    assert any(record.exc_info for record in caplog.records)


async def test_replicas_of_a_large_fleet_change_what_they_say_more_rarely(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    said(book, ToReplica(1, pull=DigestPull(VERSION, 0, LARGE_FLEET + 1)))
    before = book.stats()
    async with book.enter(hint(1)):
        now += bookkeeping.LARGE_FLEET_STATS_S - 1
        assert book.stats() == before
        now += 1
        assert book.stats()["n"] == 1
        said(book, ToReplica(1, pull=DigestPull(VERSION, 0, LARGE_FLEET)))
    assert book.stats()["n"] == 0


async def test_a_call_without_a_hint_is_a_request_too(book: Book) -> None:
    async with book.enter(UNKNOWN):
        assert asked(book, 1).ongoing == 1


def test_every_start_is_another_generation(engine: Engine) -> None:
    assert len({Book(CARD, engine, 3).stats()["g"] for _ in range(8)}) == 8


def test_a_large_model_is_expected_to_be_slower(engine: Engine) -> None:
    def rate(engine_name: str, parameters: int) -> float:
        return Book(ModelCard(128, 2, engine_name, parameters=parameters), engine, 3).expected_rate

    assert rate("llama.cpp", 10**8) == 10 * rate("llama.cpp", 10**9)
    assert rate("vllm", 10**9) > 100 * rate("llama.cpp", 10**9)
    assert rate("llama.cpp", 0) == rate("unknown", 10**9) == 1000.0
