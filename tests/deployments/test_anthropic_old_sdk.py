"""The SDK as it was before 1.0, which many still use: another HTTP client, API version and key header.

It is installed beside, not into, the environment, the first time this test runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = "0.86.0"  # the one Open WebUI pins
INSTALL_WITHIN_S = 120


@pytest.fixture
def old_sdk() -> Path:
    folder = ROOT / ".cache" / f"anthropic-{VERSION}"
    if not (folder / f"anthropic-{VERSION}.dist-info").exists():
        # Without dependencies: those that the environment does not have are named here.
        wanted = [f"anthropic=={VERSION}", "distro==1.9.0"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{wanted[0]} could not be installed within {INSTALL_WITHIN_S} s")
        if done.returncode:
            pytest.skip(f"{wanted[0]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_the_old_sdk_reads_the_same(old_sdk: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(old_sdk)}
    judged = (
        "import sys, pytest; code = pytest.main(sys.argv[1:]); import anthropic as a; print(a.__version__); exit(code)"
    )
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, "-c", judged, *options, "tests/deployments/test_anthropic_sdk.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{VERSION}\n")
    assert "skipped" not in done.stdout
