"""The same request in each dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

import msgspec

from deployments.bench.prompts import Prompt

Dialect = Literal["chat", "completions", "responses", "messages", "native"]

PATHS: dict[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "native": "/completion",
}


def headers(dialect: Dialect, api_key: str | None) -> dict[str, str]:
    found = {"content-type": "application/json", "accept": "text/event-stream"}
    if dialect == "messages":
        return found | {"anthropic-version": "2023-06-01"} | ({"x-api-key": api_key} if api_key else {})
    return found | ({"authorization": f"Bearer {api_key}"} if api_key else {})


def body(
    dialect: Dialect, model: str, prompt: Prompt, max_tokens: int, extra: Mapping[str, object] | None = None
) -> bytes:
    """A request for a stream of at most `max_tokens` tokens. `extra` goes over the fields of the same name."""
    return msgspec.json.encode(
        {"model": model, "stream": True} | _fields(dialect, prompt, max_tokens) | dict(extra or {})
    )


def _fields(dialect: Dialect, prompt: Prompt, max_tokens: int) -> dict[str, object]:
    match dialect:
        case "chat":
            options = {"stream_options": {"include_usage": True}}
            return {"messages": _turns(prompt), "max_tokens": max_tokens} | options
        case "completions":
            options = {"stream_options": {"include_usage": True}}
            return {"prompt": prompt.text, "max_tokens": max_tokens} | options
        case "responses":
            return {"input": _turns(prompt), "max_output_tokens": max_tokens, "store": False}
        case "messages":
            # "There is no "system" role for input messages in the Messages API": it is a field of its own.
            turns = [turn for turn in _turns(prompt) if turn["role"] != "system"]
            system = "\n\n".join(turn.text for turn in prompt.turns if turn.role == "system")
            return {"messages": turns, "max_tokens": max_tokens} | ({"system": system} if system else {})
        case "native":
            return {"prompt": prompt.text, "n_predict": max_tokens}
        case _:
            assert_never(dialect)


def _turns(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in prompt.turns]
