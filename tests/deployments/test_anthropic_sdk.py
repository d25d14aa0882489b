"""The official SDK, over the HTTP side and the fake backend, reads what it is sent however the network cuts it.

Of whichever version is imported: `test_anthropic_old_sdk.py` runs this file again with one from before 1.0.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.middleware import ASGIApp
from deployments.settings import GatewaySettings
from protocols.events import Event
from tests.deployments.support import Exchange
from tests.protocols.scripts import COMPLETE, SCRIPTS

anthropic: Any = pytest.importorskip("anthropic")
BEFORE_1 = anthropic.__version__.startswith("0.")
httpx: Any = importlib.import_module("httpx" if BEFORE_1 else "httpx2")

SEEDS = range(3)
HI: Any = [{"role": "user", "content": "Hi"}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
TOOL: Any = {"name": "get_weather", "description": "", "input_schema": {"type": "object", "properties": {}}}
ASKED: Any = {"model": "m", "max_tokens": 4096, "messages": HI, "thinking": THINKING}


@asynccontextmanager
async def serving(*scripts: Sequence[Event], **settings: Any) -> AsyncIterator[ASGIApp]:
    """Two models; `m` answers the scripts, one after another."""
    backend = FakeBackend(FakeSettings(**settings))
    await backend.start()
    for script in scripts:
        backend.enqueue(script)
    yield build_app(
        LocalPool({"m": backend, "n": backend}, {"m": 10, "n": 10}), GatewaySettings(), echo_request_id=True
    )
    await backend.aclose()


@asynccontextmanager
async def client(*scripts: Sequence[Event], seed: int = 0, **settings: Any) -> AsyncIterator[Any]:
    rng = random.Random(seed)
    longest = rng.choice((1, 3, 40, 10_000))

    async def pieces(raw: bytes) -> AsyncIterator[bytes]:
        while raw:
            size = rng.randint(1, longest)
            yield raw[:size]
            raw = raw[size:]

    async with serving(*scripts, **settings) as app:

        async def handle(request: Any) -> Any:
            headers = [(name.lower(), value) for name, value in request.headers.raw]
            path = request.url.raw_path.decode()
            exchange = await Exchange(app, request.method, path, await request.aread(), headers).done()
            return httpx.Response(exchange.status, headers=exchange.headers, content=pieces(exchange.body))

        http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        async with anthropic.AsyncAnthropic(
            base_url="http://test", api_key="k", max_retries=0, http_client=http
        ) as sdk:  # fmt: skip
            yield sdk


def blocks(message: Any) -> list[tuple[Any, ...]]:
    return [
        (block.type, *(getattr(block, name, None) for name in ("text", "thinking", "id", "name", "input")))
        for block in message.content
    ]


def usage(message: Any) -> dict[str, Any]:
    counts = {name: value for name, value in message.usage.to_dict().items() if value is not None}
    if BEFORE_1:
        counts.pop("output_tokens_details", None)  # it keeps these of a body, and drops them of a stream
    return counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPLETE)
async def test_a_stream_builds_up_the_whole_answer(name: str, seed: int) -> None:
    async with client(SCRIPTS[name], SCRIPTS[name], seed=seed) as sdk:
        whole = await sdk.messages.create(**ASKED)
        async with sdk.messages.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert blocks(final) == blocks(whole)
    assert usage(final) == usage(whole)
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.id.startswith("msg_")
    assert (final.role, final.type, final.model) == ("assistant", "message", "m")
    assert all(block.signature for block in final.content if block.type == "thinking")
    assert all(block.id.startswith("toolu_") for block in final.content if block.type == "tool_use")


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_text_alone(seed: int) -> None:
    async with client(SCRIPTS["unicode"], SCRIPTS["unicode"], seed=seed) as sdk:
        whole = await sdk.messages.create(**ASKED)
        async with sdk.messages.stream(**ASKED) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole.content[0].text


async def test_raw_events_are_what_the_sdk_has_types_for() -> None:
    async with client(SCRIPTS["two_tool_calls"]) as sdk:
        events = [event async for event in await sdk.messages.create(**ASKED, stream=True)]
    assert [(event.type, getattr(event, "index", None)) for event in events] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]


async def test_B05_B06_usage_is_told_at_both_ends() -> None:
    async with client(SCRIPTS["reasoning_then_text"]) as sdk:
        events = [event async for event in await sdk.messages.create(**ASKED, stream=True)]
    start, end = events[0].message.usage, events[-2].usage
    assert (start.input_tokens, start.cache_read_input_tokens, start.cache_creation_input_tokens) == (8, 2, 0)
    assert (end.input_tokens, end.cache_read_input_tokens, end.output_tokens) == (8, 2, 5)


async def test_an_answer_can_be_sent_back_with_the_tools_result() -> None:
    async with client(SCRIPTS["tool_call"]) as sdk:
        async with sdk.messages.stream(**ASKED, tools=[TOOL]) as stream:
            said = await stream.get_final_message()
        assert said.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "7"}
        history = [*HI, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        again = await sdk.messages.create(**{**ASKED, "max_tokens": 2, "messages": history}, tools=[TOOL])
    assert (again.stop_reason, again.usage.output_tokens) == ("max_tokens", 2)


async def test_B20_tokens_are_counted_as_they_will_be_reported() -> None:
    asked = {"model": "m", "system": [{"type": "text", "text": "Be brief."}], "messages": HI, "tools": [TOOL]}
    async with client() as sdk:
        counted = await sdk.messages.count_tokens(**asked)
        said = await sdk.messages.create(**asked, max_tokens=1)
    assert counted.input_tokens == said.usage.input_tokens + said.usage.cache_read_input_tokens == 5


async def test_B11_a_stop_sequence_is_named() -> None:
    async with client() as sdk:
        first = await sdk.messages.create(**ASKED | {"max_tokens": 3})
        second = first.content[0].text.split()[1]
        said = await sdk.messages.create(**ASKED | {"max_tokens": 3}, stop_sequences=[second])
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", second)
    assert second not in said.content[0].text


async def test_B86_models_are_found() -> None:
    async with client() as sdk:
        everything = await sdk.models.list()
        paged = [model.id async for model in sdk.models.list(limit=1)]
        one = await sdk.models.retrieve("n")
    assert [model.id for model in everything.data] == paged == ["m", "n"]
    assert (everything.first_id, everything.last_id, everything.has_more) == ("m", "n", False)
    assert (one.id, one.type, one.display_name, one.created_at.year > 2000) == ("n", "model", "n", True)


# --- what goes wrong ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "raised", "type_", "words"),
    [
        ({"max_tokens": 0}, "BadRequestError", "invalid_request_error", "'max_tokens': expected at least 1"),
        ({"model": "x"}, "NotFoundError", "not_found_error", "The model 'x' does not exist."),
        (
            {"messages": [{"role": "user", "content": "word " * 100}]},
            "BadRequestError",
            "invalid_request_error",
            "prompt is too long: 101 tokens > 50 maximum",
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_B78_B79_errors(stream: bool, fields: Any, raised: str, type_: str, words: str) -> None:
    async with client(context_length=50) as sdk:
        with pytest.raises(getattr(anthropic, raised)) as caught:
            await sdk.messages.create(**ASKED | fields, stream=stream)
    error = caught.value.body["error"]
    assert caught.value.request_id == caught.value.body["request_id"] != ""
    assert error["type"] == type_
    assert words in error["message"]


async def test_errors_of_counting_and_of_models() -> None:
    async with client() as sdk:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await sdk.messages.count_tokens(model="x", messages=HI)
        assert caught.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await sdk.models.retrieve("x")
        assert caught.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError) as caught:
            await sdk.models.list(limit=0)
        assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("seed", SEEDS)
async def test_B102_a_failed_stream_raises(seed: int) -> None:
    async with client(SCRIPTS["failed_mid_stream"], seed=seed) as sdk:
        seen = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with sdk.messages.stream(**ASKED) as stream:
                async for text in stream.text_stream:
                    seen.append(text)
    assert seen == ["Hello"]
    assert caught.value.body["error"] == {"type": "api_error", "message": "The replica was lost"}
    assert caught.value.request_id == caught.value.body["request_id"] != ""
