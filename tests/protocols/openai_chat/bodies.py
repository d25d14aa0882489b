"""What the tests of chat bodies share: short ways to decode one, and to have one refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols.errors import InvalidRequest
from protocols.openai_chat import CODEC
from protocols.request import (
    ChatPrompt,
    Message,
    Request,
)

USER = {"role": "user", "content": "Hi"}


def decode(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    return CODEC.decode(json.dumps(body).encode(), "r1").request


def messages(*wire: dict[str, Any]) -> tuple[Message, ...]:
    prompt = decode(messages=list(wire)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def chat(**fields: Any) -> ChatPrompt:
    prompt = decode(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refused_fields(**fields: Any) -> InvalidRequest:
    return refused(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(body, "r1")
    return caught.value
