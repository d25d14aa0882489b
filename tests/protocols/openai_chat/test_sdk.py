"""The official SDK reads what we emit, however the network cuts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from protocols.errors import (
    ContextOverflow,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServingError,
    Unauthorized,
)
from protocols.events import Event
from protocols.openai_chat import CODEC
from protocols.sse import CONTENT_TYPE
from tests.protocols.openai_chat.test_encode import body
from tests.protocols.scripts import COMPLETE, SCRIPTS, STAMP
from tests.protocols.wire import Wire

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
SEEDS = range(4)


def server(script: tuple[Event, ...], seed: int) -> Callable[[httpx2.Request], httpx2.Response]:
    """Decodes what the SDK sends, and answers the script to it, streamed or not."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/chat/completions"
        call = CODEC.decode(request.read(), "r1")
        if not call.stream:
            return httpx2.Response(200, headers={"content-type": "application/json"}, stream=Wire(body(script), seed))
        encoder = CODEC.encoder(call, STAMP)
        raw = b"".join(encoder.keepalive() + encoder.feed(event) for event in script)
        return httpx2.Response(200, headers={"content-type": CONTENT_TYPE}, stream=Wire(raw, seed))

    return handle


_WHERE: Any = {"base_url": "http://test/v1", "api_key": "k", "max_retries": 0}


def client(script: tuple[Event, ...], seed: int) -> openai.OpenAI:
    transport = httpx2.MockTransport(server(script, seed))
    return openai.OpenAI(**_WHERE, http_client=httpx2.Client(transport=transport))


def async_client(script: tuple[Event, ...], seed: int) -> openai.AsyncOpenAI:
    transport = httpx2.MockTransport(server(script, seed))
    return openai.AsyncOpenAI(**_WHERE, http_client=httpx2.AsyncClient(transport=transport))


def check_chunks(script: tuple[Event, ...], parts: list[ChatCompletionChunk]) -> None:
    whole = ChatCompletion.model_validate_json(body(script))
    deltas = [choice.delta for part in parts for choice in part.choices]
    message = whole.choices[0].message
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert parts[-1].usage == whole.usage
    assert [c.finish_reason for part in parts for c in part.choices if c.finish_reason] == [
        whole.choices[0].finish_reason
    ]
    arguments: dict[int, str] = {}
    for fragment in (f for delta in deltas for f in delta.tool_calls or []):
        assert fragment.function is not None
        arguments[fragment.index] = arguments.get(fragment.index, "") + (fragment.function.arguments or "")
    assert list(arguments.values()) == [c.function.arguments for c in message.tool_calls or [] if c.type == "function"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPLETE)
def test_stream(name: str, seed: int) -> None:
    with client(SCRIPTS[name], seed) as sdk:
        stream = sdk.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        check_chunks(SCRIPTS[name], list(stream))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPLETE)
async def test_stream_async(name: str, seed: int) -> None:
    async with async_client(SCRIPTS[name], seed) as sdk:
        stream = await sdk.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        check_chunks(SCRIPTS[name], [part async for part in stream])


def check_body(script: tuple[Event, ...], completion: ChatCompletion) -> None:
    expected = ChatCompletion.model_validate_json(body(script), strict=True)
    expected.model = completion.model
    assert completion.to_dict() == expected.to_dict()
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("name", COMPLETE)
def test_body(name: str) -> None:
    with client(SCRIPTS[name], seed=0) as sdk:
        check_body(SCRIPTS[name], sdk.chat.completions.create(model="m", messages=MESSAGES))


@pytest.mark.parametrize("name", COMPLETE)
async def test_body_async(name: str) -> None:
    async with async_client(SCRIPTS[name], seed=1) as sdk:
        check_body(SCRIPTS[name], await sdk.chat.completions.create(model="m", messages=MESSAGES))


def check_final(script: tuple[Event, ...], final: Any, kinds: Sequence[str]) -> None:
    expected = ChatCompletion.model_validate_json(body(script)).choices[0]
    choice = final.choices[0]
    assert choice.finish_reason == expected.finish_reason
    assert (choice.message.content or "") == (expected.message.content or "")
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] == [
        (c.id, c.function.name, c.function.arguments) for c in expected.message.tool_calls or [] if c.type == "function"
    ]
    assert kinds.count("tool_calls.function.arguments.done") == len(expected.message.tool_calls or [])
    assert ("content.done" in kinds) == bool(expected.message.content)


# The helper parses the answer, and raises on one that was cut: see the last test of it.
_HELPER = [name for name in COMPLETE if name != "length"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", _HELPER)
def test_stream_helper(name: str, seed: int) -> None:
    with client(SCRIPTS[name], seed) as sdk, sdk.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        kinds = [event.type for event in stream]
        check_final(SCRIPTS[name], stream.get_final_completion(), kinds)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", _HELPER)
async def test_stream_helper_async(name: str, seed: int) -> None:
    async with (
        async_client(SCRIPTS[name], seed) as sdk,
        sdk.chat.completions.stream(model="m", messages=MESSAGES) as stream,
    ):
        kinds = [event.type async for event in stream]
        check_final(SCRIPTS[name], await stream.get_final_completion(), kinds)


def test_stream_helper_of_a_cut_answer() -> None:
    with client(SCRIPTS["length"], 0) as sdk, sdk.chat.completions.stream(model="m", messages=MESSAGES) as stream:
        assert [event.type for event in stream][-1] == "content.done"
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()
    assert caught.value.completion.choices[0].message.content == "One two three"


def test_reasoning_and_timings_are_extra_fields() -> None:
    with client(SCRIPTS["reasoning_then_text"], seed=0) as sdk:
        completion = sdk.chat.completions.create(model="m", messages=MESSAGES)
        stream = sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        parts = [part.to_dict() for part in stream]
    assert completion.choices[0].message.to_dict()["reasoning_content"] == "Let me think."
    assert completion.to_dict()["timings"] == parts[-1]["timings"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_stream_raises(seed: int) -> None:
    with client(SCRIPTS["failed_mid_stream"], seed) as sdk:
        seen = []
        with pytest.raises(openai.APIError, match="The replica was lost") as caught:
            for part in sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                seen.append(part.choices[0].delta.content)
    assert seen == ["", "Hello"]
    assert (caught.value.type, caught.value.code, caught.value.param) == ("server_error", "backend_lost", None)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (InvalidRequest("Invalid 'n'", param="n"), openai.BadRequestError),
        (ContextOverflow.of(9, 8), openai.BadRequestError),
        (Unauthorized("Wrong key"), openai.AuthenticationError),
        (ModelNotFound("No model 'x'", param="model"), openai.NotFoundError),
        (Overloaded("Full", retry_after_s=1), openai.RateLimitError),
        (InternalError("secret"), openai.InternalServerError),
    ],
)
def test_errors(error: ServingError, raised: type[openai.APIStatusError]) -> None:
    headers = {"content-type": "application/json"}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(error.status, headers=headers, content=CODEC.error(error))
    )
    with openai.OpenAI(**_WHERE, http_client=httpx2.Client(transport=transport)) as sdk:
        with pytest.raises(raised) as caught:
            sdk.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.param == ("messages" if isinstance(error, ContextOverflow) else error.param)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"] == (
        InternalError.PUBLIC_MESSAGE if isinstance(error, InternalError) else error.message
    )


def test_our_answer_can_be_sent_back() -> None:
    with client(SCRIPTS["tool_call"], seed=0) as sdk:
        message = sdk.chat.completions.create(model="m", messages=MESSAGES).choices[0].message
        history: Any = [*MESSAGES, message, {"role": "tool", "tool_call_id": "call_a", "content": "7"}]
        again = sdk.chat.completions.create(model="m", messages=history)
    assert again.choices[0].message.tool_calls == message.tool_calls
