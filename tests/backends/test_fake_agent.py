"""The fake that answers as an agent's model does."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from backends.fake import FakeBackend, FakeSettings
from protocols.events import Finished, Frame
from protocols.request import ChatPrompt, Message, Reasoning, Request, TextPart, TextPrompt, Tool, ToolCall, ToolChoice
from tests.backends.contract import answer

AGENT = {
    "text": "It is noon.",
    "reasoning": "I look at the clock.",
    "calls": [{"name": "now", "arguments": {"zone": "UTC"}}, {"name": "date"}],
}
NOW, DATE, OTHER = Tool("now"), Tool("date"), Tool("other")
ASKED = Message("user", (TextPart("What time is it?"),))
CALLED = Message("assistant", tool_calls=(ToolCall("c1", "now", "{}"),))
RESULT = Message("tool", (TextPart("12:00"),), tool_call_id="c1")


async def backend(**agent: Any) -> FakeBackend:
    backend = FakeBackend(FakeSettings.model_validate({"agent": {**AGENT, **agent}}))
    await backend.start()
    return backend


def request(*tools: Tool, messages: tuple[Message, ...] = (ASKED,), **fields: Any) -> Request:
    prompt = {name: fields.pop(name) for name in ("tool_choice", "reasoning") if name in fields}
    return Request("r", "m", ChatPrompt(messages, tools, **prompt), **fields)


async def test_it_calls_what_it_is_offered() -> None:
    got = await answer(await backend(), request(OTHER, NOW))
    assert (got.choice.reasoning, got.choice.text, got.choice.reason) == ("I look at the clock.", "", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in got.choice.tool_calls] == [("now", {"zone": "UTC"})]
    both = await answer(await backend(), request(DATE, NOW))
    assert [call.name for call in both.choice.tool_calls] == ["now", "date"]
    assert 0 < both.completion.usage.reasoning_tokens < both.completion.usage.completion_tokens


async def test_it_calls_one_at_a_time_if_it_must() -> None:
    one = await answer(await backend(), request(DATE, NOW, tool_choice=ToolChoice(parallel=False)))
    assert [call.name for call in one.choice.tool_calls] == ["now"]
    assert one.choice.reason == "tool_calls"


@pytest.mark.parametrize(
    "asked",
    [
        request(),
        request(OTHER),
        request(NOW, tool_choice=ToolChoice("none")),
        request(NOW, messages=(ASKED, CALLED, RESULT)),
        request(NOW, messages=(ASKED, CALLED, RESULT, ASKED)),
    ],
)
async def test_otherwise_it_answers(asked: Request) -> None:
    got = await answer(await backend(), asked)
    assert (got.choice.reasoning, got.choice.text) == ("I look at the clock.", "It is noon.")
    assert (got.choice.reason, got.choice.tool_calls) == ("stop", ())


async def test_without_thinking() -> None:
    off = await answer(await backend(), request(reasoning=Reasoning(enabled=False)))
    assert (off.choice.reasoning, off.choice.text) == ("", "It is noon.")
    never = await answer(await backend(reasoning=""), request(NOW))
    assert (never.choice.reasoning, never.choice.reason) == ("", "tool_calls")
    raw = await answer(await backend(), Request("r", "m", TextPrompt("The time:")))
    assert raw.choice.text == "It is noon."


async def test_limits_and_stop_strings_end_it() -> None:
    short = await answer(await backend(reasoning=""), request(max_tokens=2))
    assert (short.choice.text, short.choice.reason, len(short.tokens)) == ("It is", "length", 2)
    enough = await answer(await backend(reasoning=""), request(max_tokens=3))
    assert (enough.choice.text, enough.choice.reason) == ("It is noon.", "stop")
    stopped = await answer(await backend(reasoning=""), request(stop=(" is",)))
    assert (stopped.choice.text, stopped.choice.stop_sequence) == ("It", " is")
    cut = await answer(await backend(), request(NOW, max_tokens=12))
    assert (cut.choice.reason, cut.choice.tool_calls[0].name) == ("length", "now")


async def test_every_choice_says_the_same() -> None:
    got = await answer(await backend(), request(NOW, n=2))
    one, two = got.completion.choices
    assert one.tool_calls[0].id != two.tool_calls[0].id
    assert (one.tool_calls[0].arguments, one.reasoning) == (two.tool_calls[0].arguments, two.reasoning)


@pytest.mark.parametrize("asked", [request(NOW, DATE), request()])
async def test_another_one_continues_what_it_began(asked: Request) -> None:
    whole = await answer(await backend(), asked)
    for taken in range(1, len(whole.tokens)):
        resumed = msgspec.structs.replace(asked, resume=whole.tokens[:taken])
        _, *rest = [frame async for frame in (await backend()).generate(resumed)]
        assert [untimed(frame) for frame in rest] == [untimed(frame) for frame in whole.frames[taken + 1 :]]


def untimed(frame: Frame) -> tuple[object, ...]:
    events = (msgspec.structs.replace(e, timings=None) if isinstance(e, Finished) else e for e in frame.events)
    return (*events, frame.tokens)


def test_unknown_keys_are_errors() -> None:
    with pytest.raises(ValidationError):
        FakeSettings.model_validate({"agent": {"text": "x", "call": []}})
