"""Claude Code without its screen: thinking, a command that really runs, its result, and the answer."""

from __future__ import annotations

from pathlib import Path

from protocols.anthropic_messages import CODEC
from tests.clients.relay import Relay
from tests.clients.support import FILE, MODEL, check_prefix, claude_code
from tests.deployments.local_server import LocalServer
from tests.protocols.anthropic_messages import checker

PATH = "/v1/messages"


async def test_it_runs_a_command_and_answers(agent: LocalServer, tmp_path: Path) -> None:
    async with Relay(agent.port) as relay:
        done = await claude_code(relay.port, tmp_path, "--allowedTools", "Bash")
    assert done.code == 0, done.out + done.err
    (result,) = done.lines
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, "The file is written.")
    assert result["num_turns"] == 2
    assert (tmp_path / "work" / FILE).read_text() == "done\n"

    exchanges = relay.exchanges()
    assert {exchange.status for exchange in exchanges} == {200}
    first, second = (exchange for exchange in exchanges if exchange.path.startswith(PATH))
    call, answer = checker.message(first.answer), checker.message(second.answer)
    assert (call["model"], call["stop_reason"]) == (MODEL, "tool_use")
    assert [block["type"] for block in call["content"]] == ["thinking", "tool_use"]
    assert (answer["stop_reason"], answer["content"][-1]["text"]) == ("end_turn", "The file is written.")

    _, said, results, *_ = second.json["messages"][len(first.json["messages"]) - 1 :]
    assert [block["type"] for block in said["content"]] == ["thinking", "tool_use"]
    assert said["content"][0]["signature"] == call["content"][0]["signature"]
    assert results["content"][0]["tool_use_id"] == call["content"][1]["id"]
    assert not results["content"][0].get("is_error")

    check_prefix(exchanges, PATH, CODEC)


async def test_it_says_that_there_is_no_such_model(agent: LocalServer, tmp_path: Path) -> None:
    async with Relay(agent.port) as relay:
        done = await claude_code(relay.port, tmp_path, model="another")
    assert done.code == 1
    assert "another" in done.lines[-1]["result"]
    assert done.lines[-1]["api_error_status"] == 404
    assert {e.status for e in relay.exchanges() if e.path.startswith(PATH)} == {404}
