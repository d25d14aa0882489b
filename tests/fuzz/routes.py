"""Every public route: how its bodies look, and in whose words its answers are."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses
from protocols.anthropic_messages.wire import Body as MessagesBody
from protocols.codec import Call
from protocols.llamacpp_native import questions
from protocols.llamacpp_native.chat import _ChatBody as NativeChatBody
from protocols.llamacpp_native.decode import _CompletionBody as NativeBody
from protocols.llamacpp_native.decode import _InfillBody as InfillBody
from protocols.openai_chat.wire import Body as ChatBody
from protocols.openai_completions.wire import Body as CompletionsBody
from protocols.openai_responses.wire import Body as ResponsesBody
from tests.fuzz.values import SchemaSampler
from tests.protocols.dialects import Chat, Completions, Dialect, Messages, Native, NativeChat, Responses

CAPTURES = Path(__file__).parents[3] / "shared" / "data" / "client-captures"

Envelope = Literal["openai", "anthropic", "llamacpp"]


@dataclass(frozen=True)
class Route:
    """`seeds` are bodies that are answered with 200. `decode` and `dialect` are those of a route that generates."""

    method: str
    path: str
    envelope: Envelope
    seeds: tuple[Any, ...] = ()
    sampler: SchemaSampler | None = None
    dialect: Dialect | None = None
    decode: Callable[[bytes, str], Call[Any]] | None = None
    statuses: frozenset[int] = frozenset()
    """Beyond 200 and those that any route may have."""
    query: str = ""


_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
_IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}
_CHAT: tuple[dict[str, Any], ...] = (
    {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}], "name": "u"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "7 °C"},
            {"role": "assistant", "content": "Seven."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": _IMAGE}}]},
        ],
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "max_completion_tokens": 5,
    },
    {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "n": 3,
        "stop": ["x", "token12"],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": -100, "x": 1.5},
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "presence_penalty": 0.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object", "properties": {}}},
        },
        "user": "u",
        "return_progress": True,
        "timings_per_token": True,
    },
)
_RESPONSES: tuple[dict[str, Any], ...] = (
    {"model": "m", "input": "Hi"},
    {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "7"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Seven."}]},
            {"role": "user", "content": [{"type": "input_image", "image_url": _IMAGE}]},
        ],
        "tools": [
            {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}},
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "reasoning": {"summary": "auto", "effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        "metadata": {"k": "v"},
        "max_output_tokens": 5,
        "top_logprobs": 2,
    },
)
_MESSAGES: tuple[dict[str, Any], ...] = (
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    {
        "model": "m",
        "max_tokens": 5,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "How warm is it?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "7"}],
                        "is_error": False,
                    },
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
                ],
            },
        ],
        "tools": [{"name": "get_weather", "description": "W", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x", "token12"],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "temperature": 0.5,
    },
)
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"model": "m", "prompt": "Once"},
    {"model": "m", "prompt": [[1, 2], [3]], "stream": True, "n": 2, "max_tokens": 3},
    {"model": "m", "prompt": ["Once", "Twice"], "echo": True, "logprobs": 2, "stop": "x", "best_of": 1, "seed": 1}
    | {"echo": False, "stream": True, "stream_options": {"include_usage": True}},
)
_NATIVE: tuple[dict[str, Any], ...] = (
    {"prompt": "Once"},
    {
        "prompt": ["Once", [1, "a", 2], {"prompt_string": "x"}],
        "stream": True,
        "n_predict": 4,
        "n_cmpl": 2,
        "n_probs": 3,
        "temperature": 0,
        "samplers": "edkypmxt",
        "logit_bias": [[5, False], ["x", 1.5]],
        "grammar": "root ::= [a-z]",
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": "<t>"}],
        "preserved_tokens": ["<t>"],
        "lora": [{"id": 0, "scale": 0.5}],
        "return_progress": True,
        "return_tokens": True,
        "timings_per_token": True,
        "dry_sequence_breakers": ["\n"],
        "stop": ["x"],
    },
    {"prompt": "a", "response_fields": ["content", "timings/prompt_n"], "json_schema": {"type": "object"}},
)
_INFILL: tuple[dict[str, Any], ...] = (
    {"input_prefix": "def f(", "input_suffix": "return 1", "input_extra": [{"filename": "a.py", "text": "x"}]},
    {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "stream": True, "n_predict": 3},
)
_EMBEDDINGS: tuple[Any, ...] = (
    {"model": "m", "input": "one two"},
    {"model": "m", "input": ["one", [1, 2], [3, "x"]], "encoding_format": "base64", "dimensions": 8},
    {"content": "x", "embd_normalize": -1},
    {"content": {"content": [{"type": "text", "text": "x"}]}},
)
_RERANK: tuple[Any, ...] = (
    {"model": "m", "query": "a", "documents": ["a b", "c"], "top_n": 1, "return_documents": True},
    {"query": "a", "texts": ["a b", "c"], "return_text": True},
)
_NOT_SUPPORTED = frozenset({501})  # the fake has no tokenizer and no template


def _post(path: str, envelope: Envelope, seeds: tuple[Any, ...], model: type[BaseModel] | None, **more: Any) -> Route:
    return Route("POST", path, envelope, seeds, None if model is None else SchemaSampler(model), **more)


ROUTES: tuple[Route, ...] = (
    _post("/v1/chat/completions", "openai", _CHAT, ChatBody, dialect=Chat(), decode=openai_chat.CODEC.decode),
    _post(
        "/chat/completions", "llamacpp", _CHAT, NativeChatBody, dialect=NativeChat(), decode=llamacpp_native.CHAT.decode
    ),
    _post("/chat/completions/input_tokens", "llamacpp", _CHAT, NativeChatBody),
    _post(
        "/v1/responses", "openai", _RESPONSES, ResponsesBody, dialect=Responses(), decode=openai_responses.CODEC.decode
    ),
    _post("/v1/responses/input_tokens", "openai", _RESPONSES, ResponsesBody),
    _post(
        "/v1/completions",
        "openai",
        _COMPLETIONS,
        CompletionsBody,
        dialect=Completions(),
        decode=openai_completions.CODEC.decode,
    ),
    _post(
        "/v1/messages", "anthropic", _MESSAGES, MessagesBody, dialect=Messages(), decode=anthropic_messages.CODEC.decode
    ),
    _post("/v1/messages/count_tokens", "anthropic", _MESSAGES, MessagesBody),
    *(
        _post(path, "llamacpp", _NATIVE, NativeBody, dialect=Native(), decode=llamacpp_native.COMPLETION.decode)
        for path in ("/completion", "/completions")
    ),
    _post("/infill", "llamacpp", _INFILL, InfillBody, dialect=Native(), decode=llamacpp_native.INFILL.decode),
    _post("/v1/embeddings", "openai", _EMBEDDINGS, questions._EmbeddingBody),
    *(_post(path, "llamacpp", _EMBEDDINGS, questions._EmbeddingBody) for path in ("/embedding", "/embeddings")),
    *(_post(path, "openai", _RERANK, questions._RerankBody) for path in ("/v1/rerank", "/v1/reranking")),
    *(_post(path, "llamacpp", _RERANK, questions._RerankBody) for path in ("/rerank", "/reranking")),
    _post("/tokenize", "llamacpp", ({"content": "a b"},), questions._TokenizeBody, statuses=_NOT_SUPPORTED),
    _post("/detokenize", "llamacpp", ({"tokens": [1, 2]},), questions._DetokenizeBody, statuses=_NOT_SUPPORTED),
    _post("/apply-template", "llamacpp", _CHAT, NativeChatBody, statuses=_NOT_SUPPORTED),
    _post("/slots/0", "llamacpp", ({"filename": "a.bin"},), questions._SlotBody, query="action=save"),
    _post("/slots/1", "llamacpp", ({}, {"model": "m"}), questions._SlotBody, query="action=erase"),
    _post("/lora-adapters", "llamacpp", ([{"id": 0, "scale": 0.5}], []), None),
    *(
        Route("GET", path, "llamacpp")
        for path in (
            "/",
            "/health",
            "/api/hello",
            "/api/status",
            "/metrics",
            "/models",
            "/props",
            "/slots",
            "/lora-adapters",
        )
    ),
    *(Route("GET", path, "openai") for path in ("/v1/models", "/v1/health", "/v1/models/m")),
)

ODD_PATHS = (
    *("/v1/models/x", "/v1/models/", "/v1/models/m/", "/v1/models/ü%20", "/v1/responses/resp_x", "/v1/responses/"),
    *(
        "/v1/responses/resp_x/input_items",
        "/v1/responses/resp_x/cancel",
        "/v1/responses/resp_\x00/x",
        "/slots/",
        "/slots/x",
    ),
    *(
        "/slots/-1",
        "/slots/99999999999",
        "/slots/63",
        "/slots/64",
        "/slots/٣",
        "/slots/0/1",
        "//",
        "/v1",
        "",
        "/V1/models",
    ),
    *(
        "/v1/chat/completions/",
        "/v1/files",
        "/../etc/passwd",
        "/\ufffd",
        "/v1/models/" + "x" * 5000,
        "/v1/messages/batches",
    ),
)


def recorded() -> dict[str, list[Any]]:
    """Bodies that real clients sent, by path; none where the recordings are not here."""
    found: dict[str, list[Any]] = {}
    for file in sorted(CAPTURES.glob("*.json")):
        for exchange in json.loads(file.read_text()):
            if isinstance(exchange["body"], dict):
                body = {**exchange["body"], "model": "m"}
                found.setdefault(exchange["path"].partition("?")[0], []).append(body)
    return found
