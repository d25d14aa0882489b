"""Codex without its screen: thinking, a command that really runs, its result, and the answer."""

from __future__ import annotations

from pathlib import Path

from protocols.openai_responses import CODEC
from tests.clients.relay import Relay
from tests.clients.support import FILE, check_prefix, codex
from tests.deployments.local_server import LocalServer
from tests.protocols.openai_responses.support import read, visible

PATH = "/v1/responses"
UNGUARDED = "--dangerously-bypass-approvals-and-sandbox"
"""The one command that it runs is ours, and its sandbox does not work inside another one."""


async def test_it_runs_a_command_and_answers(agent: LocalServer, tmp_path: Path) -> None:
    async with Relay(agent.port) as relay:
        done = await codex(relay.port, tmp_path, UNGUARDED)
    assert done.code == 0, done.out + done.err
    assert done.lines[-1]["type"] == "turn.completed"
    items = [line["item"] for line in done.lines if line["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["The file is written."]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert command["exit_code"] == 0
    assert (tmp_path / "work" / FILE).read_text() == "done\n"

    exchanges = relay.exchanges()
    assert {exchange.status for exchange in exchanges} == {200}
    first, second = (exchange for exchange in exchanges if exchange.path == PATH)
    call, answer = read(first.answer), read(second.answer)
    assert (call["status"], [item["type"] for item in call["output"]]) == ("completed", ["reasoning", "function_call"])
    assert visible(answer)["text"] == "The file is written."
    results = [item for item in second.json["input"] if item["type"] == "function_call_output"]
    assert [item["call_id"] for item in results] == [call["output"][1]["call_id"]]

    check_prefix(exchanges, PATH, CODEC)


async def test_it_says_that_there_is_no_such_model(agent: LocalServer, tmp_path: Path) -> None:
    async with Relay(agent.port) as relay:
        done = await codex(relay.port, tmp_path, model="another")
    assert done.code == 1
    failed = done.lines[-1]
    assert failed["type"] == "turn.failed"
    assert "'another' does not exist" in failed["error"]["message"]
    assert {e.status for e in relay.exchanges() if e.path == PATH} == {404}
