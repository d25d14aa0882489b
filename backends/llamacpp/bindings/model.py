"""Weights and vocabulary, and the LoRA adapters that belong to them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as c
import numpy as np

from backends.llamacpp.bindings.native import LlamaCppError, Tokens, explained, init_native, not_null

_MAX_TEXT_BYTES = 2**31 - 1


class FimTokens(NamedTuple):
    """The tokens around a gap, and before the files of a project; -1 for those a model lacks."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int

    @property
    def missing(self) -> list[str]:
        return [name for name in ("prefix", "suffix", "middle") if getattr(self, name) < 0]

    @property
    def complete(self) -> bool:
        return not self.missing


class Model:
    """Loaded weights and their vocabulary."""

    def __init__(self, path: Path, *, gpu_layers: int = -1, repack: bool = True) -> None:
        init_native()
        params = c.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = repack
        with explained("the model cannot be loaded"):
            self._model = not_null(c.llama_model_load_from_file(str(path).encode(), params), "it gave no reason")
        self.vocab = not_null(c.llama_model_get_vocab(self._model), "the model has no vocabulary")
        if c.llama_vocab_type(self.vocab) == c.LLAMA_VOCAB_TYPE_NONE:  # tokenising would end the process
            self.close()
            raise LlamaCppError("the model has no vocabulary")
        self.vocab_size = int(c.llama_vocab_n_tokens(self.vocab))
        self.parameters = int(c.llama_model_n_params(self._model))
        self.trained_context = int(c.llama_model_n_ctx_train(self._model))
        self.heads = int(c.llama_model_n_head(self._model))
        self.embedding_length = int(c.llama_model_n_embd_out(self._model))
        self.has_encoder = bool(c.llama_model_has_encoder(self._model))
        self.is_diffusion = bool(c.llama_model_is_diffusion(self._model))
        self.is_recurrent = bool(c.llama_model_is_recurrent(self._model) or c.llama_model_is_hybrid(self._model))
        self.classifier_outputs = int(c.llama_model_n_cls_out(self._model))
        self.adds_bos = bool(c.llama_vocab_get_add_bos(self.vocab))
        self.adds_eos = bool(c.llama_vocab_get_add_eos(self.vocab))
        self.adds_sep = bool(c.llama_vocab_get_add_sep(self.vocab))
        # Below 0 where the vocabulary has none.
        self.bos = int(c.llama_vocab_bos(self.vocab))
        self.eos = int(c.llama_vocab_eos(self.vocab))
        self.sep = int(c.llama_vocab_sep(self.vocab))
        self.chat_template = self._template(None)
        self.tool_use_template = self._template(b"tool_use")
        self.rerank_template = self._template(b"rerank")
        self.bos_text = self._special_text(self.bos)
        self.eos_text = self._special_text(self.eos)
        self.end_tokens = frozenset(t for t in range(self.vocab_size) if c.llama_vocab_is_eog(self.vocab, t))
        self.suppressed_tokens = self._suppressed_tokens()
        self.fim = FimTokens(
            c.llama_vocab_fim_pre(self.vocab),
            c.llama_vocab_fim_suf(self.vocab),
            c.llama_vocab_fim_mid(self.vocab),
            c.llama_vocab_fim_rep(self.vocab),
            c.llama_vocab_fim_sep(self.vocab),
        )
        self._pieces: list[bytes | None] = [None] * self.vocab_size

    @property
    def handle(self) -> Any:
        return not_null(self._model, "the model is closed")

    def new_context(self, params: Any) -> Any:
        """llama.cpp's context over these weights, which the caller frees before the model is closed."""
        with explained("the context cannot be created"):
            return not_null(c.llama_init_from_model(self.handle, params), "is there memory for the KV cache?")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        # A lone surrogate is not UTF-8, and llama.cpp's tokenizers may throw on that.
        data = text.encode("utf-8", "replace")
        if len(data) > _MAX_TEXT_BYTES:
            raise LlamaCppError("the text is longer than llama.cpp can tokenise")
        room = len(data) + 8  # never more tokens than bytes, and a few that begin and end a text
        tokens = np.empty(room, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = c.llama_tokenize(self.vocab, data, len(data), pointer, room, add_special, parse_special)
        if count < 0:
            raise LlamaCppError(f"the text could not be tokenised ({count})")
        return tokens[:count].copy()

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for in text; control tokens have none."""
        cached = self._pieces[token]
        if cached is None:
            cached = self._pieces[token] = self._read_piece(token, special=False)
        return cached

    def special_piece(self, token: int) -> bytes:
        """The same, and for control tokens their name."""
        return self._read_piece(token, special=True)

    def _suppressed_tokens(self) -> frozenset[int]:
        """Those that the model must never generate, says its file."""
        count = ctypes.c_int32(0)
        tokens = c.llama_vocab_get_suppress_tokens(self.vocab, ctypes.byref(count))
        return frozenset(tokens[i] for i in range(count.value)) if tokens else frozenset()

    def _template(self, name: bytes | None) -> str:
        return (c.llama_model_chat_template(self._model, name) or b"").decode("utf-8", "replace")

    def _special_text(self, token: int) -> str:
        return self._read_piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def _read_piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise LlamaCppError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        buffer = ctypes.create_string_buffer(256)
        size = c.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = c.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:size]

    def close(self) -> None:
        if self._model:
            c.llama_model_free(self._model)
            self._model = self.vocab = None


class LoraAdapter:
    """A LoRA adapter in memory. The model it was loaded for frees it."""

    def __init__(self, model: Model, path: Path) -> None:
        with explained("it cannot be loaded"):
            self.handle = not_null(c.llama_adapter_lora_init(model.handle, str(path).encode()), "it gave no reason")
            if c.llama_adapter_get_alora_n_invocation_tokens(self.handle):
                raise LlamaCppError("it is an activated adapter (aLoRA), which only applies behind certain tokens")
        self.task_name = self._text("adapter.lora.task_name")
        self.prompt_prefix = self._text("adapter.lora.prompt_prefix")

    def _text(self, key: str) -> str:
        size = c.llama_adapter_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return ""
        buffer = ctypes.create_string_buffer(size + 1)
        c.llama_adapter_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")
