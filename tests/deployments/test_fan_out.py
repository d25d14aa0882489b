"""Several requests of one call as one stream, over a pool whose streams the test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from deployments import fan_out
from deployments.fan_out import AT_ONCE
from deployments.models import ModelEntry
from protocols.calls import AnswerT, Question
from protocols.codec import Call
from protocols.errors import BackendLost, Overloaded
from protocols.events import Finished, Frame, Started, TextDelta
from protocols.request import Request
from protocols.sink import Sink
from tests.deployments.support import (
    HELLO,
    STARTED,
    WITHIN_S,
    ScriptedPool,
    Step,
    events,
    eventually,
    finished,
    request,
    settle,
    text,
)


class PoolOfTexts:
    """Plays another script for each request, by the text of its prompt."""

    def __init__(self, **scripts: Sequence[Step]) -> None:
        self._pools = {name: ScriptedPool(script) for name, script in scripts.items()}

    def models(self) -> Sequence[ModelEntry]:
        return ()

    def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        return self._pools[request.prompt.messages[0].text].stream(request, sink)  # type: ignore[union-attr]  # `request()` makes chats

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        raise NotImplementedError

    @property
    def open(self) -> int:
        return sum(pool.open for pool in self._pools.values())

    def asked(self, name: str) -> int:
        return len(self._pools[name].requests)


def call(*texts: str, n: int = 1) -> Call[None]:
    return Call(tuple(request(text=text, n=n) for text in texts), stream=True, options=None)


async def collect(pool: ScriptedPool | PoolOfTexts, wanted: Call[None]) -> list[Frame]:
    async with asyncio.timeout(WITHIN_S), aclosing(fan_out.stream(pool.stream, wanted)) as frames:
        return [frame async for frame in frames]


async def test_one_request_is_the_pools_own_stream() -> None:
    pool = ScriptedPool(HELLO)
    assert await collect(pool, call("Hi")) == HELLO
    own: Any = fan_out.stream(pool.stream, call("Hi"))
    assert own.ag_code is ScriptedPool.stream.__code__


async def test_choices_are_counted_through() -> None:
    pool = PoolOfTexts(
        a=[STARTED, text("a1", choice=1), text("a0"), finished(0), finished(1)],
        b=[STARTED, text("b0", 5), text("b1", choice=1), finished(1), finished(0)],
    )
    frames = await collect(pool, call("a", "b", n=2))
    texts = {event.choice: event.text for event in events(frames) if isinstance(event, TextDelta)}
    assert texts == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    assert [event.choice for event in events(frames) if isinstance(event, Started)] == [0, 2]
    assert sorted(event.choice for event in events(frames) if isinstance(event, Finished)) == [0, 1, 2, 3]
    assert all(frame.choice == event.choice for frame in frames for event in frame.events)
    assert [frame.choice for frame in frames if frame.tokens == (5,)] == [2]


async def test_requests_run_side_by_side() -> None:
    gate = asyncio.Event()
    pool = PoolOfTexts(a=[STARTED, gate, text("a"), finished()], b=HELLO)
    async with aclosing(fan_out.stream(pool.stream, call("a", "b"))) as frames:
        seen = [await anext(frames) for _ in range(1 + len(HELLO))]
        assert "".join(e.text for e in events(seen) if isinstance(e, TextDelta)) == "Hello"
        gate.set()
        assert len([frame async for frame in frames]) == 2
    assert pool.open == 0


async def test_no_more_than_some_run_at_once() -> None:
    gate = asyncio.Event()
    pool = ScriptedPool([gate, *HELLO])
    many = asyncio.create_task(collect(pool, call(*["Hi"] * (AT_ONCE + 3))))
    await eventually(lambda: pool.open == AT_ONCE)
    await settle()
    assert len(pool.requests) == AT_ONCE
    gate.set()
    assert len(await many) == (AT_ONCE + 3) * len(HELLO)
    assert pool.open == 0


async def test_the_first_error_ends_them_all() -> None:
    pool = PoolOfTexts(a=[STARTED, asyncio.Event()], b=[STARTED, BackendLost("gone")])
    with pytest.raises(BackendLost, match="gone"):
        await collect(pool, call("a", "b"))
    assert pool.open == 0


async def test_an_error_before_any_frame_is_the_error_of_the_call() -> None:
    pool = PoolOfTexts(a=[Overloaded("full", retry_after_s=1.0)], b=[asyncio.Event()])
    with pytest.raises(Overloaded, match="full"):
        await collect(pool, call("a", "b"))
    assert pool.open == 0


async def test_closing_it_closes_them_all_also_while_frames_wait() -> None:
    never = asyncio.Event()
    pool = PoolOfTexts(a=[STARTED, *[text("x")] * 100, never], b=[STARTED, never])
    async with aclosing(fan_out.stream(pool.stream, call("a", "b"))) as frames:
        await anext(frames)
        await settle()
        assert pool.open == 2
    assert pool.open == 0


async def test_cancelling_the_reader_closes_them_all() -> None:
    pool = PoolOfTexts(a=[STARTED, asyncio.Event()], b=[asyncio.Event()])
    reader = asyncio.create_task(collect(pool, call("a", "b")))
    await eventually(lambda: pool.open == 2)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert pool.open == 0
    assert pool.asked("a") == pool.asked("b") == 1
