"""What the tests of this dialect share: calls, streams, and a strict reader of streams."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from protocols.codec import Call
from protocols.events import Event
from protocols.openai_responses import CODEC, ResponsesOptions
from protocols.request import ChatPrompt
from protocols.sse import SseParser
from tests.protocols.scripts import STAMP, collected, encoded

FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
}
SEARCH = {"type": "web_search", "external_web_access": False}


def call(**fields: Any) -> Call[ResponsesOptions]:
    body = {"model": 'mo"del/ü', "input": "Hi", "stream": True, **fields}
    return CODEC.decode(json.dumps(body).encode(), "r1")


def prompt(**fields: Any) -> ChatPrompt:
    found = call(**fields).request.prompt
    assert isinstance(found, ChatPrompt)
    return found


def stream(script: tuple[Event, ...], **fields: Any) -> bytes:
    return encoded(CODEC.encoder(call(**fields), STAMP), script)


def body(script: tuple[Event, ...], **fields: Any) -> bytes:
    return CODEC.render(call(**fields), STAMP, collected(script))


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of all events of a stream, each under its own name."""
    found = []
    for event in SseParser().feed(raw):
        data = msgspec.json.decode(event.data)
        assert event.event == data["type"]
        found.append(data)
    return found


_DELTA = {
    "response.output_text": ("message", "text"),
    "response.reasoning_text": ("reasoning", "text"),
    "response.reasoning_summary_text": ("reasoning", "text"),
    "response.function_call_arguments": ("function_call", "arguments"),
    "response.custom_tool_call_input": ("custom_tool_call", "input"),
}
"""Family of events -> the type of the item it belongs to, and what its `done` calls the whole."""


def read(raw: bytes) -> dict[str, Any]:
    """Reads a stream as strictly as its specification is, and returns the final response.

    Every event is numbered from 0; `created` and `in_progress` come first and one terminal event last; more of
    `in_progress`, with how far the prompt is, come only before the items; items have indices without gaps, one is open
    at a time, its parts are opened and closed in it, and deltas add up to what `done` says; the final output is the
    items that were done.
    """
    found = events(raw)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    created, started, *between, last = found
    assert (created["type"], started["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == started["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    if last["type"] == "response.failed":
        assert between.pop()["type"] == "error"
    while between and between[0]["type"] == "response.in_progress":
        assert between[0]["response"] == created["response"]
        assert set(between.pop(0)["prompt_progress"]) == {"total", "cache", "processed", "time_ms"}
    done: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    parts: dict[str, dict[str, Any]] = {}  # what is open in the item: the names of its events -> what came so far
    logprobs: list[dict[str, Any]] = []
    for event in between:
        kind = event["type"]
        assert event["output_index"] == len(done)
        if kind == "response.output_item.added":
            assert item is None
            item, parts, logprobs = event["item"], {}, []
            assert item["status"] == "in_progress"
            if item["type"].endswith("call"):
                parts = {"response." + ("function_call_arguments" if "arguments" in item else kind_of(item)): {"": ""}}
            continue
        assert item is not None, f"{kind} outside an item"
        if kind == "response.output_item.done":
            same = ("id", "type", "role", "call_id", "name", "namespace")
            assert {key: item.get(key) for key in same} == {key: event["item"].get(key) for key in same}
            assert event["item"]["status"] in ("completed", "incomplete")
            assert not parts, "a part is still open"
            done.append(event["item"])
            item = None
            continue
        assert event["item_id"] == item["id"]
        if kind in ("response.content_part.added", "response.reasoning_summary_part.added"):
            assert event["part"]["text"] == ""
            assert event.get("content_index", event.get("summary_index")) == 0
            parts[f"response.{event['part']['type'].replace('summary', 'reasoning_summary')}"] = {"": ""}
        elif kind in ("response.content_part.done", "response.reasoning_summary_part.done"):
            part = parts.pop(f"response.{event['part']['type'].replace('summary', 'reasoning_summary')}")
            assert part["done"] == event["part"]["text"]
        else:
            family, _, moment = kind.rpartition(".")
            type_, whole = _DELTA[family]
            assert item["type"] == type_
            if moment == "delta":
                assert event["delta"] or event.get("logprobs"), "no delta is empty"
                parts[family][""] += event["delta"]
                logprobs += event.get("logprobs", [])
            else:
                assert moment == "done"
                assert event[whole] == parts[family][""]
                assert event.get("logprobs", []) == (logprobs if family == "response.output_text" else [])
                parts[family]["done"] = event[whole]
                if type_.endswith("call"):
                    parts.pop(family)
    assert item is None, "an item is still open"
    final: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{final['status']}"
    assert final["output"] == done
    assert (final["completed_at"] is not None) == (final["status"] == "completed")
    changing = ("status", "output", "usage", "error", "incomplete_details", "completed_at")
    assert {k: v for k, v in final.items() if k not in changing} == {
        k: v for k, v in created["response"].items() if k not in changing
    }
    return final


def untimed(raw: bytes) -> dict[str, Any]:
    """The response of a body. In a stream, the times stand beside it."""
    response: dict[str, Any] = msgspec.json.decode(raw)
    response.pop("timings", None)
    return response


def kind_of(item: dict[str, Any]) -> str:
    return f"{item['type']}_input"


def visible(response: dict[str, Any]) -> dict[str, Any]:
    """What a reader makes of a response: all text, all reasoning, the calls in order."""
    items = response["output"]
    return {
        "text": "".join(p["text"] for i in items if i["type"] == "message" for p in i["content"]),
        "reasoning": "".join(p["text"] for i in items if i["type"] == "reasoning" for p in i["content"]),
        "calls": [
            (i["call_id"], i["name"], i.get("arguments"), i.get("input")) for i in items if i["type"].endswith("call")
        ],
    }
