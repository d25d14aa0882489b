"""Every byte of every dialect, as it was when somebody last read it.

After an intended change, `python -m tests.protocols.test_goldens` writes the goldens anew; read their diff.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.protocols.anthropic_messages import test_encode as anthropic_messages
from tests.protocols.llamacpp_native import test_encode as llamacpp_native
from tests.protocols.openai_chat import test_encode as openai_chat
from tests.protocols.openai_completions import test_encode as openai_completions
from tests.protocols.openai_responses import test_encode as openai_responses

DIALECTS: dict[str, Callable[[], dict[str, bytes]]] = {
    "anthropic_messages": anthropic_messages.goldens,
    "llamacpp_native": llamacpp_native.goldens,
    "openai_chat": openai_chat.goldens,
    "openai_completions": openai_completions.goldens,
    "openai_responses": openai_responses.goldens,
}


def folder(dialect: str) -> Path:
    return Path(__file__).parent / dialect / "golden"


@pytest.mark.parametrize(("dialect", "name"), [(d, name) for d, goldens in DIALECTS.items() for name in goldens()])
def test_golden(dialect: str, name: str) -> None:
    assert DIALECTS[dialect]()[name] == (folder(dialect) / name).read_bytes()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_golden_is_left_over(dialect: str) -> None:
    assert {path.name for path in folder(dialect).iterdir()} == set(DIALECTS[dialect]())


if __name__ == "__main__":
    for dialect, goldens in DIALECTS.items():
        folder(dialect).mkdir(exist_ok=True)
        for path in folder(dialect).iterdir():
            path.unlink()
        for name, content in goldens().items():
            (folder(dialect) / name).write_bytes(content)
