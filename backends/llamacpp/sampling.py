"""From `Sampling` to a llama.cpp sampler chain.

Ownership: a sampler belongs to the chain it was added to, and the chain to its `SamplerChain`, whose `close()` frees
all of it, once. The chain keeps state (random numbers, recent tokens), so it serves one sequence, on one thread.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Self

import llama_cpp.llama_cpp as c
import msgspec

from backends.llamacpp.bindings import Context, LlamaCppError, Model, Tokens
from protocols.errors import InvalidRequest
from protocols.request import Sampling

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's own mark for "draw one"."""


class SamplerParams(msgspec.Struct, frozen=True):
    """Every value the chain is built from, with llama.cpp's defaults. `last_n` is the window of the penalties."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    last_n: int = 64
    seed: int = RANDOM_SEED

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        """`InvalidRequest` for values that llama.cpp asserts on, or that make every probability undefined."""
        given = {name: value for name, value in msgspec.structs.asdict(sampling).items() if value is not None}
        for name, value in given.items():
            if not math.isfinite(value):
                raise InvalidRequest(f"{name} must be a finite number", param=name)
        if given.get("repeat_penalty", 1.0) <= 0:
            raise InvalidRequest("repeat_penalty must be greater than 0", param="repeat_penalty")
        if "seed" in given:
            given["seed"] %= 2**32
        if "top_k" in given:
            given["top_k"] = min(max(given["top_k"], 0), 2**31 - 1)
        return cls(**given)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def penalises(self) -> bool:
        """Whether recent tokens matter at all."""
        return self.repeat_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class SamplerChain:
    """Draws the tokens of one sequence. `banned` tokens are never drawn."""

    def __init__(self, model: Model, params: SamplerParams, banned: Sequence[int] = ()) -> None:
        self.params = params
        self._vocab_size = model.vocab_size
        self._chain: Any = _made(c.llama_sampler_chain_init(c.llama_sampler_chain_default_params()))
        if banned:
            biases = (c.llama_logit_bias * len(banned))(*(c.llama_logit_bias(token, -math.inf) for token in banned))
            self._add(c.llama_sampler_init_logit_bias(model.vocab_size, len(banned), biases))
        if params.penalises:
            self._add(
                c.llama_sampler_init_penalties(
                    model.vocab_size,
                    params.last_n,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.greedy:
            self._add(c.llama_sampler_init_greedy())
            return
        if params.top_k > 0:
            self._add(c.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1.0:
            self._add(c.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(c.llama_sampler_init_min_p(params.min_p, 1))
        self._add(c.llama_sampler_init_temp(params.temperature))
        self._add(c.llama_sampler_init_dist(params.seed))

    def _add(self, sampler: Any) -> None:
        c.llama_sampler_chain_add(self._chain, _made(sampler))

    def observe_prompt(self, tokens: Tokens) -> None:
        """Prompt tokens count for the penalties."""
        if self.params.penalises:
            self._accept(tokens[-self.params.last_n :])

    def replay(self, tokens: Tokens) -> None:
        """Brings the chain to where it stood after drawing `tokens`: it continues with the same random numbers."""
        if not self.params.greedy:
            last = c.llama_sampler_chain_get(self._chain, c.llama_sampler_chain_n(self._chain) - 1)
            candidate = (c.llama_token_data * 1)(c.llama_token_data(0, 0.0, 0.0))
            for _ in range(len(tokens)):  # the distribution draws once per token, whatever it chooses from
                array = c.llama_token_data_array(data=candidate, size=1, selected=-1, sorted=False)
                c.llama_sampler_apply(last, ctypes.byref(array))
        if self.params.penalises:
            self._accept(tokens)

    def _accept(self, tokens: Tokens) -> None:
        for token in tokens.tolist():
            if not 0 <= token < self._vocab_size:
                raise LlamaCppError(f"token {token} is outside the vocabulary of {self._vocab_size}")
            c.llama_sampler_accept(self._chain, token)

    def sample(self, context: Context, row: int) -> int:
        """Draws from the logits of `row` of the last decoded batch, and accepts the token."""
        context.check_output(row)
        return int(c.llama_sampler_sample(self.handle, context.handle, row))

    @property
    def handle(self) -> Any:
        if self._chain is None:
            raise LlamaCppError("the sampler is closed")
        return self._chain

    def close(self) -> None:
        if self._chain is not None:
            c.llama_sampler_free(self._chain)
            self._chain = None


def _made(sampler: Any) -> Any:
    """A sampler that could not be made is a null pointer object; using it in a chain ends the process."""
    if not sampler:
        raise LlamaCppError("llama.cpp could not make a sampler")
    return sampler
