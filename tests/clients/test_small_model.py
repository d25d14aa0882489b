"""The clients and a real model on llama.cpp. It says nonsense; what counts is that it can, and that they take it.

Its context is too small for what the clients send by themselves, which is a case of its own; with few tools and a short
system prompt there is room. Nothing that it might call is allowed to run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.model_source import resolve_model
from tests.backends.llamacpp.conftest import demo_model as demo_model
from tests.clients.relay import Relay
from tests.clients.support import MODEL, claude_code, codex
from tests.deployments.local_server import LocalServer
from tests.protocols.anthropic_messages import checker
from tests.protocols.openai_responses.support import read

pytestmark = pytest.mark.model

CLAUDE_CODE_SHORTENED = ("--tools", "Bash", "--system-prompt", "Be brief.")
CODEX_SHORTENED = ("-c", 'instructions="Be brief."', "--disable", "goals", "--disable", "multi_agent")
WITHIN_S = 240  # the CPU may be busy with other things


@pytest.fixture(scope="module")
def terse_model(demo_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, except that a full stop ends its answer: it can ramble on to the end of its context."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    path = tmp_path_factory.mktemp("model") / "terse.gguf"
    shutil.copy(resolve_model(demo_model), path)
    reader = gguf.GGUFReader(path, "r+")
    stop = reader.fields["tokenizer.ggml.tokens"].contents().index(".")
    reader.fields["tokenizer.ggml.eos_token_id"].parts[-1][0] = stop
    reader.data.flush()
    return path


@pytest.fixture(scope="module")
def server(terse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    settings = {"kind": "llamacpp", "model": str(terse_model), "slots": 1, "context_length": 8192}
    server = LocalServer(tmp_path_factory.mktemp("server"), {MODEL: settings})
    try:
        yield server
        assert "Traceback" not in server.output
    finally:
        server.stop()


async def test_claude_code_takes_its_answer(server: LocalServer, tmp_path: Path) -> None:
    async with Relay(server.port) as relay:
        done = await claude_code(relay.port, tmp_path, *CLAUDE_CODE_SHORTENED, within_s=WITHIN_S)
    assert done.code == 0, done.out + done.err
    assert (done.lines[-1]["subtype"], done.lines[-1]["is_error"]) == ("success", False)
    exchanges = relay.exchanges()
    assert {exchange.status for exchange in exchanges} == {200}
    for exchange in exchanges:
        if exchange.method == "POST":
            assert checker.message(exchange.answer)["usage"]["output_tokens"] > 0


async def test_codex_takes_its_answer(server: LocalServer, tmp_path: Path) -> None:
    async with Relay(server.port) as relay:
        done = await codex(relay.port, tmp_path, "-s", "read-only", *CODEX_SHORTENED, within_s=WITHIN_S)
    assert done.code == 0, done.out + done.err
    assert done.lines[-1]["type"] == "turn.completed"
    exchanges = relay.exchanges()
    assert {exchange.status for exchange in exchanges} == {200}
    for exchange in exchanges:
        answer = read(exchange.answer)
        assert answer["status"] == "completed"
        assert answer["usage"]["output_tokens"] > 0


async def test_claude_code_knows_that_its_prompt_is_too_long(server: LocalServer, tmp_path: Path) -> None:
    async with Relay(server.port) as relay:
        done = await claude_code(relay.port, tmp_path)
    assert done.code == 1
    result = done.lines[-1]
    assert result["terminal_reason"] == "prompt_too_long"
    assert "limit 8192" in result["result"], "it read our counts"


async def test_codex_knows_that_its_prompt_is_too_long(server: LocalServer, tmp_path: Path) -> None:
    async with Relay(server.port) as relay:
        done = await codex(relay.port, tmp_path, "-s", "read-only")
    assert done.code == 1
    assert "ran out of room in the model's context window" in done.lines[-1]["error"]["message"]
    assert [exchange.status for exchange in relay.exchanges()] == [400], "nothing is tried again"
