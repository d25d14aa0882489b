"""After a run with marked prompts, answers and keys, none of the marks is in a log or in a metric."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.fake import FakeBackend, FakeFault, FakeSettings
from deployments.http import build_app
from deployments.local import LocalPool
from deployments.naming import NamedModels
from deployments.settings import GatewaySettings
from tests.deployments.http_support import client
from tests.deployments.key_support import entry, write_keys

PROMPT, ANSWER, KEY, NAME = "markedprompt", "markedanswer", "markedkey", "markedname"
WRONG = "wrongmark"
MARKS = (PROMPT, ANSWER, KEY, WRONG)

TEXT = f"say {PROMPT}"
CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": PROMPT, "description": TEXT, "parameters": {"type": "object"}}}

GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "stop": [PROMPT], "user": PROMPT}),
    ("/v1/responses", {"input": TEXT, "instructions": TEXT, "metadata": {PROMPT: PROMPT}}),
    ("/v1/completions", {"prompt": [TEXT, TEXT]}),
    ("/v1/messages", {"messages": CHAT[1:], "system": TEXT, "max_tokens": 5}),
    ("/completion", {"prompt": TEXT}),
    ("/chat/completions", {"messages": CHAT}),
    ("/infill", {"input_prefix": TEXT, "input_suffix": TEXT}),
]

QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": TEXT}),
    ("/v1/rerank", {"query": TEXT, "documents": [TEXT]}),
    ("/v1/messages/count_tokens", {"messages": CHAT[1:]}),
    ("/v1/responses/input_tokens", {"input": TEXT}),
    ("/tokenize", {"content": TEXT}),
    ("/apply-template", {"messages": CHAT}),
]

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TEXT}),
    ("/v1/chat/completions", {"messages": [{"role": PROMPT, "content": TEXT}]}),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": PROMPT}}),
    ("/v1/chat/completions", {"messages": CHAT, PROMPT: 1, "temperature": TEXT}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": PROMPT}]}], "max_tokens": 5}),
    ("/v1/responses", {"input": [{"type": PROMPT}]}),
    ("/completion", {"prompt": {"text": TEXT}}),
    ("/tokenize", {"content": {PROMPT: TEXT}}),
    (f"/v1/{PROMPT}", {}),
]

SMALL = {"slots": 8, "tokens": 5, "piece": f" {ANSWER}"}
MODELS = {
    "good": FakeSettings(**SMALL),
    "failing": FakeSettings(**SMALL, fail_at=FakeFault(after_tokens=2)),
    "short": FakeSettings(**SMALL, context_length=2),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    backends = {name: FakeBackend(settings) for name, settings in MODELS.items()}
    for backend in backends.values():
        await backend.start()
    pool = NamedModels(LocalPool(backends, dict.fromkeys(backends, 4)))
    keys = write_keys(tmp_path / "keys", [entry("alice", KEY.encode())])
    async with client(build_app(pool, GatewaySettings(keys=str(keys)), echo_request_id=True)) as http:
        yield http
    for backend in backends.values():
        await backend.aclose()


async def test_no_prompt_answer_or_key_is_logged_or_counted(
    server: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": WRONG}
    answers, statuses = "", set()
    for model in (*MODELS, NAME):
        for path, body in [*GENERATIONS, *QUESTIONS, *BROKEN]:
            for stream in (False, True):
                content = json.dumps({"model": model, **body, "stream": stream})
                response = await server.post(path, content=content, headers=headers)
                answers += response.text
                statuses.add(response.status_code)
    await server.post("/v1/chat/completions", content=f'{{"{PROMPT}', headers=headers)
    for wrong in ({"authorization": f"Bearer {WRONG}"}, {"x-api-key": WRONG}):
        refused = await server.post("/v1/chat/completions", json={"messages": CHAT}, headers=wrong)
        statuses.add(refused.status_code)
    seen = [
        (await server.get(path, headers=headers)).text for path in ("/metrics", "/metrics?model=good", "/api/status")
    ]
    seen += [f"{r.getMessage()} {r.exc_text} {vars(r)}" for r in caplog.records if not r.name.startswith("http")]

    assert ANSWER in answers and {200, 400, 401, 404, 500} <= statuses, "the run was a run of all that can happen"
    assert sum("openai_chat" in text for text in seen) > 20, "and it was logged"
    assert sum('"key":"alice"' in text for text in seen) > 20, "by the name of its key"
    for mark in MARKS:
        assert [text for text in seen if mark in text] == []
    assert [text for text in seen[:3] if NAME in text] == []
