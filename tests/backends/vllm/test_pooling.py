"""Embeddings and rankings of models that pool."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from protocols.calls import EmbeddingRequest, RerankRequest
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported
from protocols.request import TextPrompt, TokenPrompt
from tests.backends.vllm.conftest import cpu_settings, greedy

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

FOX, SAME, TAX = "The quick brown fox jumps.", "A fast brown fox is jumping.", "Value added tax is due in April."


async def test_embeddings() -> None:
    from backends.vllm.backend import VllmBackend

    backend = VllmBackend(cpu_settings(task="embed"))
    card = await backend.start()
    try:
        assert card.tasks == ("embed",)
        inputs = tuple(map(TextPrompt, (FOX, SAME, TAX)))
        found = await backend.embed(EmbeddingRequest("r", "m", inputs))
        vectors = np.array([one.vectors()[0] for one in found])
        assert vectors.shape == (3, card.embedding_length)
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
        (raw,) = await backend.embed(EmbeddingRequest("r", "m", inputs[:1], normalize=-1))
        norm = np.linalg.norm(raw.vectors()[0])
        assert not np.isclose(norm, 1)
        assert np.allclose(np.array(raw.vectors()[0]) / norm, vectors[0], atol=2e-2)
        tokens = tuple(piece.token for piece in await backend.tokenize(FOX))
        (same,) = await backend.embed(EmbeddingRequest("r", "m", (TokenPrompt(tokens),)))
        assert same.prompt_tokens == len(tokens)
        with pytest.raises(ContextOverflow):
            await backend.embed(EmbeddingRequest("r", "m", (TextPrompt("word " * 400),)))
        with pytest.raises(InvalidRequest):
            await backend.embed(EmbeddingRequest("r", "m", (TextPrompt(""),)))
        with pytest.raises(NotSupported):
            await anext(backend.generate(greedy("Hi")))
        assert backend.stats().running == 0
        assert backend.stats().prompt_tokens_total > 0
    finally:
        await backend.aclose()


def classifier(checkpoint: Path, folder: Path) -> Path:
    """The demo model with a head that gives one score: the first number of the last hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    head = torch.zeros(1, config["hidden_size"], dtype=torch.bfloat16)
    head[0, 0] = 1.0
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "tie_word_embeddings": False}
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_rankings(checkpoint: Path, tmp_path: Path) -> None:
    from backends.vllm.backend import VllmBackend

    backend = VllmBackend(cpu_settings(task="rerank", model=str(classifier(checkpoint, tmp_path / "classifier"))))
    card = await backend.start()
    try:
        assert card.tasks == ("rerank",)
        scores = await backend.rerank(RerankRequest("r", "m", "fox", (FOX, TAX, FOX)))
        assert len(scores) == 3
        assert scores[0].score == pytest.approx(scores[2].score, abs=0.05)
        assert scores[0].score != scores[1].score
        assert all(one.prompt_tokens > 5 for one in scores)
        with pytest.raises(NotSupported):
            await backend.embed(EmbeddingRequest("r", "m", (TextPrompt("x"),)))
        with pytest.raises(InvalidRequest):
            await backend.rerank(RerankRequest("r", "m", "fox", ()))
    finally:
        await backend.aclose()
