"""The demo model as a checkpoint, for the environment that has vLLM; elsewhere these tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.vllm.settings import VllmSettings


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from tests.backends.vllm.checkpoint import made

    return made()


def cpu_settings(checkpoint: Path, **settings: Any) -> VllmSettings:
    given = {"model": str(checkpoint), "device": "cpu", "slots": 4, "context_length": 256, "kv_cache_mib": 256}
    return VllmSettings.model_validate(given | settings)
