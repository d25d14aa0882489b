"""The SDK as it was before 3.0, with which most clients in use were built: the same tests, over its own HTTP client."""

from __future__ import annotations

from tests.deployments.old_sdk import installed, judge

VERSION = "2.54.0"  # the last before 3.0
TESTS = [
    "tests/protocols/openai_chat/test_sdk.py",
    "tests/deployments/test_openai_sdk.py",
    "tests/deployments/test_responses.py",
    "tests/deployments/test_http_native.py::test_the_openai_sdk_gets_vectors",
]


def test_the_old_sdk_reads_the_same() -> None:
    folder = installed("openai", VERSION, "distro==1.9.0")
    # httpx2 goes on where httpx stopped: what the tests use of it is in both.
    judge(folder, "openai", VERSION, TESTS, before="import httpx; sys.modules['httpx2'] = httpx")
