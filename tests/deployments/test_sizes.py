"""Bodies and answers of a size that nobody should need: they are read and answered like any other."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.middleware import ASGIApp
from deployments.settings import GatewaySettings, SqliteStoreSettings
from protocols.events import Finished, Frame, Started, TextDelta, Usage
from protocols.request import ChatPrompt, Request
from protocols.sink import Sink
from tests.deployments.support import Exchange
from tests.protocols.dialects import Chat, Dialect, Messages, Native, NativeChat, Responses

ROUTES: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/chat/completions": NativeChat(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
every_chat_route = pytest.mark.parametrize("path", ROUTES)
MESSAGES = 10_001
WORDS = 200_000
"""A megabyte of them."""


class Remembering(FakeBackend):
    last: Request

    def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        self.last = request
        return super().generate(request, sink)

    @property
    def prompt(self) -> ChatPrompt:
        prompt = self.last.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt


@pytest.fixture
async def backend() -> AsyncIterator[Remembering]:
    backend = Remembering(FakeSettings(context_length=10_000_000, tokens=3))
    await backend.start()
    yield backend
    await backend.aclose()


@pytest.fixture
def app(backend: Remembering, tmp_path: Any) -> ASGIApp:
    store = SqliteStoreSettings(path=str(tmp_path / "responses"))
    settings = GatewaySettings(response_store=store, max_messages=2 * MESSAGES)
    return build_app(LocalPool({"m": backend}, {"m": 8}), settings, echo_request_id=False)


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> Exchange:
    return await Exchange(app, "POST", path, json.dumps({"model": "m", **body}).encode()).done()


def conversation(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input" if path == "/v1/responses" else "messages": messages}


def turns(count: int, text: str) -> list[dict[str, Any]]:
    """By turns the user's and the assistant's; the last is the user's where `count` is odd."""
    return [{"role": ("user", "assistant")[i % 2], "content": f"{text} {i}"} for i in range(count)]


@every_chat_route
@pytest.mark.parametrize("stream", [False, True])
async def test_ten_thousand_messages(app: ASGIApp, backend: Remembering, path: str, stream: bool) -> None:
    asked = conversation(path, turns(MESSAGES, "Turn"))
    got = await post(app, path, {**asked, "stream": stream, "stream_options": {"include_usage": True}})
    dialect = ROUTES[path]
    answer = dialect.read_stream(got.body) if stream else dialect.read_body(got.body)
    assert answer.usage is not None
    assert answer.usage[0] == 3 * MESSAGES
    said = [message.text for message in backend.prompt.messages]
    assert (said[0], said[5000], said[-1]) == ("Turn 0", "Turn 5000", f"Turn {MESSAGES - 1}")


@every_chat_route
async def test_a_megabyte_in_one_message(app: ASGIApp, backend: Remembering, path: str) -> None:
    text = "wörd " * WORDS
    got = await post(app, path, conversation(path, [{"role": "user", "content": text}]))
    answer = ROUTES[path].read_body(got.body)
    assert answer.usage is not None
    assert answer.usage[0] == WORDS + 1  # the message itself is one
    assert backend.prompt.messages[0].text == text


def tool(path: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    match path:
        case "/v1/messages":
            return {"name": name, "input_schema": schema}
        case "/v1/responses":
            return {"type": "function", "name": name, "parameters": schema}
        case _:
            return {"type": "function", "function": {"name": name, "parameters": schema}}


@every_chat_route
async def test_a_huge_tool_and_a_thousand_small_ones(app: ASGIApp, backend: Remembering, path: str) -> None:
    leaf: dict[str, Any] = {"type": "string", "description": "x" * 200}
    for _ in range(60):
        leaf = {"type": "object", "properties": {"inner": leaf}}
    huge = {
        "type": "object",
        "properties": {"deep": leaf, **{f"p{i}": {"enum": [f"v{j}" for j in range(20)]} for i in range(5000)}},
        "required": [f"p{i}" for i in range(5000)],
    }
    tools = [tool(path, "huge", huge), *(tool(path, f"t{i}", {"type": "object"}) for i in range(1000))]
    got = await post(app, path, {**conversation(path, turns(1, "Hi")), "tools": tools})
    assert got.status == 200, got.json
    assert [offered.name for offered in backend.prompt.tools] == ["huge", *(f"t{i}" for i in range(1000))]
    assert backend.prompt.tools[0].parameters == huge


@every_chat_route
async def test_a_schema_that_nests_too_deep_is_refused_and_no_more(app: ASGIApp, path: str) -> None:
    text = '{"type":"array","items":' * 5000 + '{"type":"string"}' + "}" * 5000
    raw = json.dumps({"model": "m", **conversation(path, turns(1, "Hi")), "tools": [tool(path, "t", {"x": 1})]})
    got = await Exchange(app, "POST", path, raw.replace('{"x": 1}', text).encode()).done()
    assert got.status == 400
    assert got.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*ROUTES, "/completion"])
async def test_a_megabyte_of_answer(app: ASGIApp, backend: Remembering, path: str, stream: bool) -> None:
    text = 'ü"\n\\ ' * 200_000
    pieces = [text[:900_000], text[900_000:]]
    backend.enqueue([Started(3, 0), *map(TextDelta, pieces), Finished("stop", Usage(3, 2))])
    asked = {"prompt": "Hi"} if path == "/completion" else conversation(path, turns(1, "Hi"))
    got = await post(app, path, {**asked, "stream": stream})
    dialect = ROUTES.get(path, Native())
    answer = dialect.read_stream(got.body) if stream else dialect.read_body(got.body)
    assert answer.choices[0].text == text


async def test_two_thousand_prompts(app: ASGIApp) -> None:
    prompts = [f"Prompt {i}" for i in range(2000)]
    got = await post(app, "/completion", {"prompt": prompts})
    assert [(item["index"], item["prompt"]) for item in got.json] == list(enumerate(prompts))
    got = await post(app, "/v1/embeddings", {"input": prompts})
    assert [item["index"] for item in got.json["data"]] == list(range(2000))
    assert got.json["usage"]["prompt_tokens"] == 4000
