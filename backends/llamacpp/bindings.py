"""llama.cpp behind a few typed objects: the only place that calls its C functions, besides the samplers.

Many wrong calls do not fail but end the process (an assertion, an exception through C, a null pointer). Every wrapper
therefore checks what the C side only asserts: sizes, sequence ids, indices, null results, use after `close()`.
None of the objects is thread-safe; only tokenising and reading the vocabulary are allowed from any thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as c
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
State = npt.NDArray[np.uint8]

log = logging.getLogger("backends.llamacpp.native")

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
"""llama.cpp's levels, one step quieter than they claim to be: it narrates its loading as "info"."""

CACHE_TYPES = {
    "f32": c.GGML_TYPE_F32,
    "f16": c.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which the bindings' list lacks
    "q8_0": c.GGML_TYPE_Q8_0,
    "q5_1": c.GGML_TYPE_Q5_1,
    "q5_0": c.GGML_TYPE_Q5_0,
    "q4_1": c.GGML_TYPE_Q4_1,
    "q4_0": c.GGML_TYPE_Q4_0,
}
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

MAX_SEQUENCES = 256
_MAX_TEXT_BYTES = 2**31 - 1


class LlamaCppError(Exception):
    """llama.cpp refused a call. The message is one line, with llama.cpp's own reason where it logged one."""


# --- logging ---------------------------------------------------------------

_recent_errors: list[str] = []


@c.llama_log_callback
def _on_log(level: int, text: bytes, _user: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if level not in _LEVELS or not line:  # a continued line is progress dots
        return
    if level == 4 and len(_recent_errors) < 64:
        _recent_errors.append(line)
    log.log(_LEVELS[level], "%s", line)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Adds to a `LlamaCppError` raised inside the first error that llama.cpp logged: it names the cause."""
    _recent_errors.clear()
    try:
        yield
    except LlamaCppError as error:
        reason = _recent_errors[0].partition(": ")[2] if _recent_errors else ""
        raise LlamaCppError(f"{what}: {reason or error}") from error


@cache
def init_native() -> None:
    """Once per process."""
    c.llama_log_set(_on_log, ctypes.c_void_p(0))
    c.llama_backend_init()


def built_with_amx() -> bool:
    return b"AMX_INT8 = 1" in c.llama_print_system_info()


def built_with_gpu() -> bool:
    return bool(c.llama_supports_gpu_offload())


# --- model -----------------------------------------------------------------


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
        with _explained("the model cannot be loaded"):
            self._model = _not_null(c.llama_model_load_from_file(str(path).encode(), params), "it gave no reason")
        self.vocab = _not_null(c.llama_model_get_vocab(self._model), "the model has no vocabulary")
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
        return _not_null(self._model, "the model is closed")

    def new_context(self, params: Any) -> Any:
        """llama.cpp's context over these weights, which the caller frees before the model is closed."""
        with _explained("the context cannot be created"):
            return _not_null(c.llama_init_from_model(self.handle, params), "is there memory for the KV cache?")

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


# --- batch -----------------------------------------------------------------


class Batch:
    """The input of one `decode`: rows of (token, position, sequence, wants logits), in arrays that C reads in place."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._logits = np.zeros(capacity, np.int8)
        self._seq_count = np.ones(capacity, np.int32)
        # C wants a list of sequences per row. Ours have one each, so row i's list is element i of one array.
        self._seq_lists = self._seq.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._seq.itemsize
        int32 = ctypes.POINTER(ctypes.c_int32)
        self.struct = c.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(int32),
            embd=None,
            pos=self._pos.ctypes.data_as(int32),
            n_seq_id=self._seq_count.ctypes.data_as(int32),
            seq_id=self._seq_lists.ctypes.data_as(ctypes.POINTER(int32)),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    @property
    def room(self) -> int:
        return self.capacity - self.size

    def clear(self) -> None:
        self.size = 0

    def add(self, tokens: Tokens | Sequence[int], sequence: int, position: int, *, logits: int) -> int:
        """Appends consecutive tokens of one sequence, and asks for logits of the last `logits`. The last one's row."""
        start, end = self.size, self.size + len(tokens)
        if not start < end <= self.capacity:
            raise LlamaCppError(f"{len(tokens)} tokens do not fit a batch with room for {self.room}")
        self._token[start:end] = tokens
        self._pos[start:end] = np.arange(position, position + len(tokens))
        self._seq[start:end] = sequence
        self._logits[start:end] = 0
        self._logits[max(end - logits, start) : end] = 1
        self.size = end
        return end - 1

    def want_all(self) -> None:
        """Asks for the output of every row."""
        self._logits[: self.size] = 1

    def wants_logits(self, row: int) -> bool:
        return 0 <= row < self.size and bool(self._logits[row])


# --- context ---------------------------------------------------------------

DECODED = 0
NO_KV_SPACE = 1


class Context:
    """A KV cache for `sequences` sequences of `context_length` tokens each, and the computation over it.

    With `unified_kv` all sequences share one cache of `kv_size` tokens (default: room for all of them at full length).

    Some changes only become real with the next `decode`: between caches of their own, a copy is a note to copy whole
    buffers, and a shift a note to rotate keys. Until then, reading a target's state would give what was there before,
    and what is written into a source or target would be copied or lost: `unsettled` names those sequences, and reading
    and writing their states is refused.
    """

    def __init__(
        self,
        model: Model,
        *,
        sequences: int,
        context_length: int,
        batch_size: int,
        micro_batch_size: int,
        threads: int,
        unified_kv: bool = False,
        kv_size: int | None = None,
        flash_attention: str = "auto",
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
    ) -> None:
        if not 1 <= sequences <= MAX_SEQUENCES:
            raise LlamaCppError(f"{sequences} sequences; llama.cpp has 1 to {MAX_SEQUENCES}")
        if batch_size < sequences:  # llama.cpp ends the process
            raise LlamaCppError(f"a batch of {batch_size} has no room for {sequences} sequences")
        params = c.llama_context_default_params()
        params.n_ctx = sequences * (-(-context_length // 256) * 256)  # a sequence's share is cut in units of 256
        if unified_kv and kv_size is not None:
            params.n_ctx = -(-kv_size // 256) * 256
        params.n_seq_max = sequences
        params.n_batch = batch_size
        params.n_ubatch = min(micro_batch_size, batch_size)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified_kv
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.type_k = CACHE_TYPES[cache_type_k]
        params.type_v = CACHE_TYPES[cache_type_v]
        self._context = model.new_context(params)
        self._memory = _not_null(c.llama_get_memory(self._context), "the model has no KV cache")
        self._vocab_size = model.vocab_size
        self._decoded: Batch | None = None
        self.sequences = sequences
        self.unified = unified_kv
        self.kv_size = int(c.llama_n_ctx(self._context))
        self.sequence_length = int(c.llama_n_ctx_seq(self._context))
        self.can_shift = bool(c.llama_memory_can_shift(self._memory))
        self.unsettled: set[int] = set()
        self.batch_size = int(c.llama_n_batch(self._context))

    @property
    def handle(self) -> Any:
        return _not_null(self._context, "the context is closed")

    def decode(self, batch: Batch) -> int:
        """0, or 1 when the KV cache has no room (nothing changed), or below 0 on an error (some of it may be done)."""
        if not 0 < batch.size <= self.batch_size:
            raise LlamaCppError(f"a batch of {batch.size} tokens; the context takes 1 to {self.batch_size}")
        batch.struct.n_tokens = batch.size
        code = int(c.llama_decode(self.handle, batch.struct))
        self._decoded = batch if code == DECODED else None
        if code in (DECODED, NO_KV_SPACE):
            self.unsettled.clear()
        return code

    def apply_adapters(self, adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        """From the next `decode` on, for all sequences. What they hold stays as it was computed."""
        handles = (c.llama_adapter_lora_p_ctypes * len(adapters))(*(adapter.handle for adapter, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        if (code := c.llama_set_adapters_lora(self.handle, handles, len(adapters), scales)) != 0:
            raise LlamaCppError(f"the adapters could not be applied ({code})")

    def check_output(self, row: int) -> None:
        """Raises unless `row` of the last batch has logits. Asking llama.cpp for others may end the process."""
        if self._decoded is None or not self._decoded.wants_logits(row):
            raise LlamaCppError(f"no logits were asked for row {row}")

    def logits(self, row: int) -> Logits:
        """A view of the logits of `row`, valid until the next `decode`."""
        self.check_output(row)
        pointer = _not_null(c.llama_get_logits_ith(self.handle, row), f"no logits for row {row}")
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))

    def truncate(self, sequence: int, length: int) -> bool:
        """Forgets the tokens of `sequence` from position `length` on. False: this model can only forget all of them."""
        self._check_sequence(sequence)
        return bool(c.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def forget(self, sequence: int) -> None:
        self._check_sequence(sequence)
        c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def copy(self, source: int, target: int, length: int) -> bool:
        """Makes `target` the first `length` tokens of `source`. False: this model's states cannot be cut there."""
        self._check_sequence(source)
        self._check_sequence(target)
        if source == target or not 0 < length <= self.length(source):
            raise LlamaCppError(f"a copy of {length} tokens from sequence {source} to {target}")
        self.forget(target)
        if self.unified:
            c.llama_memory_seq_cp(self._memory, source, target, 0, length)
        else:  # llama.cpp ends the process on anything but whole sequences
            c.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            self.unsettled |= {source, target}
        return self.truncate(target, length)

    def shift(self, sequence: int, keep: int, count: int) -> None:
        """Forgets `count` tokens behind the first `keep`; later ones move down. Only where `can_shift`."""
        self._check_sequence(sequence)
        if not self.can_shift or not 0 <= keep < keep + count <= self.length(sequence):
            raise LlamaCppError(f"sequence {sequence} cannot drop {count} tokens behind {keep}")
        c.llama_memory_seq_rm(self._memory, sequence, keep, keep + count)
        c.llama_memory_seq_add(self._memory, sequence, keep + count, -1, -count)
        self.unsettled.add(sequence)

    def state_size(self, sequence: int) -> int:
        self._check_sequence(sequence)
        return int(c.llama_state_seq_get_size_ext(self.handle, sequence, 0))

    def save(self, sequence: int, state: State) -> int:
        """Writes the tokens' keys and values into `state`, which has `state_size` bytes. Returns how many it needed."""
        self._check_settled(sequence)
        return int(c.llama_state_seq_get_data_ext(self.handle, _bytes_of(state), len(state), sequence, 0))

    def restore(self, sequence: int, state: State) -> int:
        """Replaces what `sequence` holds. Returns the bytes read; fewer than `state` has: it holds nothing useful."""
        self._check_settled(sequence)
        return int(c.llama_state_seq_set_data_ext(self.handle, _bytes_of(state), len(state), sequence, 0))

    def length(self, sequence: int) -> int:
        """How many tokens of `sequence` the KV cache holds, given that they begin at position 0."""
        self._check_sequence(sequence)
        return int(c.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def _check_sequence(self, sequence: int) -> None:
        self.handle  # noqa: B018 - raises when closed
        if not 0 <= sequence < self.sequences:
            raise LlamaCppError(f"sequence {sequence} of {self.sequences}")

    def _check_settled(self, sequence: int) -> None:
        self._check_sequence(sequence)
        if sequence in self.unsettled:
            raise LlamaCppError(f"sequence {sequence} has changes that wait for the next decode")

    def close(self) -> None:
        if self._context:
            c.llama_free(self._context)
            self._context = self._memory = self._decoded = None


# --- adapters --------------------------------------------------------------


class LoraAdapter:
    """A LoRA adapter in memory. The model it was loaded for frees it."""

    def __init__(self, model: Model, path: Path) -> None:
        with _explained("it cannot be loaded"):
            self.handle = _not_null(c.llama_adapter_lora_init(model.handle, str(path).encode()), "it gave no reason")
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


def _bytes_of(state: State) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _not_null(pointer: Any, why: str) -> Any:
    """ctypes gives null as None or as a false pointer object, depending on the declared type."""
    if not pointer:
        raise LlamaCppError(why)
    return pointer
