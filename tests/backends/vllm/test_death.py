"""An engine that dies is known to be dead at once: requests move, and the watchdog ends the replica's process."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from deployments.watchdog import EXIT_CODE, watch
from protocols.errors import BackendLost
from tests.backends.vllm.conftest import cpu_settings, greedy

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm


async def test_a_dead_engine() -> None:
    from backends.vllm.backend import VllmBackend

    backend = VllmBackend(cpu_settings())
    before = set(psutil.Process().children())
    await backend.start()
    await backend.check_health()
    stream = backend.generate(greedy("Tell me a story.", 200, ignore_eos=True))
    await anext(stream)
    ends: list[int] = []
    watching = asyncio.create_task(watch(backend, lambda: 60.0, ends.append))
    for process in set(psutil.Process().children()) - before:
        if "resource_tracker" not in " ".join(process.cmdline()):
            process.kill()
    with pytest.raises(BackendLost):
        async for _ in stream:
            pass
    with pytest.raises(BackendLost):
        await backend.check_health()
    with pytest.raises(BackendLost):
        await anext(backend.generate(greedy("Hi")))
    await watching
    assert ends == [EXIT_CODE]
    assert backend.stats().running == 0
    await backend.aclose()
