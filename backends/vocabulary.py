"""What every engine's vocabulary can do, so that prompts are made in one way for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocols.errors import InvalidRequest

Tokens = npt.NDArray[np.int32]


class Vocabulary(Protocol):
    """Safe on any thread. `end_tokens` end an answer; `suppressed_tokens` are never generated."""

    vocab_size: int
    adds_bos: bool
    bos_text: str
    end_tokens: frozenset[int]
    suppressed_tokens: frozenset[int]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens: ...

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for in text; control tokens have none."""
        ...

    def special_piece(self, token: int) -> bytes:
        """The same, and for control tokens their name."""
        ...


def checked_tokens(tokens: Sequence[int], vocabulary: Vocabulary, param: str) -> Tokens:
    """An id outside the vocabulary would make the whole batch fail, with everyone else's tokens in it."""
    for token in tokens:
        if not 0 <= token < vocabulary.vocab_size:
            raise InvalidRequest(f"There is no token {token} in a vocabulary of {vocabulary.vocab_size}", param=param)
    return np.array(tokens, np.int32)


def mixed_tokens(
    vocabulary: Vocabulary, parts: Sequence[str | int], param: str, *, add_special: bool, parse_special: bool
) -> Tokens:
    """ "BOS … when … the first element … is a string" """
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            begins = add_special and not tokens
            tokens += vocabulary.tokenize(part, add_special=begins, parse_special=parse_special).tolist()
    return checked_tokens(tokens, vocabulary, param)


def text_of(vocabulary: Vocabulary, tokens: Tokens) -> str:
    """Of all `tokens`, control tokens by their name."""
    return b"".join(map(vocabulary.special_piece, tokens.tolist())).decode("utf-8", "replace")
