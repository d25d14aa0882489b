"""The budget of the thinking, and where a grammar begins behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.thinking import Thinking, ThinkingSpec, thinking_spec
from backends.output.reasoning import reasoning_format
from backends.output.selection import OutputFormats, parser_for
from protocols.request import (
    ChatPrompt,
    GbnfConstraint,
    GrammarTrigger,
    JsonSchemaConstraint,
    Message,
    Reasoning,
    Request,
    Sampling,
    TextPart,
    TokenBias,
    Tool,
    ToolChoice,
)
from tests.backends.contract import Answer, answer, chat
from tests.backends.llamacpp.helpers import greedy

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model

PIECES: dict[int, bytes] = {1000: b"</think>\n\n{", 1001: b"</think>\n\n", 1002: b"\n\n", 1003: b"k>!"}
CLOSE = tuple(b"</think>")


def model(end_tokens: frozenset[int] = frozenset()) -> Model:
    """Each byte is a token."""

    def tokenize(text: str, *, add_special: bool, parse_special: bool) -> Any:
        return SimpleNamespace(tolist=lambda: list(text.encode()))

    def piece(token: int) -> bytes:
        return PIECES.get(token) or bytes([token])

    return cast("Model", SimpleNamespace(tokenize=tokenize, special_piece=piece, end_tokens=end_tokens))


def thinking(text: str = "", budget: int | None = None, *, open: bool = True) -> Thinking:
    spec = ThinkingSpec(("<think>",), ("</think>",), open, budget, CLOSE)
    return fed(Thinking(model(), spec), text)


def fed(tracker: Thinking, text: str | Sequence[int]) -> Thinking:
    for token in text.encode() if isinstance(text, str) else text:
        tracker.accept(token)
    return tracker


def rest(tracker: Thinking) -> bytes:
    """All tokens that are forced now."""
    tokens = []
    while (token := tracker.forced) is not None:
        tokens.append(token)
        tracker.accept(token)
    return bytes(tokens)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_comes_when_the_budget_is_used_up(budget: int) -> None:
    tracker = thinking(budget=budget)
    for _ in range(budget):
        assert tracker.forced is None
        tracker.accept(ord("x"))
    assert rest(tracker) == b"</think>"
    assert not tracker.inside and fed(tracker, "x" * 99).forced is None


def test_without_a_budget_nothing_is_forced() -> None:
    assert thinking("x" * 9999).forced is None


def test_not_in_the_middle_of_a_character() -> None:
    fox = "🦊".encode()
    tracker = fed(thinking(budget=1), fox[:2])
    assert tracker.forced is None
    assert rest(fed(tracker, fox[2:])) == b"</think>"


def test_not_while_the_model_writes_the_mark_itself() -> None:
    tracker = thinking("x</thi", budget=2)
    assert tracker.forced is None
    assert not fed(tracker, "nk>").inside
    assert rest(thinking("x</thi?", budget=2)) == b"</think>"


def test_only_what_the_answer_begins_with_is_thinking() -> None:
    assert rest(thinking("\n<think>ab", budget=2, open=False)) == b"</think>"
    for text in ("So: <think>ab", "So\n<think>ab", "<thinking>"):
        assert not thinking(text, budget=0, open=False).inside
    assert not thinking("a</think><think>", budget=0).inside


def test_two_line_breaks_may_follow() -> None:
    tracker = thinking("a</think>")
    assert tracker.breaks_line(1002) and tracker.breaks_line(ord("\n")) and not tracker.breaks_line(ord("x"))
    tracker.accept(ord("\n"))
    assert tracker.breaks_line(ord("\n")) and not tracker.breaks_line(1002)
    assert not fed(tracker, "\n").breaks_line(ord("\n"))
    assert not thinking("a").breaks_line(1002)
    assert not fed(thinking(), [1001]).breaks_line(ord("\n")), "they came with the mark"


def test_a_token_that_goes_on_behind_the_end() -> None:
    assert thinking("a").goes_on(1000)
    assert not thinking("a").goes_on(1001)
    assert thinking("a</thin").goes_on(1003)
    assert not thinking("a").goes_on(1003)


def test_what_needs_no_watching_has_none() -> None:
    tail = "<think>\n"
    asked = greedy(ChatPrompt((Message("user", (TextPart("x"),)),)))
    any_text, lazy = (GbnfConstraint("root ::= .*", lazy, (GrammarTrigger("word", "x"),)) for lazy in (False, True))

    def spec(constraint: Any, budget: int | None, tail: str, name: str | None = "think") -> ThinkingSpec | None:
        assert isinstance(asked.prompt, ChatPrompt)
        prompt = msgspec.structs.replace(asked.prompt, reasoning=Reasoning(budget_tokens=budget))
        formats = OutputFormats(None, None if name is None else reasoning_format(name))
        request = msgspec.structs.replace(asked, prompt=prompt, constraint=constraint)
        return thinking_spec(model(), request, parser_for(prompt, formats, tail))

    assert spec(None, None, tail) is spec(any_text, 9, "") is spec(any_text, 9, tail, None) is None
    for found in (spec(None, 9, ""), spec(lazy, None, ""), spec(any_text, None, tail)):
        assert found is not None and found.close == CLOSE
    request = greedy(msgspec.structs.replace(chat("x"), reasoning=Reasoning(budget_tokens=1)))
    parser = parser_for(chat("x"), OutputFormats(None, reasoning_format("think")), tail)
    assert thinking_spec(model(frozenset({ord("k")})), request, parser) is None, "the mark would end the answer"


# --- with a model ------------------------------------------------------------

WEATHER = Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings(model=demo_model, slots=2, context_length=512, reasoning_format="think")
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


def thoughtful(budget: int | None, max_tokens: int = 48, *, tools: tuple[Tool, ...] = (), **fields: Any) -> Request:
    """One whose answer begins in the middle of its thinking."""
    messages = (*chat("What is a fox?").messages, Message("assistant", (TextPart("<think>\nThe user"),)))
    choice = fields.pop("tool_choice", ToolChoice())
    prompt = ChatPrompt(messages, tools, tool_choice=choice, reasoning=Reasoning(budget_tokens=budget), continues=True)
    return greedy(prompt, max_tokens, **fields)


async def close(backend: LlamaCppBackend) -> tuple[int, ...]:
    return tuple(piece.token for piece in await backend.tokenize("</think>"))


async def tokens_of(backend: LlamaCppBackend, request: Request) -> tuple[int, ...]:
    return tuple([token async for frame in backend.generate(request) for token in frame.tokens])


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
class TestWithModel:
    @pytest.mark.parametrize("budget", [0, 1, 12])
    async def test_thinking_ends_and_the_answer_follows(self, backend: LlamaCppBackend, budget: int) -> None:
        free = await answer(backend, thoughtful(None))
        assert free.choice.text == "" and free.choice.reasoning
        bound = await answer(backend, thoughtful(budget))
        end = await close(backend)
        assert bound.tokens[:budget] == free.tokens[:budget]
        assert bound.tokens[budget : budget + len(end)] == end
        assert bound.choice.text
        assert free.choice.reasoning.startswith(bound.choice.reasoning)
        assert len(bound.tokens) == bound.completion.usage.completion_tokens == 48

    async def test_thinking_that_the_model_begins(self, backend: LlamaCppBackend) -> None:
        begun = tuple(piece.token for piece in await backend.tokenize("<think>\nHm"))
        prompt = msgspec.structs.replace(chat("What is a fox?"), reasoning=Reasoning(budget_tokens=9))
        made = await tokens_of(backend, greedy(prompt, 40, resume=begun))
        inside = 9 - len(begun) + 1  # the first token behind <think> counts
        end = await close(backend)
        at = next(i for i in range(len(made)) if made[i : i + len(end)] == end)
        assert at <= 9 and at >= inside

    @pytest.mark.parametrize("speculate", [False, True])
    async def test_resumed_and_guessed_it_is_the_same(self, backend: LlamaCppBackend, speculate: bool) -> None:
        whole = await tokens_of(backend, thoughtful(6, 24))
        for at in (0, 3, 6, 7, 9, 20):
            request = thoughtful(6, 24, resume=whole[:at], speculate=speculate)
            assert await tokens_of(backend, request) == whole[at:]

    async def test_choices_each_have_their_budget(self, backend: LlamaCppBackend) -> None:
        got = await answer(backend, thoughtful(3, 20, n=2))
        assert all(choice.text and choice.reasoning for choice in got.completion.choices)

    async def test_random_numbers_are_the_same_after_a_resume(self, backend: LlamaCppBackend) -> None:
        sampling = Sampling(temperature=1.5, seed=7)
        whole = await tokens_of(backend, thoughtful(4, 24, sampling=sampling))
        assert await tokens_of(backend, thoughtful(4, 24, sampling=sampling, resume=whole[:16])) == whole[16:]

    async def test_a_format_is_for_what_follows_the_thinking(self, backend: LlamaCppBackend) -> None:
        schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
        request = thoughtful(8, 60, constraint=JsonSchemaConstraint(schema), ignore_eos=False)
        got = await answer(backend, request)
        assert set(json.loads(got.choice.text)) == {"legs"}
        assert got.choice.reasoning and got.choice.reason == "stop"
        for at in (4, 9, len(got.tokens) - 2):
            assert await tokens_of(backend, msgspec.structs.replace(request, resume=got.tokens[:at])) == got.tokens[at:]

    async def test_a_call_that_must_be_made_follows_the_thinking(self, backend: LlamaCppBackend) -> None:
        required = ToolChoice("required", parallel=False)
        got = await answer(backend, thoughtful(8, 90, tools=(WEATHER,), tool_choice=required, ignore_eos=False))
        assert [set(json.loads(call.arguments)) for call in got.choice.tool_calls] == [{"city"}]
        assert got.choice.reasoning and (got.choice.text, got.choice.reason) == ("", "tool_calls")

    async def test_an_answer_that_would_end_in_the_thinking_goes_on(self, backend: LlamaCppBackend) -> None:
        (eos,) = [piece.token for piece in await backend.tokenize("<|im_end|>")]
        ending = msgspec.structs.replace(greedy("x").sampling, logit_bias=(TokenBias(eos, 1000.0),))
        fields: dict[str, Any] = {"ignore_eos": False, "sampling": ending}

        def end(constraint: GbnfConstraint | None) -> Request:
            return thoughtful(None, 40, constraint=constraint, **fields)

        got: Answer = await answer(backend, end(GbnfConstraint('root ::= "So."')))
        assert (got.choice.text, got.choice.reasoning, got.choice.reason) == ("So.", "", "stop")
        lazy = GbnfConstraint('root ::= "So ."', lazy=True, triggers=(GrammarTrigger("word", "So "),))
        for constraint in (lazy, None):
            assert (await answer(backend, end(constraint))).tokens == (eos,)
