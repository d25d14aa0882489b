"""Thinking and tool calls on a real model, which a grammar makes write them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from protocols.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta
from protocols.request import (
    ChatPrompt,
    Extras,
    GbnfConstraint,
    LogprobOptions,
    Message,
    Request,
    TextPart,
    Tool,
    ToolChoice,
)
from tests.backends.contract import answer
from tests.backends.llamacpp.helpers import greedy

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

TOOL = Tool("get_weather", "", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\\n{\\"name\\": \\"get_weather\\", \\"arguments\\": {\\"city\\": \\"Par🦊is\\"}}\\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings(
        model=demo_model, slots=2, context_length=512, tool_format="hermes", reasoning_format="think"
    )
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


def request(text: str, max_tokens: int = 200, **fields: object) -> Request:
    """One whose answer is exactly `text`."""
    prompt = ChatPrompt((Message("user", (TextPart("The weather in Paris?"),)),), (TOOL,))
    values: dict[str, object] = {"ignore_eos": False, "constraint": GbnfConstraint(f'root ::= "{text}"')} | fields
    return greedy(prompt, max_tokens, **values)


async def test_thinking_text_and_calls(backend: LlamaCppBackend) -> None:
    got = await answer(backend, request(f"<think>\\nHm.\\n</think>\\n\\nI look.\\n{CALL}\\n{CALL}"))
    assert (got.choice.reasoning, got.choice.text, got.choice.reason) == ("Hm.", "I look.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in got.choice.tool_calls] == [
        ("get_weather", {"city": "Par🦊is"})
    ] * 2
    usage = got.completion.usage
    assert 1 < usage.reasoning_tokens < usage.completion_tokens


async def test_timings_come_with_every_delta(backend: LlamaCppBackend) -> None:
    timed = request(f"<think>Hm.</think>I look.\\n{CALL}", extras=Extras(timings=True))
    deltas = [
        event
        async for frame in backend.generate(timed)
        for event in frame.events
        if isinstance(event, ReasoningDelta | TextDelta | ToolCallDelta)
    ]
    assert {type(event) for event in deltas} == {ReasoningDelta, TextDelta, ToolCallDelta}
    told = [event.timings.predicted_n for event in deltas if event.timings is not None]
    assert len(told) == len(deltas) and told == sorted(told)


async def test_B67_thinking_is_part_of_the_budget(backend: LlamaCppBackend) -> None:
    got = await answer(backend, request("<think>\\nHm, and hm again, and hm.\\n</think>\\n\\nYes.", max_tokens=8))
    assert got.choice.reasoning.startswith("Hm") and (got.choice.text, got.choice.reason) == ("", "length")
    assert 0 < got.completion.usage.reasoning_tokens <= got.completion.usage.completion_tokens == 8


async def test_one_call_ends_the_answer(backend: LlamaCppBackend) -> None:
    whole = request(f"{CALL}{CALL}")
    assert isinstance(whole.prompt, ChatPrompt)
    one = msgspec.structs.replace(whole.prompt, tool_choice=ToolChoice(parallel=False))
    got = await answer(backend, msgspec.structs.replace(whole, prompt=one))
    assert (len(got.choice.tool_calls), got.choice.reason) == (1, "tool_calls")
    assert len(got.tokens) < len((await answer(backend, whole)).tokens)


async def test_B40_the_budget_ends_inside_a_call(backend: LlamaCppBackend) -> None:
    whole = (await answer(backend, request(CALL))).choice.tool_calls[0]
    seen = set()
    for budget in range(1, 40):
        got = (await answer(backend, request(CALL, max_tokens=budget))).choice
        if got.reason == "tool_calls":
            break
        assert got.reason == "length"
        for call in got.tool_calls:
            written = call.arguments.removesuffix("\ufffd")  # half a fox
            seen.add((call.id, call.name, whole.arguments.startswith(written)))
    assert seen == {(whole.id, "get_weather", True)}


async def test_a_resumed_call_goes_on(backend: LlamaCppBackend) -> None:
    whole = await answer(backend, request(f"So.\\n{CALL}"))
    delivered = [event for frame in whole.frames[:20] for event in frame.events]
    tokens = whole.tokens[: sum(len(frame.tokens) for frame in whole.frames[:20])]
    rest = [
        event async for frame in backend.generate(request(f"So.\\n{CALL}", resume=tokens)) for event in frame.events
    ]
    arguments = "".join(getattr(event, "arguments", "") for event in [*delivered, *rest])
    assert arguments == whole.choice.tool_calls[0].arguments
    last = rest[-1]
    assert isinstance(last, Finished) and last.reason == "tool_calls"


async def test_probabilities_are_those_of_the_text(backend: LlamaCppBackend) -> None:
    got = await answer(backend, request(f"<think>Hm.</think>I look.\\n{CALL}", logprobs=LogprobOptions(0)))
    shown = b"".join(one.data for one in got.choice.logprobs)
    assert shown.decode().strip() == got.choice.text == "I look."


async def test_without_tools_a_call_is_text(backend: LlamaCppBackend) -> None:
    whole = request(CALL)
    assert isinstance(whole.prompt, ChatPrompt)
    got = await answer(backend, msgspec.structs.replace(whole, prompt=msgspec.structs.replace(whole.prompt, tools=())))
    assert got.choice.text.startswith("<tool_call>\n{")
    assert (got.choice.tool_calls, got.choice.reason) == ((), "stop")
