"""Every recorded request of a real client, from its body to the rendered prompt, and turn after turn."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest

from backends.chat_template import ChatTemplate
from tests.backends.chat_template import templates
from tests.protocols.captures import BODILESS, CODECS, Recorded, requests, turns

REQUESTS, TURNS = requests(), turns()
AGENTS = ("claude-code", "codex")

recorded = pytest.mark.skipif(not REQUESTS, reason="the recorded bodies of clients are not here")


def template(name: str) -> ChatTemplate:
    return ChatTemplate(templates.ALL[name], clock=lambda: datetime(2026, 2, 3), bos_token="<s>")


@recorded
def test_every_request_is_of_a_known_kind() -> None:
    for request in REQUESTS:
        assert request.path in (BODILESS if request.body is None else CODECS), str(request)


@recorded
def test_every_conversation_of_an_agent_has_its_turns() -> None:
    of_agents = {request.file for request in REQUESTS if request.file.startswith(AGENTS)}
    assert {before.file for before, _ in TURNS} == of_agents


@pytest.mark.parametrize("name", ["CHATML", "GEMMA", "LLAMA", "QWEN", "KIMI", "MISTRAL", "HARMONY"])
@pytest.mark.parametrize("request_", [r for r in REQUESTS if r.body is not None], ids=str)
def test_every_body_becomes_a_prompt(request_: Recorded, name: str) -> None:
    prompt = request_.prompt
    text = template(name).render(prompt)
    users = [message.text for message in prompt.messages if message.role == "user"]
    assert users
    assert users[-1].strip() in text


@pytest.mark.parametrize("name", ["CHATML", "GEMMA", "LLAMA", "QWEN", "KIMI", "MISTRAL"])
@pytest.mark.parametrize(("before", "after"), TURNS, ids=lambda request: str(request))
def test_B14_a_turn_begins_with_the_whole_one_before(before: Recorded, after: Recorded, name: str) -> None:
    first, second = before.prompt, after.prompt
    assert second.tools[: len(first.tools)] == first.tools
    # A tool that was searched for joins the list at the head of the prompt: that turn is computed anew, once.
    second = msgspec.structs.replace(second, tools=first.tools)
    texts = [template(name).render(prompt) for prompt in (first, second)]
    assert len(texts[1]) > len(texts[0]) > 100
    assert texts[1].startswith(texts[0])
