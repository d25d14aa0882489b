"""Prompts in numbers: what counts as a token, and which tokens and vectors follow from a prompt."""

from __future__ import annotations

import math
from zlib import crc32

import msgspec

from backends.adapters import NO_ADAPTERS, AdapterSet
from protocols.request import (
    ChatPrompt,
    ImagePart,
    InfillPrompt,
    Message,
    MixedPrompt,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
)

VOCAB_SIZE = 32_000


def prompt_length(prompt: Prompt) -> int:
    """Words, and one token per message and image. Never 0, as with a real tokenizer that starts every prompt alike."""
    match prompt:
        case ChatPrompt(messages=messages):
            return sum(_message_length(message) for message in messages) or 1
        case TextPrompt(text=text):
            return _word_count(text) or 1
        case InfillPrompt(prefix=prefix, suffix=suffix, start=start, files=files):
            return sum(_word_count(text) for text in (prefix, suffix, start, *(f.text for f in files))) or 1
        case TokenPrompt(tokens=tokens):
            return len(tokens) or 1
        case MixedPrompt(parts=parts):
            return sum(_word_count(part) if isinstance(part, str) else 1 for part in parts) or 1


_SHAPE = bytes(ord(" ") if chr(code).isspace() else ord("x") for code in range(256))


def _word_count(text: str) -> int:
    """As many as `text.split()` has, and does not make: 10 ms for a megabyte would be mistaken for the system's."""
    if not text.isascii():
        return len(text.split())
    shape = text.encode("ascii").translate(_SHAPE)
    return shape.count(b" x") + shape.startswith(b"x")


def shown_prompt(prompt: Prompt) -> str:
    """Of tokens, their numbers: there is no vocabulary."""
    match prompt:
        case ChatPrompt(messages=messages):
            return "\n".join(f"{message.role}: {message.text}" for message in messages)
        case TextPrompt(text=text):
            return text
        case InfillPrompt(prefix=prefix, suffix=suffix, start=start):
            return f"{prefix}{start}{suffix}"
        case TokenPrompt(tokens=tokens):
            return " ".join(map(str, tokens))
        case MixedPrompt(parts=parts):
            return " ".join(map(str, parts))


def _message_length(message: Message) -> int:
    texts = [message.text, message.reasoning or "", *(f"{c.name} {c.arguments}" for c in message.tool_calls)]
    images = sum(isinstance(part, ImagePart) for part in message.content)
    return 1 + images + sum(_word_count(text) for text in texts)


def answer_key(request: Request, adapters: AdapterSet = NO_ADAPTERS) -> int:
    """What the ids of an answer depend on besides the position. A seed matters only where something is drawn."""
    key = crc32(msgspec.json.encode((request.prompt, adapters) if adapters else request.prompt))
    sampling = request.sampling
    return key if sampling.seed is None or sampling.temperature == 0 else crc32(b"%d" % sampling.seed, key)


def token_at(key: int, position: int, choice: int = 0) -> int:
    return crc32(b"%d:%d" % (choice, position), key) % VOCAB_SIZE


def vector(prompt: TextPrompt | TokenPrompt | MixedPrompt, length: int) -> list[float]:
    """Of the Euclidean norm 1, and a function of `prompt` alone."""
    key = crc32(msgspec.json.encode(prompt))
    values = [token_at(key, position) - VOCAB_SIZE / 2 + 0.25 for position in range(length)]  # never 0
    norm = math.hypot(*values)
    return [value / norm for value in values]
