"""Conversations of real clients, turn by turn: what was rendered once is how the next turn begins."""

from __future__ import annotations

from datetime import datetime

import pytest

from backends.chat_template import ChatTemplate
from tests.backends.chat_template import captures, templates


@pytest.mark.parametrize("client", captures.NAMES)
@pytest.mark.parametrize("name", ["CHATML", "GEMMA", "LLAMA", "QWEN", "KIMI", "MISTRAL"])
def test_B14_what_was_rendered_stays(client: str, name: str) -> None:
    template = ChatTemplate(templates.ALL[name], clock=lambda: datetime(2026, 2, 3), bos_token="<s>")
    texts = [template.render(prompt) for prompt in captures.recorded(client)]
    for before, after in zip(texts, texts[1:], strict=False):
        assert len(after) > len(before) > 100
        assert after.startswith(before)
