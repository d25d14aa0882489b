"""Prompts become tokens here. All of it is safe on any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from backends.chat_template import ChatTemplates
from backends.llamacpp.bindings import Model, Tokens
from backends.llamacpp.embedding_inputs import checked_tokens
from backends.llamacpp.infill import infill_tokens
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, InfillPrompt, Prompt, Request, TextPrompt, TokenPrompt


def prompt_chars(prompt: Prompt) -> int:
    """A measure of how long `Tokenizer.tokens` takes."""
    match prompt:
        case ChatPrompt(messages=messages, tools=tools):
            return sum(len(m.text) + len(m.reasoning or "") for m in messages) + 512 * len(tools)
        case TextPrompt(text=text):
            return len(text)
        case TokenPrompt():
            return 0
        case InfillPrompt(prefix=prefix, suffix=suffix, files=files):
            return len(prefix) + len(suffix) + sum(len(file.text) for file in files)
        case _:
            assert_never(prompt)


class Tokenizer:
    """A model's vocabulary and chat template. `suffix_first`: how it wants prompts with a gap."""

    def __init__(
        self, model: Model, templates: ChatTemplates, *, context_length: int, suffix_first: bool = False
    ) -> None:
        self.templates = templates
        self._model = model
        self._context_length = context_length
        self._suffix_first = suffix_first

    def tokens(self, request: Request) -> Tokens:
        """The prompt of `request`; `InvalidRequest` if there is nothing in it."""
        tokens = self._tokens(request)
        if not len(tokens):
            raise InvalidRequest("The prompt is empty", param="prompt")
        return tokens

    def _tokens(self, request: Request) -> Tokens:
        match request.prompt:
            case ChatPrompt() as prompt:
                return self._text(self.templates.render(prompt))
            case TextPrompt(text=text):
                return self._text(text)
            case TokenPrompt(tokens=tokens):
                return self.checked(tokens, "prompt")
            case InfillPrompt() as prompt:
                return infill_tokens(
                    prompt,
                    self._model,
                    context_length=self._context_length,
                    max_tokens=request.max_tokens,
                    suffix_first=self._suffix_first,
                )
            case _:
                assert_never(request.prompt)

    def _text(self, text: str) -> Tokens:
        """Most templates write the beginning-of-text token themselves, and a model must not see it twice."""
        begins = bool(self._model.bos_text) and text.startswith(self._model.bos_text)
        return self._model.tokenize(text, add_special=self._model.adds_bos and not begins, parse_special=True)

    def checked(self, tokens: Sequence[int], param: str) -> Tokens:
        return checked_tokens(tokens, self._model, param)
