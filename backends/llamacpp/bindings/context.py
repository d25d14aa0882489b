"""A KV cache and the computation over it, batch by batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as c
import numpy as np

from backends.llamacpp.bindings.model import LoraAdapter, Model
from backends.llamacpp.bindings.native import LlamaCppError, Logits, State, Tokens, not_null

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
        self._memory = not_null(c.llama_get_memory(self._context), "the model has no KV cache")
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
        return not_null(self._context, "the context is closed")

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
        pointer = not_null(c.llama_get_logits_ith(self.handle, row), f"no logits for row {row}")
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


def _bytes_of(state: State) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
