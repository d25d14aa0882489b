"""`tokenyard serve --local` as a user has it: a process of its own, on a port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalServer:
    """`models`: the name of each and the settings of its backend. Config and output are files in `folder`."""

    def __init__(self, folder: Path, models: Mapping[str, Mapping[str, Any]]) -> None:
        self.port = free_port()
        self.config = folder / "config.yaml"
        applications = [
            {"name": name, "import_path": "deployments.app:model", "args": {"backend": dict(backend)}}
            for name, backend in models.items()
        ]
        http_options = {"host": "127.0.0.1", "port": self.port}
        self.config.write_text(yaml.safe_dump({"http_options": http_options, "applications": applications}))
        self.out = folder / "out"
        command = [sys.executable, "-m", "deployments.cli", "serve", "--local", str(self.config)]
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONUNBUFFERED": "1"}
            )
        deadline = time.monotonic() + 60
        while "Tokenyard is ready." not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise AssertionError(self.output)
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return self.out.read_text()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()
