"""An answer that goes on where the client has begun it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, Message, Reasoning, TextPart, TextPrompt, Tool, ToolCall, ToolChoice
from tests.backends.contract import answer, chat
from tests.backends.llamacpp.helpers import greedy

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

WEATHER = Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})

AUTO = ToolChoice()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings(model=demo_model, slots=1, context_length=768, reasoning_format="think")
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


def begun(text: str, *tools: Tool, choice: ToolChoice = AUTO) -> ChatPrompt:
    messages = (*chat("What is the capital of France?").messages, Message("assistant", (TextPart(text),)))
    return ChatPrompt(messages, tools, tool_choice=choice, continues=True)


@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["", "tools"])
async def test_the_prompt_ends_in_the_answer_which_goes_on(backend: LlamaCppBackend, tools: tuple[Tool, ...]) -> None:
    prompt = begun("The capital of France is", *tools)
    rendered = await backend.apply_template(prompt)
    assert rendered.endswith("<|im_start|>assistant\nThe capital of France is")
    assert ("get_weather" in rendered) == bool(tools)
    got = await answer(backend, greedy(prompt, 6))
    assert got.choice.text.startswith(" Paris"), "only what is new"
    plain = await answer(backend, greedy(TextPrompt(rendered), 6))
    assert got.tokens == plain.tokens
    assert got.completion.usage.prompt_tokens == await backend.count_tokens(greedy(prompt))


async def test_parts_are_continued_like_a_string(backend: LlamaCppBackend) -> None:
    whole = begun("The capital of France is")
    *before, last = whole.messages
    parts = msgspec.structs.replace(last, content=(TextPart("The capital"), TextPart(" of France is")))
    split = msgspec.structs.replace(whole, messages=(*before, parts))
    assert await backend.apply_template(split) == await backend.apply_template(whole)


async def test_a_beginning_without_text_is_none(backend: LlamaCppBackend) -> None:
    assert (await backend.apply_template(begun(""))).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["", "tools"])
async def test_thinking_goes_on_and_what_follows_is_text(backend: LlamaCppBackend, tools: tuple[Tool, ...]) -> None:
    prompt = msgspec.structs.replace(begun("<think>\nThe user asks", *tools), reasoning=Reasoning(budget_tokens=5))
    assert (await backend.apply_template(prompt)).endswith("<think>\nThe user asks")
    got = await answer(backend, greedy(prompt, 40))
    assert got.choice.reasoning and got.choice.text
    over = await answer(backend, greedy(begun("<think>\nParis.\n</think>\n\nIt is", *tools), 6))
    assert (over.choice.reasoning, bool(over.choice.text)) == ("", True)


async def test_a_call_follows_what_was_begun(backend: LlamaCppBackend) -> None:
    prompt = begun("I look.\n", WEATHER, choice=ToolChoice("required", parallel=False))
    got = (await answer(backend, greedy(prompt, 100, ignore_eos=False))).choice
    assert (got.text, got.reason) == ("", "tool_calls")
    assert [set(json.loads(call.arguments)) for call in got.tool_calls] == [{"city"}]


async def test_what_cannot_be_continued(backend: LlamaCppBackend) -> None:
    user = chat("Hi").messages
    calling = Message("assistant", tool_calls=(ToolCall("c", "get_weather", "{}"),))
    for messages in (user, (*user, calling)):
        with pytest.raises(InvalidRequest, match="continued"):
            await backend.apply_template(ChatPrompt(messages, continues=True))
    with pytest.raises(InvalidRequest, match="cannot continue reasoning"):
        await backend.apply_template(ChatPrompt((*user, Message("assistant", reasoning="Hm")), continues=True))
