"""All five dialects over HTTP on vLLM: answers whole and streamed, and what was cached in each one's own words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from deployments.http import build_app
from deployments.local import LocalPool
from deployments.settings import GatewaySettings
from protocols.sse import SseParser

pytest.importorskip("vllm", reason="vLLM is not installed")

if TYPE_CHECKING:
    from backends.vllm.backend import VllmBackend

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

Turns = list[tuple[str, str]]
"""(role, text)"""

STORY = "The lighthouse keeper counts the ships that pass at night, and writes them down. " * 8


def _messages(turns: Turns) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def _plain(turns: Turns) -> str:
    return "\n".join(f"{role}: {text}" for role, text in turns)


class Dialect:
    def __init__(
        self,
        path: str,
        body: Callable[[Turns, int], dict[str, Any]],
        text: Callable[[Any], str],
        cached: Callable[[Any], int],
        delta: Callable[[Any], str],
        counted: Callable[[list[Any]], Any],
    ) -> None:
        """`counted`: of a stream's events, the body with its usage."""
        self.path = path
        self.body = body
        self.text = text
        self.cached = cached
        self.delta = delta
        self.counted = counted


def _chat_delta(event: Any) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))


def _last(events: list[Any]) -> Any:
    return events[-1]


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        lambda turns, n: {"messages": _messages(turns), "max_tokens": n},
        lambda body: str(body["choices"][0]["message"]["content"]),
        lambda body: int(body["usage"]["prompt_tokens_details"]["cached_tokens"]),
        _chat_delta,
        _last,
    ),
    "completions": Dialect(
        "/v1/completions",
        lambda turns, n: {"prompt": _plain(turns), "max_tokens": n},
        lambda body: str(body["choices"][0]["text"]),
        lambda body: int(body["usage"]["prompt_tokens_details"]["cached_tokens"]),
        lambda event: "".join(choice["text"] for choice in event.get("choices", [])),
        _last,
    ),
    "responses": Dialect(
        "/v1/responses",
        lambda turns, n: {"input": _messages(turns), "max_output_tokens": max(n, 16), "store": False},
        lambda body: str(body["output"][0]["content"][0]["text"]),
        lambda body: int(body["usage"]["input_tokens_details"]["cached_tokens"]),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda events: events[-1]["response"],
    ),
    "messages": Dialect(
        "/v1/messages",
        lambda turns, n: {"messages": _messages(turns), "max_tokens": n},
        lambda body: str(body["content"][0]["text"]),
        lambda body: int(body["usage"]["cache_read_input_tokens"]),
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
        lambda events: events[0]["message"],
    ),
    "native": Dialect(
        "/completion",
        lambda turns, n: {"prompt": _plain(turns), "n_predict": n},
        lambda body: str(body["content"]),
        lambda body: int(body["timings"]["cache_n"]),
        lambda event: str(event["content"]),
        _last,
    ),
}

USAGE_ON_REQUEST = ("/v1/chat/completions", "/v1/completions")

each_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)


@pytest_asyncio.fixture(loop_scope="session")
async def http(engine: VllmBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(LocalPool({"m": engine}, {"m": 100}), GatewaySettings(), echo_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=120) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = await http.post(path, json={"model": "m", "temperature": 0.0} | body)
    assert response.status_code == status, response.text
    return response.json()


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={"model": "m", "temperature": 0.0, "stream": True} | body)
    assert response.status_code == 200, response.text
    return [json.loads(event.data) for event in SseParser().feed(response.content) if event.data != "[DONE]"]


@each_dialect
async def test_a_stream_is_the_answer_in_pieces(http: httpx.AsyncClient, dialect: Dialect) -> None:
    body = dialect.body([("user", f"Tell me a story for {dialect.path}.")], 24)
    await post(http, dialect.path, body)  # the others find the same prefix cached
    whole = dialect.text(await post(http, dialect.path, body))
    events = await streamed(http, dialect.path, body)
    assert "".join(map(dialect.delta, events)) == whole
    assert whole


@each_dialect
async def test_the_second_turn_reports_what_was_cached(http: httpx.AsyncClient, dialect: Dialect) -> None:
    turns = [("user", f"{dialect.path}: {STORY} Why?")]
    first = await post(http, dialect.path, dialect.body(turns, 16))
    turns += [("assistant", dialect.text(first)), ("user", "And then?")]
    second = await post(http, dialect.path, dialect.body(turns, 16))
    assert dialect.cached(first) < 64, "nothing but what all prompts begin with"
    assert dialect.cached(second) >= 128
    counts = {"stream_options": {"include_usage": True}} if dialect.path in USAGE_ON_REQUEST else {}
    events = await streamed(http, dialect.path, dialect.body(turns, 16) | counts)
    assert dialect.cached(dialect.counted(events)) >= 128


async def test_a_schema(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    body = {"messages": _messages([("user", "Is it raining?")]), "max_tokens": 100, "response_format": format}
    got = await post(http, "/v1/chat/completions", body)
    assert isinstance(json.loads(got["choices"][0]["message"]["content"])["ok"], bool)


async def test_probabilities_and_choices(http: httpx.AsyncClient) -> None:
    body = {
        "messages": _messages([("user", "Tell me a story.")]),
        "max_tokens": 5,
        "n": 3,
        "temperature": 1.0,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    got = await post(http, "/v1/chat/completions", body)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2]
    for choice in got["choices"]:
        assert len(choice["logprobs"]["content"]) <= 5
        assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": _messages([("user", "x")]), "mirostat": 2}, "mirostat"),
        ("/v1/completions", {"prompt": "x", "dry_multiplier": 0.5}, "dry_multiplier"),
        ("/completion", {"prompt": "x", "xtc_probability": 0.5}, "xtc_probability"),
    ],
)
async def test_what_the_engine_has_not_is_a_400_that_names_it(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = (await post(http, path, body, 400))["error"]
    assert param in error["message"]
