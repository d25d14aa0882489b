"""The official SDKs, fed any legal stream cut anywhere, build up what the body of that answer says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.events import Event, Finished
from protocols.sse import CONTENT_TYPE
from tests.protocols.dialects import Chat, Dialect, Messages, Responses
from tests.protocols.scripts import legal_scripts
from tests.protocols.wire import Wire

few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 10**6)
HI: Any = [{"role": "user", "content": "Hi"}]
CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()


def http(dialect: Dialect, script: tuple[Event, ...], seed: int, n: int = 1) -> httpx2.Client:
    raw = dialect.stream(script, n)

    def handle(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": CONTENT_TYPE}, stream=Wire(raw, seed))

    return httpx2.Client(transport=httpx2.MockTransport(handle))


def body(dialect: Dialect, script: tuple[Event, ...], n: int = 1) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(dialect.body(script, n))
    return whole


def openai_sdk(client: httpx2.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://test/v1", api_key="k", max_retries=0, http_client=client)


@few
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), legal_scripts(n, logprobs=True))), seeds)
def test_chat(case: tuple[int, tuple[Event, ...]], seed: int) -> None:
    n, script = case
    with openai_sdk(http(CHAT, script, seed, n)) as sdk:
        with sdk.chat.completions.stream(model="m", messages=HI, n=n) as stream:
            for _ in stream:
                pass
            built = stream.current_completion_snapshot
    whole = body(CHAT, script, n)
    assert built.usage is not None
    assert built.usage.to_dict() == whole["usage"]
    for choice, expected in zip(sorted(built.choices, key=lambda c: c.index), whole["choices"], strict=True):
        message = expected["message"]
        assert choice.finish_reason == expected["finish_reason"]
        assert (choice.message.content or "") == (message["content"] or "")
        assert getattr(choice.message, "reasoning_content", "") == message.get("reasoning_content", "")
        assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        logprobs = [] if choice.logprobs is None else [item.to_dict() for item in choice.logprobs.content or ()]
        assert logprobs == expected["logprobs"]["content"]


@few
@given(legal_scripts(logprobs=True), seeds)
def test_responses(script: tuple[Event, ...], seed: int) -> None:
    if isinstance(script[-1], Finished) and script[-1].reason == "length":
        return  # the helper has no answer where the response is incomplete
    with openai_sdk(http(RESPONSES, script, seed)) as sdk, sdk.responses.stream(model="m", input="Hi") as stream:
        built = stream.get_final_response()
    whole = body(RESPONSES, script)
    texts = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    assert built.output_text == "".join(texts)
    assert built.usage is not None
    assert built.usage.to_dict() == whole["usage"]
    assert [(item.call_id, item.name, item.arguments) for item in built.output if item.type == "function_call"] == [
        (item["call_id"], item["name"], item["arguments"])
        for item in whole["output"]
        if item["type"] == "function_call"
    ]


@few
@given(legal_scripts(), seeds)
def test_messages(script: tuple[Event, ...], seed: int) -> None:
    make: Callable[..., Any] = anthropic.Anthropic
    with (
        make(base_url="http://test", api_key="k", max_retries=0, http_client=http(MESSAGES, script, seed)) as sdk,
        sdk.messages.stream(model="m", max_tokens=100, messages=HI) as stream,
    ):
        built = MESSAGES.read_body(stream.get_final_message().to_json().encode())
    assert built == MESSAGES.read_body(MESSAGES.body(script))
