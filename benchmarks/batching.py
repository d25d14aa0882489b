"""What continuous batching is worth: the same requests at once and one after the other, against a running server.

python -m benchmarks.batching http://127.0.0.1:8000 --model smollm2-135m
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

from benchmarks.relay.load import stream

PROMPTS = (
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "Write a short poem about the sea.",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Explain what a database index is.",
    "Describe the taste of an apple.",
    "Who was Ada Lovelace?",
)


async def run(url: str, model: str, tokens: int, repeats: int) -> None:
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80

    async def ask(prompt: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
        body |= {"stream": True, "temperature": 0, "ignore_eos": True}
        result = await stream(host, port, "chat", json.dumps(body).encode())
        if not result.complete:
            sys.exit(f"a stream ended after {result.tokens} tokens")
        return result.tokens

    async def in_a_row() -> None:
        for prompt in PROMPTS:
            await ask(prompt)

    async def at_once() -> None:
        await asyncio.gather(*[ask(prompt) for prompt in PROMPTS])

    await at_once()  # warm: every prompt is in some slot's KV cache for both ways
    times: dict[str, list[float]] = {"in a row": [], "at once": []}
    for repeat in range(repeats):
        ways = [("in a row", in_a_row), ("at once", at_once)]
        for name, way in ways if repeat % 2 == 0 else ways[::-1]:
            began = time.perf_counter()
            await way()
            times[name].append(time.perf_counter() - began)
    row, together = (statistics.median(times[name]) for name in ("in a row", "at once"))
    total = len(PROMPTS) * tokens
    print(f"{len(PROMPTS)} streams of {tokens} tokens, median of {repeats}")
    print(f"  in a row   {row:6.2f} s   {total / row:6.0f} tokens/s")
    print(f"  at once    {together:6.2f} s   {total / together:6.0f} tokens/s   {row / together:.2f} times as fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(run(args.url, args.model, args.tokens, args.repeats))


if __name__ == "__main__":
    main()
