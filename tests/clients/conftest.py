from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.support import FILE, MODEL
from tests.deployments.local_server import LocalServer

AGENT = {
    "reasoning": "I write the file first.",
    "text": "The file is written.",
    "calls": [
        {"name": "Bash", "arguments": {"command": f"echo done > {FILE}", "description": "Write the file"}},
        {"name": "exec_command", "arguments": {"cmd": f"echo done > {FILE}"}},
    ],
}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server whose model thinks, calls the client's tool for commands, and says so when it has the result."""
    server = LocalServer(tmp_path_factory.mktemp("server"), {MODEL: {"kind": "fake", "agent": AGENT}})
    try:
        yield server
        assert "Traceback" not in server.output
    finally:
        server.stop()
