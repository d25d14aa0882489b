"""Conversations of real clients, where their recorded bodies are at hand."""

from __future__ import annotations

import pytest

from protocols.request import ChatPrompt
from tests.protocols.captures import CODECS, requests

NAMES = ("claude-code-2.1.332_tool_turn", "claude-code-2.1.197_tool_turn", "codex-0.171.0_tool_turn")


def recorded(name: str) -> list[ChatPrompt]:
    """The prompts of one client's requests, in order."""
    found = [request.prompt for request in requests(name) if request.path in CODECS]
    if not found:
        pytest.skip("the recorded bodies of clients are not here")
    return found
