"""What is added to which token's logit: the request's biases, the model's suppressed tokens, and `ignore_eos`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from backends.vocabulary import Vocabulary
from protocols.errors import InvalidRequest
from protocols.request import LogitBias, TextBias, TokenBias

Biases = Mapping[int, float]
"""Token to bias; minus infinity bans the token."""

NO_BIASES: Biases = {}

_LIMIT = 1e6
"""A bias beyond it decides no more than one at it, and sums stay finite."""


def merged_biases(vocabulary: Vocabulary, given: tuple[LogitBias, ...] | None, *, ignore_eos: bool) -> Biases:
    """Biases of the same token add up. Ids outside the vocabulary are ignored, as llama.cpp does."""
    biases: dict[int, float] = {}
    for bias in given or ():
        if math.isnan(bias.bias) or bias.bias == math.inf:
            raise InvalidRequest("logit_bias must be finite, or minus infinity to ban a token", param="logit_bias")
        value = -math.inf if bias.bias == -math.inf else min(max(bias.bias, -_LIMIT), _LIMIT)
        match bias:
            case TokenBias(token=token):
                tokens = [token]
            case TextBias(text=text):
                tokens = vocabulary.tokenize(text, add_special=False, parse_special=False).tolist()
            case _:
                assert_never(bias)
        for token in tokens:
            if 0 <= token < vocabulary.vocab_size:
                biases[token] = biases.get(token, 0.0) + value
    banned = set(vocabulary.suppressed_tokens)
    if ignore_eos:
        banned |= vocabulary.end_tokens
    biases |= dict.fromkeys(banned, -math.inf)
    if len(biases) == vocabulary.vocab_size and max(biases.values()) == -math.inf:
        raise InvalidRequest("logit_bias bans every token", param="logit_bias")
    return biases
