"""What real clients sent."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
import pytest

from backends.chat_template import ChatTemplates
from protocols.anthropic_messages import CODEC
from protocols.codec import Call
from protocols.request import ChatPrompt
from tests.protocols.captures import requests
from tests.protocols.scripts import SCRIPTS, STAMP

CLAUDE_CODE = [
    "claude-code-2.1.197_tool_turn",
    "claude-code-2.1.332_tool_turn",
    "claude-code-2.1.332_toolsearch",
    "claude-code-2.1.332_claude-opus-name",
    "claude-code-2.1.332_betas_off_discovery",
]
OTHERS = ["opencode-1.18.33_anthropic", "python_sdks_langchain", "js_sdks_vercel"]


def bodies(name: str) -> list[dict[str, Any]]:
    found = [request.body for request in requests(name) if request.body and request.path.startswith("/v1/messages")]
    if not found:
        pytest.skip("the recorded bodies of clients are not here")
    return found


def decoded(body: dict[str, Any]) -> tuple[Call[Any], ChatPrompt]:
    call = CODEC.decode(json.dumps(body).encode(), "r1")
    prompt = call.request.prompt
    assert isinstance(prompt, ChatPrompt)
    return call, prompt


@pytest.mark.parametrize("name", CLAUDE_CODE + OTHERS)
def test_what_they_sent_is_understood(name: str) -> None:
    for body in bodies(name):
        call, prompt = decoded(body)
        assert call.stream is bool(body.get("stream"))
        assert call.request.max_tokens == body.get("max_tokens", 4096)
        assert len(prompt.messages) >= len(body["messages"])
        offered = [tool["name"] for tool in body.get("tools", ()) if not tool.get("defer_loading")]
        assert [tool.name for tool in prompt.tools][: len(offered)] == offered
        assert not prompt.continues


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_B14_the_next_turn_begins_with_the_whole_last_one(name: str) -> None:
    """Its tools and messages, and so its rendered prompt: nothing of what is cached is computed again."""
    first, second = (decoded(body)[1] for body in bodies(name))
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools[: len(first.tools)] == first.tools
    templates = ChatTemplates({}, clock=lambda: datetime(2026, 11, 29))
    # A tool that was searched for joins the list at the head of the prompt: that turn is computed anew, once.
    texts = [templates.render(msgspec.structs.replace(prompt, tools=first.tools)) for prompt in (first, second)]
    assert texts[1].startswith(texts[0])
    assert "x-anthropic-billing-header" not in texts[1]


def test_B13_claude_codes_system_message_is_in_its_place() -> None:
    first, second = (decoded(body)[1] for body in bodies("claude-code-2.1.332_tool_turn"))
    assert [message.role for message in first.messages] == ["system", "user", "system"]
    assert [message.role for message in second.messages] == ["system", "user", "system", "assistant", "tool"]
    assert second.messages[3].reasoning == "let me think"


def test_B16_claude_codes_tool_search() -> None:
    first, second = (decoded(body)[1] for body in bodies("claude-code-2.1.332_toolsearch"))
    assert "DeferredToolPlaceholder" not in {tool.name for tool in second.tools}
    assert [tool.name for tool in second.tools[len(first.tools) :]] == ["WebFetch", "CronCreate"]


def test_B08_claude_code_omits_thinking_and_gets_a_signature() -> None:
    call, _ = decoded(bodies("claude-code-2.1.332_tool_turn")[0])
    assert call.options.thinking == "omitted"
    encoder = CODEC.encoder(call, STAMP)
    raw = b"".join(encoder.feed(event) for event in SCRIPTS["reasoning_then_text"])
    assert b"thinking_delta" not in raw
    assert raw.count(b"signature_delta") == 1


def test_nothing_of_the_users_identity_is_kept() -> None:
    body = bodies("claude-code-2.1.332_tool_turn")[0]
    body["metadata"]["user_id"] = "device-1234"
    call, _ = decoded(body)
    assert "device-1234" not in repr(call)
