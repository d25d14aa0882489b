"""How much of the engine's time is not llama.cpp's: what Python costs per step."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import Batch, Context
from backends.llamacpp.runner import Runner
from backends.llamacpp.settings import LlamaCppSettings
from protocols.request import Request, Sampling, TextPrompt


def share_outside_decode(model: str, *, streams: int, tokens: int, threads: int) -> float:
    """The share of step time outside `llama_decode`, over `streams` greedy streams of `tokens` tokens each."""
    return asyncio.run(_measure(model, streams, tokens, threads))


async def _measure(model: str, streams: int, tokens: int, threads: int) -> float:
    spent = {"decode": 0.0, "step": 0.0}
    decode, step = Context.decode, Runner.step

    def timed_decode(self: Context, batch: Batch) -> int:
        began = time.perf_counter()
        try:
            return decode(self, batch)
        finally:
            spent["decode"] += time.perf_counter() - began

    def timed_step(self: Runner) -> None:
        began = time.perf_counter()
        step(self)
        spent["step"] += time.perf_counter() - began

    async def run(backend: LlamaCppBackend, number: int) -> None:
        prompt = TextPrompt(f"A short story about the number {number}:")
        request = Request(f"r{number}", "m", prompt, Sampling(temperature=0), max_tokens=tokens, ignore_eos=True)
        async with aclosing(backend.generate(request)) as frames:
            async for _ in frames:
                pass

    backend = LlamaCppBackend(LlamaCppSettings(model=model, slots=streams, context_length=1024, threads=threads))
    await backend.start()
    try:
        await asyncio.gather(*[run(backend, number) for number in range(streams)])
        # Timed from outside, so that the engine itself carries no clock for a benchmark.
        Context.decode, Runner.step = timed_decode, timed_step  # type: ignore[method-assign]
        await asyncio.gather(*[run(backend, number) for number in range(streams)])
    finally:
        Context.decode, Runner.step = decode, step  # type: ignore[method-assign]
        await backend.aclose()
    return 1 - spent["decode"] / spent["step"]
