"""The fake backend: the contract, and what it promises beyond it."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
import pytest
from pydantic import TypeAdapter, ValidationError

from backends import BackendSettings, create
from backends.base import Backend
from backends.fake import FakeBackend, FakeFault, FakeSettings, written
from backends.fake.tokens import prompt_length
from backends.output.selection import OutputFormats, parser_for
from protocols.calls import EmbeddingRequest, RerankRequest
from protocols.errors import (
    BackendLost,
    ContextOverflow,
    InternalError,
    InvalidRequest,
    NotSupported,
    Overloaded,
    ServingError,
    Unavailable,
)
from protocols.events import Event, Finished, Frame, Started, TextDelta, Usage
from protocols.request import (
    ChatPrompt,
    ImagePart,
    LoraScale,
    Message,
    Request,
    Sampling,
    TextPart,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolChoice,
)
from tests.backends.contract import Answer, BackendContract, answer, chat, until
from tests.protocols.scripts import COMPLETE, FAILING, SCRIPTS


class TestFakeContract(BackendContract):
    context_length = 256
    endless = 200

    @classmethod
    async def create(cls) -> Backend:
        return FakeBackend(FakeSettings(slots=4, context_length=256, inter_token_s=0.002))


class TestOneSlotContract(BackendContract):
    """With a prefill time, and where a token is no word: its text is its number."""

    context_length = 256
    endless = 200

    @classmethod
    async def create(cls) -> Backend:
        return FakeBackend(FakeSettings(slots=1, context_length=256, ttft_s=0.003, inter_token_s=0.002, piece=""))


def request(max_tokens: int | None = None, **fields: object) -> Request:
    return Request("r", "m", chat("one two three"), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


async def started(**settings: object) -> FakeBackend:
    backend = FakeBackend(FakeSettings.model_validate(settings))
    await backend.start()
    return backend


# --- settings ------------------------------------------------------------


def test_settings_come_from_a_config() -> None:
    adapter: TypeAdapter[BackendSettings] = TypeAdapter(BackendSettings)
    settings = adapter.validate_python({"kind": "fake", "slots": 3})
    assert settings == FakeSettings(slots=3)
    assert isinstance(create(settings), FakeBackend)


@pytest.mark.parametrize(
    "wrong", [{"slot": 3}, {"slots": 0}, {"fail_at": {"kind": "no_such"}}, {"fail_at": {"after": 1}}, {"ttft_s": -1}]
)
def test_wrong_settings_are_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FakeSettings.model_validate(wrong)


# --- answers ------------------------------------------------------------


async def test_the_length_of_an_answer() -> None:
    backend = await started(tokens=7, context_length=64)
    default = await answer(backend, request())
    assert (len(default.tokens), default.choice.reason) == (7, "stop")
    asked = await answer(backend, request(20))
    assert (len(asked.tokens), asked.choice.reason) == (20, "length")
    endless = await answer(backend, request(ignore_eos=True))
    assert (endless.completion.usage.prompt_tokens, len(endless.tokens)) == (4, 60)
    assert endless.choice.reason == "length"


@pytest.mark.parametrize(
    ("max_tokens", "resume"), [(None, ()), (1, ()), (2, ()), (20, ()), (20, (1, 2)), (20, (1,) * 19)]
)
async def test_an_answer_is_the_same_whether_its_text_is_looked_at_or_not(
    max_tokens: int | None, resume: tuple[int, ...]
) -> None:
    backend = await started(tokens=7, piece=" \N{GREEK SMALL LETTER ALPHA}")

    async def frames(**fields: object) -> list[tuple[list[str], tuple[int, ...], int]]:
        made = [frame async for frame in backend.generate(request(max_tokens, resume=resume, **fields))]
        return [([getattr(e, "text", type(e).__name__) for e in f.events], f.tokens, f.choice) for f in made]

    assert await frames() == await frames(stop=("nothing that is ever said",)) != []


async def test_an_empty_answer() -> None:
    got = await answer(await started(tokens=0), request())
    assert (got.tokens, got.choice.text, got.choice.reason) == ((), "", "stop")


async def test_text_is_a_function_of_the_token() -> None:
    got = await answer(await started(piece=" w"), request(5))
    assert got.choice.text == "".join(f" w{token}" for token in got.tokens)
    assert len(set(got.tokens)) == 5


async def test_answers_depend_on_prompt_and_seed_only_where_they_should() -> None:
    backend = await started()
    base = (await answer(backend, request(8))).tokens
    assert (await answer(backend, Request("other", "id", chat("one two three"), max_tokens=9))).tokens[:8] == base
    assert (await answer(backend, Request("r", "m", chat("other"), max_tokens=8))).tokens != base
    assert (await answer(backend, request(8, sampling=Sampling(seed=1)))).tokens != base
    assert (await answer(backend, request(8, sampling=Sampling(seed=1, temperature=0.0)))).tokens == base


async def test_prompt_tokens() -> None:
    backend = await started()
    message = Message("user", (TextPart("a b"), ImagePart("data:,")))
    assert await backend.count_tokens(Request("r", "m", ChatPrompt((message, Message("assistant"))))) == 5
    assert await backend.count_tokens(Request("r", "m", TokenPrompt((5, 6, 7)))) == 3


async def test_several_choices() -> None:
    backend = await started()
    frames = [frame async for frame in backend.generate(request(5, n=3))]
    tokens = [tuple(t for f in frames if f.choice == c for t in f.tokens) for c in range(3)]
    assert len(set(tokens)) == 3
    assert all(len(t) == 5 for t in tokens)
    assert sum(isinstance(e, Finished) for f in frames for e in f.events) == 3
    assert backend.stats().running == 0


@pytest.mark.parametrize("k", range(17))
async def test_resume_with_stop_strings(k: int) -> None:
    """Text that was held back when the replica was lost is sent by the next one."""
    backend = await started()
    text = (await answer(backend, request())).choice.text
    stop = (text[30:36], text[10:14] + "never")
    whole = await answer(backend, request(stop=stop))
    assert whole.choice.stop_sequence == stop[0]
    head, tail = whole.frames[: k + 1], whole.frames[k + 1 :]
    tokens = tuple(token for frame in head for token in frame.tokens)
    rest = await answer(backend, request(stop=stop, resume=tokens))
    sent = "".join(e.text for f in head for e in f.events if isinstance(e, TextDelta))
    assert sent + rest.choice.text == whole.choice.text
    assert rest.tokens == tuple(token for frame in tail for token in frame.tokens)
    assert (rest.choice.reason, rest.choice.stop_sequence) == ("stop", stop[0])
    assert rest.completion.usage == whole.completion.usage


# --- scripts ------------------------------------------------------------


@pytest.mark.parametrize("name", COMPLETE)
async def test_a_script_is_answered_exactly(name: str) -> None:
    backend = await started()
    backend.enqueue(SCRIPTS[name])
    frames = [frame async for frame in backend.generate(request())]
    assert tuple(event for frame in frames for event in frame.events) == SCRIPTS[name]
    assert len((await answer(backend, request())).tokens) == 16, "only the next request gets it"


@pytest.mark.parametrize("name", sorted(FAILING))
async def test_a_failing_script_raises(name: str) -> None:
    backend = await started()
    backend.enqueue(SCRIPTS[name])
    seen: list[Event] = []
    with pytest.raises(ServingError):
        async for frame in backend.generate(request()):
            seen += frame.events
    assert tuple(seen) == SCRIPTS[name][:-1]
    assert backend.stats().running == 0


async def test_scripts_of_frames_in_order() -> None:
    backend = await started()
    frames = [Frame((Started(1, 0),)), Frame((), (5,)), Frame((TextDelta("é"), SCRIPTS["empty"][-1]), (6, 7))]
    backend.enqueue(frames)
    backend.enqueue(SCRIPTS["empty"])
    assert [frame async for frame in backend.generate(request())] == frames
    assert len([frame async for frame in backend.generate(request())]) == 2


async def test_what_a_model_would_write_where_no_call_may_be_made() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    backend = await started()
    for choice, text, calls in ((ToolChoice("none"), f"So. {call}", 0), (ToolChoice(), "So.", 1)):
        prompt = ChatPrompt((), (Tool("now"),), tool_choice=choice)
        backend.enqueue(written(["So. ", call], parser_for(prompt, OutputFormats.of("<tool_call>"), "")))
        got = (await answer(backend, msgspec.structs.replace(request(), prompt=prompt))).choice
        assert (got.text, len(got.tool_calls)) == (text, calls)
        assert got.reason == ("tool_calls" if calls else "stop")


async def test_what_a_model_would_write() -> None:
    formats = OutputFormats.of("<tool_call><think>")
    parser = parser_for(ChatPrompt((), (Tool("now"),)), formats, "<think>")
    backend = await started()
    backend.enqueue(
        written(["Hm.", "</think>", '<tool_call>{"name": "now", ', '"arguments": {}}', "</tool_call>"], parser)
    )
    got = await answer(backend, request())
    assert (got.choice.reasoning, got.choice.text, got.choice.reason) == ("Hm.", "", "tool_calls")
    assert [call.name for call in got.choice.tool_calls] == ["now"]
    assert got.tokens == (0, 1, 2, 3, 4)
    assert got.completion.usage == Usage(1, 5, reasoning_tokens=1)


# --- faults ------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_fail_after(after: int) -> None:
    backend = await started(fail_at={"after_tokens": after, "kind": "backend_lost"})
    frames: list[Frame] = []
    with pytest.raises(BackendLost):
        async for frame in backend.generate(request()):
            frames.append(frame)
    assert len(frames) == (after and after + 1), "0 is before the first frame"
    assert sum(len(frame.tokens) for frame in frames) == after
    assert backend.stats().running == 0


async def test_fail_a_number_of_times() -> None:
    backend = await started(fail_at=FakeFault(kind="overloaded", times=2).model_dump())
    for _ in range(2):
        with pytest.raises(Overloaded):
            await answer(backend, request())
    assert len((await answer(backend, request())).tokens) == 16


@pytest.mark.parametrize("after", [0, 3])
async def test_hang(after: int) -> None:
    backend = await started(fail_at={"after_tokens": after, "action": "hang", "times": 1})
    stream = backend.generate(request())
    for _ in range(after and after + 1):
        await anext(stream)
    hung = asyncio.ensure_future(anext(stream))
    assert len((await answer(backend, request())).tokens) == 16, "others go on"
    assert not hung.done()
    assert backend.stats().running == 1
    hung.cancel()
    await asyncio.wait([hung])
    assert backend.stats().running == 0


async def test_a_dead_engine_ends_its_requests_and_is_not_healthy() -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    backend = await started(inter_token_s=0.01)
    other = backend.generate(request(100))
    await anext(other)
    backend.enqueue([Frame((Started(1, 0),)), Frame(None)])  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="the engine failed"):
        await answer(backend, request())
    with pytest.raises(Unavailable, match="the engine failed"):
        async for _ in other:
            pass
    with pytest.raises(Unavailable):
        await backend.check_health()
    assert [type(context["exception"]) for context in reported] == [TypeError]


async def test_not_started_or_closed_is_unavailable() -> None:
    backend = FakeBackend(FakeSettings())
    with pytest.raises(Unavailable):
        await backend.check_health()
    await backend.start()
    await backend.check_health()
    await backend.aclose()
    with pytest.raises(Unavailable):
        await answer(backend, request())


# --- time ------------------------------------------------------------


async def test_time_to_first_token_and_between_tokens() -> None:
    backend = await started(ttft_s=0.2, inter_token_s=0.01)
    begin = time.perf_counter()
    arrived = []
    async for frame in backend.generate(request(6)):
        arrived.append(time.perf_counter() - begin)
        last = frame
    assert arrived[0] < 0.15, "Started does not wait for the prefill"
    assert arrived[1] >= 0.2
    assert arrived[-1] >= 0.2 + 5 * 0.01 - 0.001
    assert isinstance(end := last.events[-1], Finished) and end.timings is not None
    assert end.timings.prompt_ms >= 199
    assert end.timings.predicted_ms >= 49


async def test_one_step_serves_all() -> None:
    backend = await started(inter_token_s=0.005)
    answers = await asyncio.gather(*(answer(backend, request(10)) for _ in range(100)))
    assert all(isinstance(got, Answer) and len(got.tokens) == 10 for got in answers)
    assert backend.stats().steps_total <= 20
    assert backend.stats().generated_tokens_total == 1000


async def test_512_streams_are_cheap() -> None:
    """20 tokens/s each would be 10,240 tokens/s: the engine may use only a small part of a core for that."""
    backend = await started()
    begin = time.process_time()
    answers = await asyncio.gather(*(answer(backend, request(40)) for _ in range(512)))
    per_token = (time.process_time() - begin) / (512 * 40)
    assert len(answers) == 512
    assert per_token < 100e-6, f"{per_token * 1e6:.1f} µs per token"


async def test_a_slow_reader_holds_up_nobody() -> None:
    backend = await started(slots=1)
    slow = backend.generate(request(5))
    await anext(slow)
    await until(backend, running=0)
    assert len((await answer(backend, request(5))).tokens) == 5
    assert len([frame async for frame in slow]) == 5


def test_injected_internal_error_has_a_kind() -> None:
    assert isinstance(FakeFault().error, InternalError)


# --- adapters and slots ------------------------------------------------------------


async def test_adapters_change_the_answer() -> None:
    backend = await started(adapters=["one.gguf", "two.gguf"])
    assert [(a.id, a.path, a.scale) for a in backend.adapters()] == [(0, "one.gguf", 0.0), (1, "two.gguf", 0.0)]
    plain = await answer(backend, request(4))
    asked = await answer(backend, request(4, lora=(LoraScale(1, 0.5),)))
    assert asked.tokens != plain.tokens
    await backend.set_adapters([LoraScale(1, 0.5)])
    assert [a.scale for a in backend.adapters()] == [0.0, 0.5]
    assert (await answer(backend, request(4))).tokens == asked.tokens
    assert (await answer(backend, request(4, lora=()))).tokens == plain.tokens
    with pytest.raises(InvalidRequest, match="no LoRA adapter 2"):
        await answer(backend, request(4, lora=(LoraScale(2, 1.0),)))
    with pytest.raises(InvalidRequest, match="no LoRA adapter 2"):
        await backend.set_adapters([LoraScale(2, 1.0)])


async def test_slots_are_listed_saved_restored_and_erased() -> None:
    backend = await started(slots=2, inter_token_s=0.001)
    await answer(backend, request(6))
    running = backend.generate(request(20, sampling=Sampling(seed=3)))
    await anext(running)
    busy, idle = await backend.slots()
    assert (busy.request, busy.prompt_tokens, busy.max_tokens, busy.sampling) == ("r", 4, 20, Sampling(seed=3))
    assert (idle.request, idle.cached_tokens) == ("", 0)
    saving = asyncio.create_task(backend.save_slot(0, "file"))
    assert [len(frame.tokens) async for frame in running].count(1) == 20
    assert (await saving).tokens == 24, "a busy slot is waited for"
    assert await backend.erase_slot(0) == 24
    assert (await backend.restore_slot(1, "file")).tokens == 24
    assert [state.cached_tokens for state in await backend.slots()] == [0, 24]
    with pytest.raises(InvalidRequest, match="no readable file"):
        await backend.restore_slot(1, "other")
    assert [state.cached_tokens for state in await backend.slots()] == [0, 0]
    for call in (backend.save_slot(2, "x"), backend.restore_slot(-1, "x"), backend.erase_slot(2)):
        with pytest.raises(InvalidRequest, match="no slot"):
            await call
    stream = backend.generate(request(20))
    await anext(stream)
    waiting = asyncio.create_task(backend.erase_slot(0))
    await asyncio.sleep(0)
    await backend.aclose()
    with pytest.raises(Unavailable):
        await waiting


# --- embeddings and rankings -----------------------------------------------


async def test_vectors_are_of_the_text_and_of_length_one() -> None:
    backend = FakeBackend(FakeSettings(embedding_length=5))
    card = await backend.start()
    assert (card.embedding_length, card.tasks) == (5, ("generate", "embed", "rerank"))
    inputs = (TextPrompt("one two"), TokenPrompt((1, 2, 3)), TextPrompt("one two"))
    first, second, again = await backend.embed(EmbeddingRequest("e", "m", inputs))
    assert first == again
    assert first.vectors() != second.vectors()
    assert (first.prompt_tokens, second.prompt_tokens, first.rows) == (2, 3, 1)
    for got in (first, second):
        (vector,) = got.vectors()
        assert len(vector) == 5
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
    assert backend.stats().prompt_tokens_total == 7


async def test_a_score_is_the_share_of_the_query_that_a_document_has() -> None:
    backend = FakeBackend(FakeSettings())
    await backend.start()
    got = await backend.rerank(RerankRequest("r", "m", "red Fox", ("a fox", "the red fox", "bread")))
    assert [(relevance.score, relevance.prompt_tokens) for relevance in got] == [(0.5, 4), (1.0, 5), (0.0, 3)]


async def test_inputs_that_are_missing_or_too_long() -> None:
    backend = FakeBackend(FakeSettings(context_length=4))
    await backend.start()
    with pytest.raises(InvalidRequest):
        await backend.embed(EmbeddingRequest("e", "m", ()))
    with pytest.raises(InvalidRequest):
        await backend.rerank(RerankRequest("r", "m", "a", ()))
    with pytest.raises(ContextOverflow) as caught:
        await backend.embed(EmbeddingRequest("e", "m", (TextPrompt("a"), TextPrompt("a b c d e"))))
    assert (caught.value.param, caught.value.details) == ("input[1]", {"n_prompt_tokens": 5, "n_ctx": 4})
    with pytest.raises(ContextOverflow) as caught:
        await backend.rerank(RerankRequest("r", "m", "a b", ("a b c",)))
    assert caught.value.param == "documents[0]"


async def test_only_the_tasks_it_has() -> None:
    none = FakeBackend(FakeSettings(tasks=()))
    await none.start()
    with pytest.raises(NotSupported):
        await none.embed(EmbeddingRequest("e", "m", (TextPrompt("a"),)))
    with pytest.raises(NotSupported):
        await none.rerank(RerankRequest("r", "m", "a", ("b",)))
    with pytest.raises(NotSupported):
        await anext(none.generate(Request("g", "m", TextPrompt("a"))))


# --- the prefix cache ------------------------------------------------------


async def found(backend: FakeBackend, text: str) -> int:
    """How many tokens of the prompt were found; the answer says the same at its end."""
    frames = [f async for f in backend.generate(Request("g", "m", TextPrompt(text), max_tokens=1))]
    started, finished = frames[0].events[0], frames[-1].events[-1]
    assert isinstance(started, Started) and isinstance(finished, Finished)
    assert finished.timings is not None
    assert started.cached_tokens == finished.usage.cached_tokens == finished.timings.cache_n
    assert finished.timings.prompt_n == started.prompt_tokens - started.cached_tokens
    return started.cached_tokens


async def test_a_slot_keeps_its_last_prompt() -> None:
    backend = await started(slots=2, prefix_cache=True)
    assert [await found(backend, text) for text in ("a b c", "x y", "a b c d", "x y z", "a q")] == [0, 0, 3, 2, 1]
    assert await found(backend, "a q") == 1, "something is always left to compute"
    assert await found(backend, "n n") == 0
    assert await found(backend, "x y z") == 0, "the slot that was used longest ago was taken"
    assert backend.stats().cached_tokens_total == 7


async def test_without_a_prefix_cache_nothing_is_found() -> None:
    backend = await started(slots=2)
    assert [await found(backend, text) for text in ("a b c", "a b c")] == [0, 0]


@pytest.mark.parametrize("text", ["", " ", "a", " a  b\t\nc ", "a\x1cb\x0bc\x85d", "ä\u2003b c", "one two"])
def test_a_token_is_a_word(text: str) -> None:
    assert prompt_length(TextPrompt(text)) == (len(text.split()) or 1)
