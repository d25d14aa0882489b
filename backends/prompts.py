"""Prompts become tokens here. All of it is safe on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from backends.chat_template import ChatTemplates
from backends.output.selection import PLAIN, OutputFormats, ParserSpec, parser_for
from backends.vocabulary import Tokens, Vocabulary, checked_tokens
from protocols.errors import InvalidRequest, NotSupported
from protocols.request import ChatPrompt, InfillPrompt, MixedPrompt, Prompt, Request, TextPrompt, TokenPrompt


def prompt_chars(prompt: Prompt) -> int:
    """A measure of how long `Tokenizer.prepare` takes."""
    match prompt:
        case ChatPrompt(messages=messages, tools=tools):
            return sum(len(m.text) + len(m.reasoning or "") for m in messages) + 512 * len(tools)
        case TextPrompt(text=text):
            return len(text)
        case TokenPrompt():
            return 0
        case MixedPrompt(parts=parts):
            return sum(len(part) for part in parts if isinstance(part, str))
        case InfillPrompt(prefix=prefix, suffix=suffix, files=files):
            return len(prefix) + len(suffix) + sum(len(file.text) for file in files)
        case _:
            assert_never(prompt)


_TAIL = 1024
"""Characters at the end of a prompt that tell where its answer begins."""


class Prepared(msgspec.Struct, frozen=True):
    """A prompt's tokens, and what takes its answer apart. `shown` are control tokens that are text for the `parser`."""

    tokens: Tokens
    parser: ParserSpec | None = None
    shown: frozenset[int] = frozenset()


Infill = Callable[[InfillPrompt, int | None], Tokens]
"""The tokens of a prompt with a gap, and the most tokens of its answer."""


class Tokenizer:
    """A model's vocabulary and chat template. `infill` makes prompts with a gap, for models that can fill it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: ChatTemplates,
        *,
        infill: Infill | None = None,
        formats: OutputFormats = PLAIN,
    ) -> None:
        self.templates = templates
        self._formats = formats
        self._vocabulary = vocabulary
        self._infill = infill

    def prepare(self, request: Request) -> Prepared:
        """The prompt of `request`; `InvalidRequest` if there is nothing in it."""
        prepared = self._prepare(request)
        if not len(prepared.tokens):
            raise InvalidRequest("The prompt is empty", param="prompt")
        return prepared

    def _prepare(self, request: Request) -> Prepared:
        match request.prompt:
            case ChatPrompt() as prompt:
                text = self.templates.render(prompt)
                parser = parser_for(prompt, self._formats, text if prompt.continues else text[-_TAIL:])
                return Prepared(self._text(text), parser, self._shown(parser))
            case TextPrompt(text=text):
                return Prepared(self._text(text))
            case TokenPrompt(tokens=tokens):
                return Prepared(self.checked(tokens, "prompt"))
            case MixedPrompt(parts=parts):
                return Prepared(self._mixed(parts))
            case InfillPrompt() as prompt:
                if self._infill is None:
                    raise NotSupported("This model's engine does not fill gaps")
                return Prepared(self._infill(prompt, request.max_tokens))
            case _:
                assert_never(request.prompt)

    def _shown(self, parser: ParserSpec | None) -> frozenset[int]:
        texts = () if parser is None else parser.special_tokens
        ids = [self._vocabulary.tokenize(text, add_special=False, parse_special=True) for text in texts]
        return frozenset(int(one[0]) for one in ids if len(one) == 1)

    def _text(self, text: str) -> Tokens:
        """Most templates write the beginning-of-text token themselves, and a model must not see it twice."""
        begins = bool(self._vocabulary.bos_text) and text.startswith(self._vocabulary.bos_text)
        return self._vocabulary.tokenize(text, add_special=self._vocabulary.adds_bos and not begins, parse_special=True)

    def _mixed(self, parts: Sequence[str | int]) -> Tokens:
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            elif not tokens:
                tokens += self._text(part).tolist()
            else:
                tokens += self._vocabulary.tokenize(part, add_special=False, parse_special=True).tolist()
        return self.checked(tokens, "prompt")

    def checked(self, tokens: Sequence[int], param: str) -> Tokens:
        return checked_tokens(tokens, self._vocabulary, param)
