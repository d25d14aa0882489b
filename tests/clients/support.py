"""Runs a client as a person would, with a home of its own and no way out of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocols.codec import Codec
from protocols.request import ChatPrompt
from tests.clients.packages import CLAUDE_CODE, CODEX, Client
from tests.clients.relay import Exchange

FILE = "made-by-the-model.txt"
MODEL = "test-model"
NO_WAY_OUT = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
"""What is not for this machine goes to a proxy that is not there."""


class Run(msgspec.Struct):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of `out`, those that are JSON objects."""
        return [msgspec.json.decode(line) for line in self.out.splitlines() if line.startswith("{")]


def program(client: Client) -> str:
    found = client.installed
    if found is None:
        pytest.skip(f"{client.name} {client.version} is not installed; `make test-clients` does that")
    return str(found)


async def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], within_s: float) -> Run:
    """In `folder`/work. On any way out, the client and all that it started are gone."""
    work, home = folder / "work", folder / "home"
    for path in (work, home):
        path.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", **NO_WAY_OUT, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), within_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), err.decode())


async def claude_code(
    port: int, folder: Path, *options: str, model: str = MODEL, within_s: float = 60, **environment: str
) -> Run:
    command = [program(CLAUDE_CODE), "-p", "Write the file.", "--model", model]
    quiet = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING")
    return await run(
        [*command, "--output-format", "json", *options],
        folder,
        {
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
            "ANTHROPIC_AUTH_TOKEN": "key",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **dict.fromkeys(quiet, "1"),
            **environment,
        },
        within_s,
    )


async def codex(port: int, folder: Path, *options: str, model: str = MODEL, within_s: float = 60) -> Run:
    provider = (
        f'{{name="here",base_url="http://127.0.0.1:{port}/v1",wire_api="responses",env_key="KEY",'
        "request_max_retries=0,stream_max_retries=0}"
    )
    command = [program(CODEX), "exec", "--json", "--skip-git-repo-check", "-m", model]
    command += ["-c", 'model_provider="here"', "-c", f"model_providers.here={provider}"]
    return await run([*command, *options, "Write the file."], folder, {"KEY": "key"}, within_s)


def check_prefix(exchanges: Sequence[Exchange], path: str, codec: Codec[Any]) -> None:
    """The second request to `path` begins with the whole first one: nothing that was computed is computed again."""
    before, after, *_ = (codec.decode(e.body, "r1").request.prompt for e in exchanges if e.path.split("?")[0] == path)
    assert isinstance(before, ChatPrompt)
    assert isinstance(after, ChatPrompt)
    assert after.tools == before.tools
    assert after.messages[: len(before.messages)] == before.messages
