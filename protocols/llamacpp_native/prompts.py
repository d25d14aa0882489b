"""llama.cpp's prompts: a string, token ids, a mixture of both, an object around a string, or a list of these."""

from __future__ import annotations

from typing import Any

from protocols.body import shown
from protocols.errors import InvalidRequest
from protocols.request import MixedPrompt, TextPrompt, TokenPrompt

MAX_PROMPTS = 2048

PlainPrompt = TextPrompt | TokenPrompt | MixedPrompt

_EXPECTED = "a string, a list of token ids and strings, or an object with 'prompt_string'"


def prompts(value: Any, path: str, *, content: bool = False) -> tuple[PlainPrompt, ...]:
    """All prompts in `value`. `content`: an object may also hold parts of text, as messages do.

    A list of numbers, with or without strings among them, is one prompt; any other list is a list of prompts.
    """
    if not isinstance(value, list) or any(_is_token(item) for item in value):
        return (_prompt(value, path, content),)
    if not value:
        raise _wrong(path, "at least 1 item(s)", value)
    if len(value) > MAX_PROMPTS:
        raise _wrong(path, f"at most {MAX_PROMPTS} items", value)
    return tuple(_prompt(item, f"{path}[{i}]", content) for i, item in enumerate(value))


def _prompt(value: Any, path: str, content: bool) -> PlainPrompt:
    match value:
        case str():
            return TextPrompt(value)
        case list():
            return sequence(value, path)
        case {"prompt_string": text}:
            if not isinstance(text, str):
                raise _wrong(f"{path}.prompt_string", "a string", text)
            if value.get("multimodal_data"):
                raise InvalidRequest("A prompt here is text: it holds no media.", param=f"{path}.multimodal_data")
            return TextPrompt(text)
        case {"content": parts} if content:
            return TextPrompt(_text_of_parts(parts, f"{path}.content"))
        case _:
            raise _wrong(path, _EXPECTED, value)


def sequence(values: list[Any], path: str) -> TokenPrompt | MixedPrompt:
    """One prompt, of token ids and strings."""
    if not values:
        raise _wrong(path, "at least 1 item(s)", values)
    for i, item in enumerate(values):
        if isinstance(item, str):
            continue
        if not _is_token(item):
            raise _wrong(f"{path}[{i}]", "a token id or a string", item)
        if not 0 <= item < 2**31:
            raise _wrong(f"{path}[{i}]", "a token id", item)
    if any(isinstance(item, str) for item in values):
        return MixedPrompt(tuple(values))
    return TokenPrompt(tuple(values))


def _text_of_parts(parts: Any, path: str) -> str:
    if not isinstance(parts, list):
        raise _wrong(path, "a list of parts", parts)
    texts = []
    for i, part in enumerate(parts):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise _wrong(f"{path}[{i}]", "a part of type 'text'", part)
    return "".join(texts)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(path: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': expected {expected}, got {shown(value)}.", param=path)
