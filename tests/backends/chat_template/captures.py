"""Conversations of real clients, where their recorded bodies are at hand: read just well enough for templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.request import ChatPrompt, Message, TextPart, Tool, ToolCall

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "client-captures"
NAMES = ("claude-code-2.1.332_tool_turn", "claude-code-2.1.197_tool_turn", "codex-0.171.0_tool_turn")


def recorded(name: str) -> list[ChatPrompt]:
    """The prompts of one client's requests, in order."""
    file = FOLDER / f"{name}.json"
    if not file.exists():
        pytest.skip("the recorded bodies of clients are not here")
    bodies = [exchange["body"] for exchange in json.loads(file.read_text())]
    parsed = [json.loads(body) if isinstance(body, str) else body for body in bodies if body]
    prompts = [_prompt(body) for body in parsed if body.get("messages") or body.get("input")]
    assert len(prompts) > 1
    return prompts


def _prompt(body: dict[str, Any]) -> ChatPrompt:
    messages = []
    if body.get("system"):
        blocks = [b["text"] for b in body["system"] if not b["text"].startswith("x-anthropic-billing-header")]
        messages.append(Message("system", (TextPart("\n".join(blocks)),)))
    for item in body.get("messages") or body["input"]:
        messages += _messages(item)
    tools = tuple(
        Tool(tool["name"], tool.get("description", ""), tool.get("input_schema") or tool.get("parameters") or {})
        for tool in body["tools"]
        if "name" in tool
    )
    return ChatPrompt(tuple(messages), tools)


def _messages(item: dict[str, Any]) -> list[Message]:
    match item.get("type"):
        case "function_call":
            call = ToolCall(item["call_id"], item["name"], item["arguments"])
            return [Message("assistant", tool_calls=(call,))]
        case "function_call_output":
            return [Message("tool", (TextPart(_text(item["output"])),), tool_call_id=item["call_id"])]
        case "reasoning":
            return []
    content = item["content"]
    if isinstance(content, str):
        return [Message(item["role"], (TextPart(content),))]
    results = [
        Message("tool", (TextPart(_text(block["content"])),), tool_call_id=block["tool_use_id"])
        for block in content
        if block["type"] == "tool_result"
    ]
    calls = tuple(
        ToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in content
        if block["type"] == "tool_use"
    )
    texts = tuple(TextPart(block["text"]) for block in content if "text" in block)
    rest = [Message(item["role"], texts, tool_calls=calls)] if texts or calls else []
    return results + rest


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)
