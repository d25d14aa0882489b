"""Conversations that are expensive to route wrongly: long first turns, short follow-ups, a system prompt in common.

More conversations are live at once than one replica has slots, and about as many as all have together. Everything is
drawn from one seed, so every routing rule gets the same conversations; their answers are the model's own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import openai

SYSTEM_WORDS, DOCUMENT_WORDS, QUESTION_WORDS = 260, 330, 25
"""About 1.3 tokens a word: 340 tokens of system prompt, 430 of a first question, 35 of each later one."""

RETRY_AFTER_S = 0.5
"""As the SDKs wait. At once, a retry may meet a connection that the front still holds to the process that died."""

_SYLLABLES = "ba be bi bo da de di do ka ke ki ko la le li lo ma me mi mo na ne ni no ra re ri ro sa se si so".split()


class Conversation(msgspec.Struct, frozen=True):
    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]
    """Before each question: the time its user thinks."""


class Turn(msgspec.Struct):
    """How one request went. `turn` counts from 0; `failed` is the class of the error after all retries."""

    conversation: int
    turn: int
    began_s: float
    ttft_s: float = float("nan")
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    ended_s: float = float("nan")
    retries: int = 0
    failed: str = ""


def words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(count))


def conversations(
    seed: int,
    count: int,
    turns: int,
    pause_s: float,
    *,
    systems: int = 2,
    system_words: int = SYSTEM_WORDS,
    first_words: int = DOCUMENT_WORDS,
) -> list[Conversation]:
    """`first_words` are those of the first question; `pause_s` is the mean time a user thinks before one."""
    draw = random.Random(seed)
    prompts = [words(draw, system_words) for _ in range(systems)]
    return [
        Conversation(
            draw.choice(prompts),
            tuple(words(draw, QUESTION_WORDS if turn else first_words) for turn in range(turns)),
            tuple(draw.expovariate(1 / pause_s) for _ in range(turns)),
        )
        for _ in range(count)
    ]


async def run(
    url: str,
    model: str,
    plan: list[Conversation],
    users: int,
    answer_tokens: int,
    retries: int,
    progress: Callable[[int], None],
) -> list[Turn]:
    """`users` hold the conversations of `plan` in its order. Returns every turn, in the order they began."""
    began = time.perf_counter()
    turns: list[Turn] = []
    waiting = iter(enumerate(plan))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def user(number: int) -> None:
            await asyncio.sleep(number * 0.3)
            for index, conversation in waiting:
                async for turn in _hold(client, model, index, conversation, answer_tokens, retries, began):
                    turns.append(turn)
                    progress(len(turns))

        await asyncio.gather(*[user(number) for number in range(users)])
    return sorted(turns, key=lambda turn: turn.began_s)


async def _hold(
    client: openai.AsyncOpenAI,
    model: str,
    index: int,
    conversation: Conversation,
    answer_tokens: int,
    retries: int,
    began: float,
) -> AsyncIterator[Turn]:
    messages: list[Any] = [{"role": "system", "content": conversation.system}]
    for number, question in enumerate(conversation.questions):
        await asyncio.sleep(conversation.pauses_s[number])
        messages.append({"role": "user", "content": question})
        turn = Turn(index, number, time.perf_counter() - began)
        for attempt in range(retries + 1):
            turn.retries = attempt
            if attempt:
                await asyncio.sleep(RETRY_AFTER_S)
            try:
                answer = await _ask(client, model, messages, answer_tokens, turn)
            except openai.OpenAIError as error:
                turn.failed = type(error).__name__
            else:
                turn.failed = ""
                messages.append({"role": "assistant", "content": answer})
                break
        turn.ended_s = time.perf_counter() - began
        yield turn
        if turn.failed:
            return


async def _ask(client: openai.AsyncOpenAI, model: str, messages: list[Any], answer_tokens: int, turn: Turn) -> str:
    sent = time.perf_counter()
    body: dict[str, Any] = {"max_tokens": answer_tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = await client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **body
    )
    parts: list[str] = []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            if not parts:
                turn.ttft_s = time.perf_counter() - sent
            parts.append(chunk.choices[0].delta.content)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            turn.prompt_tokens = chunk.usage.prompt_tokens
            turn.answer_tokens = chunk.usage.completion_tokens
            turn.cached_tokens = (details.cached_tokens if details is not None else None) or 0
    return "".join(parts)
