"""The official SDK against the HTTP side over the fake engine, with answers that the network cuts anywhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from backends.fake import FakeBackend, FakeFault, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.settings import GatewaySettings
from protocols.events import Event, Finished, Started, TextDelta, Usage
from protocols.request import ChatPrompt, JsonSchemaConstraint, Request, ToolChoice
from protocols.sink import Sink
from tests.protocols.scripts import COMPLETE, LOGPROBS, SCRIPTS, TWO_CHOICES
from tests.protocols.wire import Wire

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SEEDS = range(3)


class CutTransport(httpx2.AsyncBaseTransport):
    def __init__(self, app: Any, seed: int) -> None:
        self._inner = httpx2.ASGITransport(app)
        self._seed = seed

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        raw = await response.aread()
        headers = [(name, value) for name, value in response.headers.items() if name != "content-length"]
        return httpx2.Response(response.status_code, headers=headers, stream=Wire(raw, self._seed))


class RecordingBackend(FakeBackend):
    def __init__(self, settings: FakeSettings) -> None:
        super().__init__(settings)
        self.requests: list[Request] = []

    def generate(self, request: Request, sink: Sink | None = None) -> Any:
        self.requests.append(request)
        return super().generate(request, sink)


@asynccontextmanager
async def serving(
    *scripts: Iterable[Event], seed: int = 0, **settings: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, RecordingBackend]]:
    """An SDK whose first calls are answered by `scripts`, and later ones by the fake itself."""
    backend = RecordingBackend(FakeSettings(**settings))
    await backend.start()
    for script in scripts:
        backend.enqueue(script)
    app = build_app(LocalPool({"m": backend}, {"m": 100}), GatewaySettings(), echo_request_id=True)
    http = httpx2.AsyncClient(transport=CutTransport(app, seed))
    async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", max_retries=0, http_client=http) as sdk:
        yield sdk, backend
    await backend.aclose()


# --- chat ------------------------------------------------------------


async def chat_both(script: Iterable[Event], seed: int, **fields: Any) -> tuple[ChatCompletion, ChatCompletion]:
    """The same script as a body, and as what the SDK's helper makes of the stream."""
    events = tuple(script)
    async with serving(events, events, seed=seed) as (sdk, _):
        whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, **fields)
        options: Any = {"stream_options": {"include_usage": True}}
        async with sdk.chat.completions.stream(model="m", messages=MESSAGES, **options, **fields) as stream:
            async for _ in stream:
                pass
            return whole, await stream.get_final_completion()


def plain(completion: ChatCompletion) -> dict[str, Any]:
    """What a body and a stream have in common: `stream()` adds what it parsed, and leaves out what is empty."""
    value = json.loads(completion.model_dump_json(exclude_none=True))
    for choice in value["choices"]:
        message = choice["message"]
        message.pop("parsed", None)
        message["content"] = message.get("content") or ""
        for index, tool_call in enumerate(message.get("tool_calls", [])):
            tool_call["function"].pop("parsed_arguments", None)
            assert tool_call.pop("index", index) == index
    return {key: value[key] for key in ("choices", "usage", "model", "system_fingerprint")}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in COMPLETE if name != "length"])
async def test_chat_stream_and_body_are_one_answer(name: str, seed: int) -> None:
    whole, streamed = await chat_both(SCRIPTS[name], seed)
    assert plain(whole) == plain(streamed)


@pytest.mark.parametrize("seed", SEEDS)
async def test_chat_logprobs(seed: int) -> None:
    whole, streamed = await chat_both(LOGPROBS, seed, logprobs=True, top_logprobs=2)
    assert plain(whole) == plain(streamed)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(item.bytes or ()) for item in logprobs.content) == "Zürich".encode()
    assert [len(item.top_logprobs) for item in logprobs.content] == [2, 0, 0, 2, 0]


@pytest.mark.parametrize("seed", SEEDS)
async def test_chat_of_several_choices(seed: int) -> None:
    async with serving(TWO_CHOICES, TWO_CHOICES, seed=seed) as (sdk, _):
        whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, n=2)
        texts, ids = ["", ""], []
        async for chunk in await sdk.chat.completions.create(model="m", messages=MESSAGES, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ids += [call.id for call in choice.delta.tool_calls or () if call.id]
    assert texts == [choice.message.content for choice in whole.choices] == ["A", "B"]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") for id in ids)
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls", "length"]


async def test_chat_choices_of_the_fake() -> None:
    async with serving() as (sdk, _):
        whole = await sdk.chat.completions.create(model="m", messages=MESSAGES, n=3, max_tokens=4)
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert whole.usage is not None and whole.usage.completion_tokens == 12


async def test_the_sdks_tools_and_schemas_reach_the_engine() -> None:
    class City(BaseModel):
        name: str

    answer = (Started(3, 0), TextDelta('{"name":"Bern"}'), Finished("stop", Usage(3, 5)))
    async with serving(answer, answer) as (sdk, backend):
        parsed = await sdk.chat.completions.parse(
            model="m",
            messages=MESSAGES,
            response_format=City,
            tools=[openai.pydantic_function_tool(City, name="city")],
            tool_choice={"type": "function", "function": {"name": "city"}},
            parallel_tool_calls=False,
            reasoning_effort="low",
        )
        request = backend.requests[0]
    assert parsed.choices[0].message.parsed == City(name="Bern")
    assert isinstance(request.constraint, JsonSchemaConstraint)
    assert request.constraint.schema["required"] == ["name"]
    assert isinstance(request.prompt, ChatPrompt)
    (tool,) = request.prompt.tools
    assert (tool.name, tool.strict, tool.parameters["required"]) == ("city", True, ["name"])
    assert request.prompt.tool_choice == ToolChoice("required", "city", parallel=False)
    assert request.prompt.reasoning.effort == "low"


async def test_B89_a_chat_stream_that_fails_ends_with_done() -> None:
    async with serving(fail_at=FakeFault(after_tokens=2)) as (sdk, _):
        with pytest.raises(openai.APIError, match="The server had an error"):
            async for _ in await sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                pass
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        raw = await sdk.post("/chat/completions", body=body, cast_to=httpx2.Response)
    assert raw.text.count("data: [DONE]") == 1
    assert raw.text.endswith("data: [DONE]\n\n")


async def test_a_bad_chat_request_is_the_sdks_own_error() -> None:
    async with serving() as (sdk, backend):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(model="m", messages=MESSAGES, tool_choice="required")
    assert caught.value.param == "tool_choice"
    assert not backend.requests


# --- completions ------------------------------------------------------------


async def completions_both(seed: int, *scripts: Iterable[Event], **fields: Any) -> tuple[Completion, list[Completion]]:
    twice = [tuple(script) for script in scripts] * 2
    async with serving(*twice, seed=seed) as (sdk, _):
        whole = await sdk.completions.create(model="m", **fields)
        stream = await sdk.completions.create(model="m", stream=True, stream_options={"include_usage": True}, **fields)
        return whole, [part async for part in stream]


def check_completions(whole: Completion, parts: list[Completion]) -> None:
    assert all(part.usage is None for part in parts[:-1])
    assert parts[-1].usage == whole.usage
    assert {part.id[:5] for part in (whole, *parts)} == {"cmpl-"}
    for choice in whole.choices:
        own = [item for part in parts for item in part.choices if item.index == choice.index]
        assert "".join(item.text for item in own) == choice.text
        assert [item.finish_reason for item in own if item.finish_reason] == [choice.finish_reason]
        assert own[-1].finish_reason
        if choice.logprobs is not None:
            given = [item.logprobs for item in own if item.logprobs is not None]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [x for item in given for x in getattr(item, name)] == getattr(choice.logprobs, name)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPLETE)
async def test_completions(name: str, seed: int) -> None:
    check_completions(*await completions_both(seed, SCRIPTS[name], prompt="Once"))


@pytest.mark.parametrize("seed", SEEDS)
async def test_completions_with_logprobs(seed: int) -> None:
    whole, parts = await completions_both(seed, LOGPROBS, prompt="Once", logprobs=2)
    check_completions(whole, parts)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 1, 1, 2, 6]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("prompt", "choices"), [("Once", 2), (["Once", "Twice", "Thrice"], 6), ([1, 2], 2), ([[1, 2], [3]], 4)]
)
async def test_completions_of_several_prompts(prompt: Any, choices: int, seed: int) -> None:
    whole, parts = await completions_both(seed, prompt=prompt, n=2, max_tokens=5, temperature=0)
    check_completions(whole, parts)
    assert [choice.index for choice in whole.choices] == list(range(choices))
    assert len({choice.text for choice in whole.choices}) == choices
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5 * choices


async def test_prompts_have_their_answers_in_their_places() -> None:
    prompts = ["Once", "Twice"]
    async with serving() as (sdk, _):
        both = await sdk.completions.create(model="m", prompt=prompts, echo=True)
        alone = [await sdk.completions.create(model="m", prompt=prompt, echo=True) for prompt in prompts]
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in alone]
    assert [choice.text[: len(prompt)] for choice, prompt in zip(both.choices, prompts, strict=True)] == prompts


@pytest.mark.parametrize("seed", SEEDS)
async def test_echo_streams(seed: int) -> None:
    whole, parts = await completions_both(seed, prompt=["Once", "Twice"], echo=True, max_tokens=3)
    check_completions(whole, parts)


async def test_one_failed_prompt_fails_the_call() -> None:
    async with serving(fail_at=FakeFault(after_tokens=1, kind="backend_lost", times=1)) as (sdk, backend):
        with pytest.raises(openai.InternalServerError):
            await sdk.completions.create(model="m", prompt=["Once", "Twice"])
        assert backend.stats().running == 0


async def test_a_bad_completion_request_is_the_sdks_own_error() -> None:
    async with serving(context_length=4) as (sdk, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.completions.create(model="m", prompt="Once", best_of=3)
        assert caught.value.param == "best_of"
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.completions.create(model="m", prompt="one two three four five")
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
