"""The contract of `backends.base` as one suite. A backend's test module subclasses `BackendContract`:

    class TestMyBackend(BackendContract):
        context_length = 256

        @classmethod
    async def create(cls) -> Backend:
            return MyBackend(settings)

`create` gives a backend that is not started yet. All tests of the class share one started instance (the fixture
`backend`), so a model is loaded once; a test that must end its backend makes its own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar

import msgspec
import pytest
import pytest_asyncio

from backends.base import Backend, BackendStats
from protocols.collect import Choice, Collector, Completion
from protocols.errors import ContextOverflow, Unavailable
from protocols.events import Finished, Frame, Started, TextDelta
from protocols.request import ChatPrompt, Message, Prompt, Request, Sampling, TextPart, TextPrompt
from protocols.sink import is_middle

GREEDY = Sampling(temperature=0.0)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt((Message("user", (TextPart(text),)),))


class Answer(msgspec.Struct, frozen=True):
    frames: tuple[Frame, ...]
    completion: Completion

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for frame in self.frames for token in frame.tokens)

    @property
    def choice(self) -> Choice:
        """The only one, without what differs from run to run: how long it took."""
        (choice,) = self.completion.choices
        return msgspec.structs.replace(choice, started=None, finished=None)


async def answer(backend: Backend, request: Request) -> Answer:
    """Runs `request` to its end. `Collector` raises on any event out of order, and on a stream without an end."""
    collector = Collector(request.n)
    frames = []
    async for frame in backend.generate(request):
        assert all(event.choice == frame.choice for event in frame.events), "events of a frame are of its choice"
        for event in frame.events:
            collector.feed(event)
        frames.append(frame)
    return Answer(tuple(frames), collector.result())


async def until(backend: Backend, running: int, waiting: int = 0, within_s: float = 1.0) -> None:
    """ "frees the request's slot … within one engine step. `stats()` shows it." """
    deadline = asyncio.get_running_loop().time() + within_s
    while (stats := backend.stats()).running != running or stats.waiting != waiting:
        assert asyncio.get_running_loop().time() < deadline, f"expected {running=} {waiting=}, still {stats}"
        await asyncio.sleep(0.002)


@pytest.mark.asyncio(loop_scope="class")
class BackendContract(ABC):
    context_length: ClassVar[int]
    """Room of one request in what `create` makes: small, a test fills it."""

    short_prompt: ClassVar[Prompt] = chat("Tell me a story about a fox.")
    """A prompt whose greedy answer is longer than a dozen tokens."""

    endless: ClassVar[int] = 100
    """A token budget that is not used up while a test looks, and fits the context."""

    same_beside_others: ClassVar[bool] = True
    """Whether a request's logits are the same to the last bit beside others: a hot draw shows every difference."""

    @classmethod
    @abstractmethod
    async def create(cls) -> Backend: ...

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def backend(cls) -> AsyncIterator[Backend]:
        backend = await cls.create()
        card = await backend.start()
        assert card.context_length == cls.context_length
        assert card.slots == backend.stats().slots
        yield backend
        await backend.aclose()

    @pytest_asyncio.fixture(autouse=True, loop_scope="class")
    async def idle(self, request: pytest.FixtureRequest) -> AsyncIterator[None]:
        """No test leaves a request behind."""
        yield
        if "backend" in request.fixturenames:
            await until(request.getfixturevalue("backend"), running=0)

    def request(self, max_tokens: int | None = 12, **fields: object) -> Request:
        values = {"prompt": self.short_prompt, "sampling": GREEDY, "ignore_eos": True} | fields
        return msgspec.structs.replace(Request("test", "m", self.short_prompt, max_tokens=max_tokens), **values)

    def long_request(self, **fields: object) -> Request:
        return self.request(self.endless, **fields)

    # --- a stream ------------------------------------------------------------

    async def test_order_and_counts(self, backend: Backend) -> None:
        request = self.request()
        got = await answer(backend, request)
        events = [event for frame in got.frames for event in frame.events]
        start, end = events[0], events[-1]
        assert isinstance(start, Started)
        assert isinstance(end, Finished)
        assert got.frames[0].events[0] is start, "the first frame holds Started"
        assert start.prompt_tokens == end.usage.prompt_tokens == await backend.count_tokens(request)
        assert 0 <= start.cached_tokens <= start.prompt_tokens
        assert 0 <= end.usage.cached_tokens <= end.usage.prompt_tokens
        assert len(got.tokens) == end.usage.completion_tokens == 12, "tokens are exactly what was sampled"
        assert got.choice.text
        if end.timings is not None:
            assert end.timings.predicted_n == 12
            assert end.timings.cache_n + end.timings.prompt_n == end.usage.prompt_tokens

    async def test_a_sink_gets_frames_in_the_readers_stead(self, backend: Backend) -> None:
        request = self.request()
        got: list[Frame] = []

        def sink(frame: Frame) -> bool:
            assert is_middle(frame)
            got.append(frame)
            return True

        async for frame in backend.generate(request, sink):
            got.append(frame)
        collector = Collector(request.n)
        for frame in got:
            for event in frame.events:
                collector.feed(event)
        whole = await answer(backend, request)
        assert tuple(token for frame in got for token in frame.tokens) == whole.tokens
        assert collector.result().choices[0].text == whole.choice.text

    async def test_what_a_sink_raises_ends_its_own_request(self, backend: Backend) -> None:
        reached = False

        def sink(frame: Frame) -> bool:
            nonlocal reached
            reached = True
            raise ZeroDivisionError

        try:
            async for _ in backend.generate(self.request(), sink):
                pass
        except ZeroDivisionError:
            assert reached
        else:
            assert not reached
        assert len((await answer(backend, self.request())).tokens) == 12

    @pytest.mark.parametrize("max_tokens", [1, 5])
    async def test_max_tokens(self, backend: Backend, max_tokens: int) -> None:
        got = await answer(backend, self.request(max_tokens))
        assert len(got.tokens) == got.completion.usage.completion_tokens == max_tokens
        assert got.choice.reason == "length"
        assert got.choice.stop_sequence is None

    @pytest.mark.parametrize("prompt", [chat("Hi"), TextPrompt("Once upon a time"), chat("ü 日本 👩‍👩‍👧\n\ttab")])
    async def test_count_tokens(self, backend: Backend, prompt: Prompt) -> None:
        request = self.request(1, prompt=prompt)
        counted = await backend.count_tokens(request)
        assert counted > 0
        assert (await answer(backend, request)).completion.usage.prompt_tokens == counted

    async def test_a_string_and_one_text_part_are_the_same_prompt(self, backend: Backend) -> None:
        one = ChatPrompt((Message("user", (TextPart("Tell me "), TextPart("a story."))),))
        two = chat("Tell me a story.")
        counts = [await backend.count_tokens(self.request(prompt=prompt)) for prompt in (one, two)]
        assert counts[0] == counts[1]

    # --- stop strings ------------------------------------------------------------

    async def test_stop_string(self, backend: Backend) -> None:
        whole = await answer(backend, self.request())
        text = whole.choice.text
        # Across a token border: the last character of one delta and the first of the next.
        deltas = [e.text for f in whole.frames for e in f.events if isinstance(e, TextDelta)]
        at = sum(map(len, deltas[: len(deltas) // 2])) - 1
        stop = text[at : at + 2]
        got = await answer(backend, self.request(stop=("never said", stop)))
        assert got.choice.text == text[: text.index(stop)]
        assert (got.choice.reason, got.choice.stop_sequence) == ("stop", stop)
        assert got.completion.usage.completion_tokens == len(got.tokens) <= len(whole.tokens)

    async def test_text_held_back_for_a_stop_string_is_not_lost(self, backend: Backend) -> None:
        whole = await answer(backend, self.request())
        stop = whole.choice.text[-2:] + "\x01"
        got = await answer(backend, self.request(stop=(stop,)))
        assert got.choice.text == whole.choice.text
        assert (got.choice.reason, got.choice.stop_sequence) == ("length", None)

    # --- determinism ------------------------------------------------------------

    async def test_greedy_repeats(self, backend: Backend) -> None:
        await answer(backend, self.request())  # the others find the same prefix cached
        first, second = [await answer(backend, self.request()) for _ in range(2)]
        assert first.tokens == second.tokens
        assert first.choice.text == second.choice.text

    async def test_a_seed_repeats(self, backend: Backend) -> None:
        request = self.request(sampling=Sampling(temperature=1.5, seed=42))
        await answer(backend, request)
        first, second = [await answer(backend, request) for _ in range(2)]
        assert first.tokens == second.tokens
        other = await answer(backend, self.request(sampling=Sampling(temperature=1.5, seed=43)))
        assert other.tokens != first.tokens

    @pytest.mark.parametrize("k", [1, 5, 11])
    async def test_resume_continues(self, backend: Backend, k: int) -> None:
        """What the first `k` tokens set free, and what a resumed request sends, is the undisturbed answer."""
        await answer(backend, self.request())
        whole = await answer(backend, self.request())
        seen: list[int] = []
        delivered = ""
        for frame in whole.frames:
            if len(seen) >= k:
                break
            seen += frame.tokens
            delivered += "".join(event.text for event in frame.events if isinstance(event, TextDelta))
        rest = await answer(backend, self.request(resume=tuple(seen)))
        assert tuple(seen) + rest.tokens == whole.tokens
        assert delivered + rest.choice.text == whole.choice.text
        assert rest.choice.reason == whole.choice.reason
        # One answer to the client: the budget and the usage count what was generated before.
        usage, expected = rest.completion.usage, whole.completion.usage
        assert usage.prompt_tokens == expected.prompt_tokens
        assert usage.completion_tokens == expected.completion_tokens

    @pytest.mark.parametrize("k", [0, 5])
    async def test_one_of_several_choices_continues(self, backend: Backend, k: int) -> None:
        """Asked for on its own, it is the choice that it would have been among the others."""
        several = self.request(n=3, sampling=Sampling(temperature=1.5, seed=42))
        await answer(backend, several)
        whole = [
            token for frame in (await answer(backend, several)).frames if frame.choice == 2 for token in frame.tokens
        ]
        alone = msgspec.structs.replace(several, n=1, choice=2, resume=tuple(whole[:k]))
        frames = [frame async for frame in backend.generate(alone)]
        rest = [token for frame in frames for token in frame.tokens]
        assert rest == whole[k:] if self.same_beside_others else len(rest) == len(whole[k:])
        assert {frame.choice for frame in frames} == {2}
        events = [event for frame in frames for event in frame.events]
        assert {event.choice for event in events} == {2}
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)

    async def test_resume_of_a_complete_answer_only_ends_it(self, backend: Backend) -> None:
        whole = await answer(backend, self.request())
        rest = await answer(backend, self.request(resume=whole.tokens))
        assert rest.tokens == ()
        assert rest.choice.text == ""
        assert rest.choice.reason == "length"

    # --- many at once ------------------------------------------------------------

    async def test_more_requests_than_slots_all_finish(self, backend: Backend) -> None:
        count = backend.stats().slots + 2
        before = backend.stats()
        answers = await asyncio.gather(*(answer(backend, self.request(4)) for _ in range(count)))
        assert all(len(got.tokens) == 4 for got in answers)
        after = backend.stats()
        assert after.generated_tokens_total - before.generated_tokens_total == 4 * count
        self.check_monotonic(before, after)

    async def test_stats_count_running_and_waiting(self, backend: Backend) -> None:
        slots = backend.stats().slots
        streams = [backend.generate(self.long_request()) for _ in range(slots)]
        for stream in streams:
            await anext(stream)
        queued = asyncio.create_task(answer(backend, self.request(1)))
        await until(backend, running=slots, waiting=1)
        stats = backend.stats()
        assert stats.queued_prompt_tokens == await backend.count_tokens(self.request(1))
        assert 0 <= stats.kv_tokens_used <= stats.kv_tokens_capacity
        assert not queued.done()
        for stream in streams:
            await stream.aclose()
        await asyncio.wait_for(queued, timeout=30)

    @staticmethod
    def check_monotonic(before: BackendStats, after: BackendStats) -> None:
        for name in ("prompt_tokens_total", "cached_tokens_total", "generated_tokens_total", "steps_total"):
            assert getattr(after, name) >= getattr(before, name), name

    # --- cancellation ------------------------------------------------------------

    async def test_close_unstarted(self, backend: Backend) -> None:
        await backend.generate(self.long_request()).aclose()
        await until(backend, running=0)

    async def test_cancel_before_the_first_frame(self, backend: Backend) -> None:
        stream = backend.generate(self.long_request())
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # a backend so fast that the frame was there already
            await stream.aclose()
        await until(backend, running=0)

    async def test_cancel_at_the_first_frame(self, backend: Backend) -> None:
        stream = backend.generate(self.long_request())
        await anext(stream)
        await stream.aclose()
        await until(backend, running=0)

    async def test_cancel_mid_stream(self, backend: Backend) -> None:
        stream = backend.generate(self.long_request())
        tokens = 0
        async for frame in stream:
            tokens += len(frame.tokens)
            if tokens >= 3:
                break
        assert backend.stats().running == 1
        await stream.aclose()
        await until(backend, running=0)
        assert len((await answer(backend, self.request(3))).tokens) == 3

    async def test_cancel_while_waiting(self, backend: Backend) -> None:
        slots = backend.stats().slots
        streams = [backend.generate(self.long_request()) for _ in range(slots)]
        for stream in streams:
            await anext(stream)
        task = asyncio.ensure_future(anext(backend.generate(self.request())))
        await until(backend, running=slots, waiting=1)
        task.cancel()
        await asyncio.wait([task])
        await until(backend, running=slots, waiting=0)
        for stream in streams:
            await stream.aclose()

    # --- limits ------------------------------------------------------------

    async def test_context_overflow(self, backend: Backend) -> None:
        request = self.request(prompt=TextPrompt("word " * (self.context_length + 8)))
        with pytest.raises(ContextOverflow) as caught:
            await anext(backend.generate(request))
        assert caught.value.details == {
            "n_prompt_tokens": await backend.count_tokens(request),
            "n_ctx": self.context_length,
        }
        assert len((await answer(backend, self.request(2))).tokens) == 2, "the next request works"

    async def test_one_requests_error_is_not_anothers(self, backend: Backend) -> None:
        overflow = self.request(prompt=TextPrompt("word " * (self.context_length + 8)))
        good, bad = await asyncio.gather(
            answer(backend, self.request(8)), answer(backend, overflow), return_exceptions=True
        )
        assert isinstance(bad, ContextOverflow)
        assert isinstance(good, Answer)
        assert len(good.tokens) == 8

    async def test_max_tokens_is_clamped_to_the_room_left(self, backend: Backend) -> None:
        words = self.context_length - 4
        request = self.request(10**6, prompt=TextPrompt("word " * words))
        while await backend.count_tokens(request) > self.context_length - 4:
            words -= 1
            request = self.request(10**6, prompt=TextPrompt("word " * words))
        got = await answer(backend, request)
        usage = got.completion.usage
        assert got.choice.reason == "length"
        assert 1 <= usage.completion_tokens == len(got.tokens)
        assert usage.prompt_tokens + usage.completion_tokens <= self.context_length

    # --- the end ------------------------------------------------------------

    async def test_health(self, backend: Backend) -> None:
        await backend.check_health()

    async def test_aclose_ends_running_requests(self) -> None:
        backend = await self.create()
        await backend.start()
        streams = [backend.generate(self.long_request()) for _ in range(backend.stats().slots)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.ensure_future(anext(backend.generate(self.long_request())))
        await until(backend, running=len(streams), waiting=1)
        await backend.aclose()
        for stream in streams:
            with pytest.raises(Unavailable):
                async for _ in stream:
                    pass
        with pytest.raises(Unavailable):
            await waiting
