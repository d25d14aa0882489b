"""A llama.cpp context that makes vectors or scores of whole inputs, in place of text.

Nothing is kept from one computation to the next, so its KV cache is as small as a batch. Models that have none (BERT
and its kind) see an input whole or not at all, and so does pooling: an input fits one micro batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import llama_cpp.llama_cpp as c
import msgspec
import numpy as np

from backends.llamacpp.bindings import DECODED, FLASH_ATTENTION, Batch, LlamaCppError, Model, Tokens
from backends.llamacpp.settings import Pooling
from backends.pooling import Matrix

Task = Literal["generate", "embed", "rerank"]

_POOLING: dict[Pooling, int] = {
    "none": c.LLAMA_POOLING_TYPE_NONE,
    "mean": c.LLAMA_POOLING_TYPE_MEAN,
    "cls": c.LLAMA_POOLING_TYPE_CLS,
    "last": c.LLAMA_POOLING_TYPE_LAST,
    "rank": c.LLAMA_POOLING_TYPE_RANK,
}

_MAX_INPUTS = 64
_MAX_INPUTS_RECURRENT = 4
"""A recurrent model has a state of its own for each input of a batch, which may be many MiB."""


class EmbeddingContext:
    """`pooling` None is what the model's file says; "none" where it says nothing.

    `batch_size` is the most tokens of one `compute`, and `input_length` the most of one input, which is also never
    longer than what the model was trained for: it may have no positions beyond that.
    """

    def __init__(
        self,
        model: Model,
        *,
        pooling: Pooling | None,
        batch_size: int,
        threads: int,
        flash_attention: str = "auto",
    ) -> None:
        # More sequences than a batch has room for would end the process.
        self.max_inputs = min(_MAX_INPUTS_RECURRENT if model.is_recurrent else _MAX_INPUTS, batch_size)
        params = c.llama_context_default_params()
        params.embeddings = True
        params.pooling_type = c.LLAMA_POOLING_TYPE_UNSPECIFIED if pooling is None else _POOLING[pooling]
        # llama.cpp plans with as many tokens for each sequence; where that is a fraction, pooling ends the process.
        params.n_batch = params.n_ubatch = _rounded_up(batch_size, self.max_inputs)
        params.n_ctx = _rounded_up(params.n_batch, 256)
        params.n_seq_max = self.max_inputs
        params.n_threads = params.n_threads_batch = threads
        # One KV cache for all inputs. With one for each, llama.cpp cuts longer inputs to the length of shorter ones and
        # computes the rest apart, and what it pools then is only the rest.
        params.kv_unified = True
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        self._context = model.new_context(params)
        self._memory = c.llama_get_memory(self._context)
        kind = c.llama_pooling_type(self._context)
        self.pooling: Pooling = next(name for name, value in _POOLING.items() if value == kind)
        self.generates = bool(self._memory) and bool(c.llama_get_causal_attn(self._context))
        self.dimensions = model.classifier_outputs if self.pooling == "rank" else model.embedding_length
        self.batch_size = batch_size
        self.input_length = min(batch_size, model.trained_context)
        self._batch = Batch(batch_size)

    def compute(self, inputs: Sequence[Tokens]) -> list[Matrix]:
        """A matrix of `dimensions` columns for each input. At most `max_inputs`, which all fit one batch."""
        if not self._context:
            raise LlamaCppError("the context is closed")
        if not 0 < len(inputs) <= self.max_inputs:
            raise LlamaCppError(f"{len(inputs)} inputs; the context takes 1 to {self.max_inputs}")
        self._batch.clear()
        for sequence, tokens in enumerate(inputs):
            if not 0 < len(tokens) <= self.input_length:
                raise LlamaCppError(f"an input of {len(tokens)} tokens; the context takes 1 to {self.input_length}")
            self._batch.add(tokens, sequence, 0, logits=True)
        self._batch.want_all()
        if self._memory:
            c.llama_memory_clear(self._memory, False)
        self._batch.struct.n_tokens = self._batch.size
        # Without a KV cache this is llama_encode.
        if (code := int(c.llama_decode(self._context, self._batch.struct))) != DECODED:
            raise LlamaCppError(f"llama_decode answered {code}")
        if self.pooling != "none":
            return [self._row(c.llama_get_embeddings_seq(self._context, s)) for s in range(len(inputs))]
        rows = np.concatenate(
            [self._row(c.llama_get_embeddings_ith(self._context, i)) for i in range(self._batch.size)]
        )
        return np.split(rows, np.cumsum([len(tokens) for tokens in inputs])[:-1])

    def _row(self, pointer: Any) -> Matrix:
        """A copy: the next computation writes over it."""
        if not pointer:
            raise LlamaCppError("llama.cpp has no vector for an input")
        return np.ctypeslib.as_array(pointer, (1, self.dimensions)).copy()

    def close(self) -> None:
        if self._context:
            c.llama_free(self._context)
            self._context = self._memory = None


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Purpose(msgspec.Struct, frozen=True):
    """What a model is good for, and how it pools."""

    tasks: tuple[Task, ...]
    pooling: Pooling


def purpose(model: Model, pooling: Pooling | None) -> Purpose:
    """Raises `LlamaCppError` with one line about a model that is good for nothing here."""
    if model.has_encoder:
        raise LlamaCppError("it has an encoder beside its decoder, as T5 does, which is not supported")
    if model.is_diffusion:
        raise LlamaCppError("it generates by diffusion, which is not supported")
    # Whether there is a KV cache, and which way attention looks, llama.cpp only says of a context.
    probe = EmbeddingContext(model, pooling=pooling, batch_size=32, threads=1)
    try:
        if probe.pooling == "rank":
            return Purpose(("rerank",), "rank")
        if not probe.generates:
            return Purpose(("embed",), probe.pooling)
        silent = pooling is None and probe.pooling == "none"
        return Purpose(("generate", "embed"), "last" if silent else probe.pooling)
    finally:
        probe.close()
