"""One engine on the demo model for all tests of the session that need no other; without vLLM they are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from backends.vllm.settings import VllmSettings
from protocols.request import Prompt, Request, Sampling
from tests.backends.contract import chat, until
from tests.backends.vllm.checkpoint import made

if TYPE_CHECKING:
    from backends.vllm.backend import VllmBackend

SLOTS = 8


def cpu_settings(**settings: Any) -> VllmSettings:
    """`block_size`: what is cached is whole blocks, and on a CPU the default is 128 tokens."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    given = {"model": str(made()), "device": "cpu", "slots": 4, "context_length": 256, "kv_cache_mib": 256}
    return VllmSettings.model_validate(given | {"block_size": 32} | settings)


def greedy(prompt: Prompt | str, max_tokens: int | None = 16, **fields: Any) -> Request:
    prompt = chat(prompt) if isinstance(prompt, str) else prompt
    values = {"sampling": Sampling(temperature=0.0)} | fields
    return msgspec.structs.replace(Request("test", "m", prompt, max_tokens=max_tokens), **values)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_backend() -> AsyncIterator[VllmBackend]:
    settings = cpu_settings(slots=SLOTS, context_length=1024)
    from backends.vllm.backend import VllmBackend

    backend = VllmBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(vllm_backend: VllmBackend) -> AsyncIterator[VllmBackend]:
    """It must be left idle and healthy."""
    yield vllm_backend
    await until(vllm_backend, running=0, within_s=10)
    await vllm_backend.check_health()


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    return made()
