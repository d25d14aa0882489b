"""The SDK as it was before 1.0, which many still use: another HTTP client, API version and key header."""

from __future__ import annotations

from tests.deployments.old_sdk import installed, judge

VERSION = "0.86.0"  # the one Open WebUI pins


def test_the_old_sdk_reads_the_same() -> None:
    folder = installed("anthropic", VERSION, "distro==1.9.0")
    judge(folder, "anthropic", VERSION, ["tests/deployments/test_anthropic_sdk.py"])
