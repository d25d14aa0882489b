"""What is asked: made up, or read from a file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

WORDS = (
    "river stone window garden market paper silver morning engine bridge yellow winter letter copper forest island "
    "number signal pocket harbor candle ribbon valley kitchen planet thunder basket mirror feather lantern meadow "
    "orchard pencil quarry rocket saddle tunnel umbrella violin wagon anchor barrel carpet dragon ember falcon"
).split()


class Turn(msgspec.Struct, frozen=True):
    role: str
    text: str


class Prompt(msgspec.Struct, frozen=True):
    """`max_tokens`: of the answer, where the prompt says it itself."""

    turns: tuple[Turn, ...]
    max_tokens: int | None = None

    @property
    def text(self) -> str:
        """For the dialects that take no messages."""
        if len(self.turns) == 1:
            return self.turns[0].text
        return "\n\n".join(f"{turn.role}: {turn.text}" for turn in self.turns)


def generated(words: int, shared_words: int, seed: int) -> Iterator[Prompt]:
    """Without end: `shared_words` words that all have in common, as a system prompt, and `words` of each one's own."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=shared_words))
    system = (Turn("system", shared),) if shared_words else ()
    while True:
        yield Prompt((*system, Turn("user", " ".join(rng.choices(WORDS, k=words)))))


class DatasetError(ValueError):
    """A dataset that cannot be used; the message names the line."""


class _Message(msgspec.Struct):
    role: str
    content: str


class _Row(msgspec.Struct):
    prompt: str | None = None
    messages: list[_Message] | None = None
    max_tokens: int | None = None


def dataset(path: Path) -> list[Prompt]:
    """A JSON object per line: `prompt`, or `messages` whose contents are text; and `max_tokens`, if it should differ.

    Raises `DatasetError`.
    """
    decode = msgspec.json.Decoder(_Row).decode
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except msgspec.DecodeError as error:
            raise DatasetError(f"{path}, line {number}: {error}") from None
        if (row.prompt is None) == (not row.messages):
            raise DatasetError(f"{path}, line {number}: exactly one of `prompt` and `messages` is needed")
        if row.prompt is not None:
            turns: tuple[Turn, ...] = (Turn("user", row.prompt),)
        else:
            turns = tuple(Turn(message.role, message.content) for message in row.messages or ())
        found.append(Prompt(turns, row.max_tokens))
    if not found:
        raise DatasetError(f"{path} has no prompts")
    return found
