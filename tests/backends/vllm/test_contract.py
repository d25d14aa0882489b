"""The backend contract, on the engine that GPUs run."""

from __future__ import annotations

from typing import ClassVar

import pytest

from backends.base import Backend
from tests.backends.contract import BackendContract
from tests.backends.vllm.conftest import cpu_settings

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm


class TestVllm(BackendContract):
    context_length: ClassVar[int] = 256
    same_beside_others: ClassVar[bool] = False

    @classmethod
    async def create(cls) -> Backend:
        from backends.vllm.backend import VllmBackend

        return VllmBackend(cpu_settings(context_length=cls.context_length))
