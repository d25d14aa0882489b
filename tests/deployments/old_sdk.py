"""SDKs as they were before their last major version, installed beside, not into, the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.protocols import captures

ROOT = Path(__file__).parents[2]
INSTALL_WITHIN_S = 120


def installed(package: str, version: str, *more: str) -> Path:
    """The folder that holds `package`, installed the first time it is asked for; skips where it cannot be.

    Without dependencies: those that the environment does not have are `more`.
    """
    folder = ROOT / ".cache" / f"{package}-{version}"
    if not (folder / f"{package}-{version}.dist-info").exists():
        wanted = [f"{package}=={version}", *more]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{wanted[0]} could not be installed within {INSTALL_WITHIN_S} s")
        if done.returncode:
            pytest.skip(f"{wanted[0]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def judge(folder: Path, package: str, version: str, tests: Sequence[str], before: str = "") -> None:
    """All of `tests` pass in a process that imports `package` from `folder`, after the statement `before`."""
    judged = f"import sys, pytest\n{before}\ncode = pytest.main(sys.argv[1:])\n"
    judged += f"import {package}\nprint({package}.__version__)\nexit(code)"
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, "-c", judged, *options, *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{version}\n")
    # Only the recorded bodies may be missing: they are beside the checkout, where it has them.
    assert "skipped" not in done.stdout or not captures.FOLDER.exists()
