"""Servers as child processes of a benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_WITHIN_S = 180.0
STOP_WITHIN_S = 120.0


class Child:
    """A running server with its output so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def require_alive(self, since: float) -> None:
        if self.process.poll() is not None or time.monotonic() - since > START_WITHIN_S:
            sys.exit(f"a server did not start:\n{self.output[-2000:]}")


def _heed_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, and the servers here are stopped by it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def child(command: list[str], environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    """`command`, running; interrupted, and waited for, at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_heed_interrupts,
            )
        try:
            yield Child(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=STOP_WITHIN_S)


def wait_for_output(text: str, server: Child) -> None:
    began = time.monotonic()
    while text not in server.output:
        server.require_alive(began)
        time.sleep(0.2)


def wait_for_http(url: str, server: Child) -> None:
    began = time.monotonic()
    while True:
        server.require_alive(began)
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
