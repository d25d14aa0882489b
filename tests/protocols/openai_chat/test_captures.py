"""Recorded bodies of real clients: each is a request, and none of what they ask for is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.openai_chat import CODEC
from protocols.request import ChatPrompt, JsonSchemaConstraint

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "client-captures"

BODIES = [
    pytest.param(exchange["body"], id=f"{path.stem}-{number}")
    for path in sorted(FOLDER.glob("*.json"))
    for number, exchange in enumerate(json.loads(path.read_text()))
    if exchange["path"].endswith("/chat/completions")
]


@pytest.mark.skipif(not BODIES, reason="the recordings are not here")
@pytest.mark.parametrize("body", BODIES or [None])
def test_recorded_bodies(body: dict[str, Any]) -> None:
    call = CODEC.decode(json.dumps(body).encode(), "r1")
    prompt = call.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert len(prompt.messages) == len(body["messages"])
    assert [tool.name for tool in prompt.tools] == [tool["function"]["name"] for tool in body.get("tools", [])]
    assert call.request.max_tokens == body.get("max_tokens")
    assert call.stream is body.get("stream", False)
    assert call.options.include_usage is body.get("stream_options", {}).get("include_usage", False)
    assert isinstance(call.request.constraint, JsonSchemaConstraint) is ("response_format" in body)
