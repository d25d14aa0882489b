"""Body -> `Call[CompletionOptions]`. What is wrong with a body is an `InvalidRequest` naming the JSON path."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.body import parse_object, shown, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.openai_completions.wire import DEFAULT_MAX_TOKENS, Body
from protocols.request import InfillPrompt, LogprobOptions, TextPrompt, TokenPrompt
from protocols.sampling_fields import I32, choices, keepalive_s, request

MAX_PROMPTS = 1024
MAX_ANSWERS = 1024
"""Choices of all prompts of a body."""


class CompletionOptions(msgspec.Struct, frozen=True):
    """`echo`: the text that comes before every choice of a prompt, for each prompt; empty where none was asked for."""

    include_usage: bool
    echo: tuple[str, ...] = ()


def decode(body: bytes, request_id: str) -> Call[CompletionOptions]:
    wire = validated(Body, parse_object(body))
    prompts = _prompts(wire.prompt)
    n = choices(wire)
    if wire.best_of is not None and wire.best_of != n:
        raise InvalidRequest("'best_of' is not supported: every answer is returned, ask for 'n'.", param="best_of")
    if n * len(prompts) > MAX_ANSWERS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {n} answers each are more than {MAX_ANSWERS} answers: send fewer at once.",
            param="prompt",
        )
    requests = tuple(
        request(
            wire,
            # Each request needs an id of its own.
            id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            model=wire.model,
            prompt=_with_suffix(prompt, wire.suffix),
            logprobs=_logprobs(wire),
            max_tokens=DEFAULT_MAX_TOKENS,
        )
        for i, prompt in enumerate(prompts)
    )
    options = CompletionOptions(
        include_usage=wire.include_usage,
        echo=_echo(wire, prompts) if wire.echo else (),
    )
    return Call(requests, stream=bool(wire.stream), options=options, keepalive_s=keepalive_s(wire))


def _logprobs(wire: Body) -> LogprobOptions | None:
    return None if wire.logprobs is None else LogprobOptions(wire.logprobs, bool(wire.post_sampling_probs))


def _with_suffix(prompt: TextPrompt | TokenPrompt, suffix: str | None) -> TextPrompt | TokenPrompt | InfillPrompt:
    if not suffix:
        return prompt
    if isinstance(prompt, TokenPrompt):
        raise InvalidRequest("A 'suffix' needs the text of the prompt, and this one is token ids.", param="suffix")
    return InfillPrompt(prompt.text, suffix)


def _echo(wire: Body, prompts: list[TextPrompt | TokenPrompt]) -> tuple[str, ...]:
    if wire.logprobs is not None or wire.n_probs:
        raise InvalidRequest(
            "'echo' and 'logprobs' exclude each other: there are no probabilities of a prompt's tokens.", param="echo"
        )
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(prompts):
        raise InvalidRequest("'echo' needs the text of the prompt, and this one is token ids.", param="echo")
    return tuple(texts)


# --- prompts ------------------------------------------------------------


def _prompts(value: Any) -> list[TextPrompt | TokenPrompt]:
    """A string, a list of strings, a list of token ids, or a list of such lists. One shape, never a mixture."""
    if value is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt")
    if isinstance(value, str):
        return [TextPrompt(value)]
    if not isinstance(value, list):
        raise _wrong("prompt", "a string or a list", value)
    if not value:
        raise _wrong("prompt", "at least 1 item(s)", value)
    first = value[0]
    if _is_token(first):
        return [_tokens(value, "prompt")]
    if not isinstance(first, str | list):
        raise _wrong("prompt[0]", "a string, a token id or a list of token ids", first)
    if len(value) > MAX_PROMPTS:
        raise _wrong("prompt", f"at most {MAX_PROMPTS} items", value)
    if isinstance(first, str):
        for i, text in enumerate(value):
            if not isinstance(text, str):
                raise _wrong(f"prompt[{i}]", "a string, as the first item is", text)
        return [TextPrompt(text) for text in value]
    return [_tokens(tokens, f"prompt[{i}]") for i, tokens in enumerate(value)]


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(value: Any, path: str) -> TokenPrompt:
    if not isinstance(value, list):
        raise _wrong(path, "a list of token ids, as the first item is", value)
    if not value:
        raise _wrong(path, "at least 1 item(s)", value)
    for i, token in enumerate(value):
        if not _is_token(token) or not 0 <= token <= I32:
            raise _wrong(f"{path}[{i}]", "a token id", token)
    return TokenPrompt(tuple(value))


def _wrong(path: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': expected {expected}, got {shown(value)}.", param=path)
