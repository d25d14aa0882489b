"""Generated prompts: seeded, so that every run and every rule meets the same ones.

A prompt is a list of messages: each is a number that stands for its text, and a length in tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

BLOCK_TOKENS = 128
SPAN_S = 900.0
DECODE_S = 0.03
"""Seconds per token of an answer: the next turn comes after it."""

Message = tuple[int, int]
"""Name and tokens."""


class Chains:
    """Numbers for blocks: a block's number is decided by its content and the number of the block before it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def of(self, contents: Iterable[Hashable]) -> tuple[int, ...]:
        numbers, parent = [], -1
        for content in contents:
            parent = self._numbers.setdefault((parent, content), len(self._numbers))
            numbers.append(parent)
        return tuple(numbers)


class Prompt(msgspec.Struct, frozen=True):
    """`message_ends` in whole blocks, rising. `session`: what an ideal client would name as the thing to stick to."""

    at: float
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    message_ends: tuple[int, ...]
    session: int
    is_follow_up: bool


class Book:
    """Collects prompts, cutting their messages into blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompts: list[Prompt] = []
        self._chains = Chains()
        self._names = itertools.count()

    def message(self, tokens: float) -> Message:
        """One that nobody sent before."""
        return (next(self._names), max(1, round(tokens)))

    def lognormal(self, median: float, sigma: float = 0.7) -> float:
        return self.random.lognormvariate(math.log(median), sigma)

    def add(
        self, at: float, messages: Sequence[Message], output_tokens: float, session: int, is_follow_up: bool = False
    ) -> float:
        """The second at which the answer is complete, had it been computed at once."""
        contents: list[list[tuple[int, int]]] = []
        tokens, ends = 0, []
        for name, length in messages:
            done = 0
            while done < length:
                if tokens % BLOCK_TOKENS == 0:
                    contents.append([])
                step = min(length - done, BLOCK_TOKENS - tokens % BLOCK_TOKENS)
                done, tokens = done + step, tokens + step
                contents[-1].append((name, done))
            ends.append(tokens // BLOCK_TOKENS)
        output = max(1, round(output_tokens))
        blocks = self._chains.of(tuple(content) for content in contents)
        whole = tuple(sorted(set(ends) - {0}))
        self.prompts.append(Prompt(at, tokens, output, blocks, whole, session, is_follow_up))
        return at + output * DECODE_S


def _arrivals(book: Book, per_s: float, until: float = SPAN_S) -> Iterable[float]:
    at = book.random.expovariate(per_s)
    while at < until:
        yield at
        at += book.random.expovariate(per_s)


def chat() -> list[Prompt]:
    """Conversations of 4 turns on average, half a minute apart, after one of three system prompts."""
    book = Book(1)
    systems = [book.message(tokens) for tokens in (300, 900, 1800)]
    for session, at in enumerate(_arrivals(book, 2.0)):
        messages = [book.random.choice(systems)]
        while at < SPAN_S:
            messages.append(book.message(book.lognormal(150, 1.0)))
            output = book.random.expovariate(1 / 300)
            at = book.add(at, messages, output, session, len(messages) > 2) + book.lognormal(20)
            messages.append(book.message(output))
            if book.random.random() < 0.25:
                break
    return book.prompts


def _shared_prompts(seed: int, hot_share: float, per_s: float, flip_at: float | None = None) -> list[Prompt]:
    """Customers by Zipf's law, each with a long prompt of its own; one of them may have `hot_share` of all requests."""
    book = Book(seed)
    prefixes = [book.message(6000) for _ in range(150)]
    weights = [1 / (rank + 1) for rank in range(len(prefixes))]
    hot, next_hot = book.message(6000), book.message(6000)
    for at in _arrivals(book, per_s):
        current = hot if flip_at is None or at < flip_at else next_hot
        is_hot = book.random.random() < hot_share
        prefix = current if is_hot else book.random.choices(prefixes, weights)[0]
        question = book.message(book.lognormal(400))
        book.add(at, [prefix, question], book.random.expovariate(1 / 200), session=prefix[0])
    return book.prompts


def shared() -> list[Prompt]:
    return _shared_prompts(2, 0.0, 12.0)


def hot() -> list[Prompt]:
    return _shared_prompts(3, 0.25, 12.0)


def flip() -> list[Prompt]:
    """The hot prefix is another one from half time on."""
    return _shared_prompts(4, 0.25, 12.0, flip_at=SPAN_S / 2)


def multi() -> list[Prompt]:
    """50 shared prompts by Zipf's law, each followed by conversations of 4 turns on average."""
    book = Book(5)
    prefixes = [book.message(6144) for _ in range(50)]
    weights = [1 / (rank + 1) for rank in range(len(prefixes))]
    for session, at in enumerate(_arrivals(book, 3.0)):
        messages = [book.random.choices(prefixes, weights)[0]]
        while at < SPAN_S:
            messages.append(book.message(book.random.randint(512, 1024)))
            output = book.random.expovariate(1 / 300)
            at = book.add(at, messages, output, session, len(messages) > 2) + book.random.expovariate(1 / 30)
            messages.append(book.message(output))
            if book.random.random() < 0.25:
                break
    return book.prompts


def agents() -> list[Prompt]:
    """Tool loops of 8 to 40 calls, seconds apart; now and then four siblings at once, or a compacted middle."""
    book = Book(6)
    tools = book.message(3500)
    for session, at in enumerate(_arrivals(book, 0.25)):
        messages = [tools, book.message(book.lognormal(500))]
        for call in range(book.random.randint(8, 40)):
            if at > SPAN_S:
                break
            siblings = 4 if book.random.random() < 0.05 else 1
            for sibling in range(siblings):
                asked = [*messages, book.message(book.random.randint(20, 60))] if sibling else messages
                output = book.random.expovariate(1 / 120)
                done = book.add(at + sibling * 0.015, asked, output, session, call > 0)
            messages = [*messages, book.message(120), book.message(book.random.randint(300, 3000))]
            if sum(tokens for _, tokens in messages) > 40_000:
                messages = [*messages[:2], book.message(1500), *messages[-4:]]
            at = done + book.random.uniform(0.2, 5.0)
    return book.prompts


def _documents(seed: int, *, sort: bool) -> list[Prompt]:
    """A system prompt, 4 of 2,000 documents by Zipf's law, a question. In random order only the first is shared."""
    book = Book(seed)
    system = book.message(400)
    documents = [book.message(book.random.randint(500, 1500)) for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(len(documents))]
    for at in _arrivals(book, 8.0):
        chosen = sorted(set(book.random.choices(range(len(documents)), weights, k=4)))
        if not sort:
            book.random.shuffle(chosen)
        question = book.message(book.lognormal(60))
        prompt = [system, *(documents[n] for n in chosen), question]
        book.add(at, prompt, book.random.expovariate(1 / 200), session=chosen[0])
    return book.prompts


def rag() -> list[Prompt]:
    return _documents(7, sort=False)


def rag_sorted() -> list[Prompt]:
    return _documents(7, sort=True)


def unique() -> list[Prompt]:
    """Nothing is ever asked twice: the control, where knowing about caches can only cost."""
    book = Book(8)
    for session, at in enumerate(_arrivals(book, 8.0)):
        book.add(at, [book.message(book.lognormal(2500, 0.9))], book.random.expovariate(1 / 200), session)
    return book.prompts


WORKLOADS: dict[str, Callable[[], list[Prompt]]] = {
    make.__name__: make for make in (chat, shared, hot, flip, multi, agents, rag, rag_sorted, unique)
}
