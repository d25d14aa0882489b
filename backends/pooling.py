"""Embeddings and rankings: the tokens of their inputs, checked so that none can fail the others, and their vectors."""

from __future__ import annotations

from typing import assert_never

import numpy as np
import numpy.typing as npt

from backends.vocabulary import Tokens, Vocabulary, checked_tokens, mixed_tokens
from protocols.calls import EmbeddingRequest
from protocols.errors import ContextOverflow, InvalidRequest
from protocols.request import MixedPrompt, TextPrompt, TokenPrompt

Matrix = npt.NDArray[np.float32]
"""Rows of numbers: one for an input, or one for each of its tokens."""


def embedding_inputs(vocabulary: Vocabulary, request: EmbeddingRequest, limit: int) -> list[Tokens]:
    """Raises `InvalidRequest` for an input that is empty, or longer than `limit` tokens."""
    if request.normalize < -1:
        raise InvalidRequest(f"There is no norm {request.normalize}", param="embd_normalize")
    inputs = [_tokens(vocabulary, prompt, f"input[{index}]") for index, prompt in enumerate(request.inputs)]
    return checked_lengths(inputs, "input", limit)


def checked_lengths(inputs: list[Tokens], param: str, limit: int) -> list[Tokens]:
    if not inputs:
        raise InvalidRequest("There is nothing to compute: the list is empty", param=param)
    for index, tokens in enumerate(inputs):
        if not len(tokens):
            raise InvalidRequest(f"Item {index} is empty", param=f"{param}[{index}]")
        if len(tokens) > limit:
            raise ContextOverflow.of_item(index, len(tokens), limit, param)
    return inputs


def normalized(rows: Matrix, norm: int) -> Matrix:
    """Each row, scaled as `EmbeddingRequest.normalize` says. A row of nothing but zeros stays."""
    if norm == -1:
        return rows
    values = rows.astype(np.float64)
    largest = np.abs(values).max(axis=1, keepdims=True)
    values = np.divide(values, largest, out=np.zeros_like(values), where=largest > 0)
    if norm == 0:
        values *= 32_760
    else:  # of numbers up to 1, so that no power of them grows beyond what a float holds
        size = (np.abs(values) ** norm).sum(axis=1, keepdims=True) ** (1 / norm)
        values = np.divide(values, size, out=np.zeros_like(values), where=size > 0)
    scaled: Matrix = values.astype(np.float32)
    return scaled


def _tokens(vocabulary: Vocabulary, prompt: TextPrompt | TokenPrompt | MixedPrompt, param: str) -> Tokens:
    match prompt:
        case TextPrompt(text=text):
            return vocabulary.tokenize(text, add_special=True, parse_special=True)
        case TokenPrompt(tokens=tokens):
            return checked_tokens(tokens, vocabulary, param)
        case MixedPrompt(parts=parts):
            return mixed_tokens(vocabulary, parts, param, add_special=True, parse_special=True)
        case _:
            assert_never(prompt)
