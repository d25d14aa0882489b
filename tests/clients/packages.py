"""The clients themselves, from npm. `python -m tests.clients.packages` installs what is missing; tests only look."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parents[2] / ".cache" / "clients"


class Client(msgspec.Struct, frozen=True):
    """`program` is a pattern below `node_modules`: a native binary, which needs no Node."""

    name: str
    package: str
    version: str
    program: str

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.name}-{self.version}"

    @property
    def installed(self) -> Path | None:
        return next((self.folder / "node_modules").glob(self.program), None)


CLAUDE_CODE = Client(
    "claude-code",
    "@anthropic-ai/claude-code-linux-x64",
    "2.1.332",
    "@anthropic-ai/claude-code-linux-x64/claude",
)
CODEX = Client("codex", "@openai/codex", "0.171.0", "@openai/codex-linux-x64/vendor/*/bin/codex")
MEGABYTES = {CLAUDE_CODE: 384, CODEX: 424}


def install(client: Client) -> None:
    """Raises `CalledProcessError`. The folder is there whole or not at all."""
    wanted = f"{client.package}@{client.version}"
    print(f"installing {wanted} from npm into {client.folder} ({MEGABYTES[client]} MB, once)", flush=True)
    part = client.folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    options = ["--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier", "--ignore-scripts"]
    subprocess.run(["npm", "install", *options, "--prefix", str(part), wanted], stdin=subprocess.DEVNULL, check=True)
    shutil.rmtree(client.folder, ignore_errors=True)
    part.rename(client.folder)


def main() -> int:
    missing = [client for client in (CLAUDE_CODE, CODEX) if client.installed is None]
    if missing and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("The clients are tried on Linux with an x86-64 processor only.", file=sys.stderr)
        return 2
    if missing and shutil.which("npm") is None:
        print("npm is not installed, and the clients come from it.", file=sys.stderr)
        return 2
    for client in missing:
        try:
            install(client)
        except subprocess.CalledProcessError as error:
            print(f"{client.package} cannot be installed: npm ended with {error.returncode}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
