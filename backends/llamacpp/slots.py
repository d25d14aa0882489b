"""Which tokens are in each slot's part of the KV cache, and which slot a new prompt gets. Knows nothing of llama.cpp.

Slot `i` is sequence `i` of the context. A slot keeps its tokens when its request ends: a later prompt that begins with
the same tokens computes only the rest. An idle slot's tokens are a cache, free to be overwritten.

A prompt gets, of the idle slots:
1. the one that shares the longest prefix with it, if that is more than `MIN_SIMILARITY` of the prompt: less would
   throw away another conversation's cache to save next to nothing;
2. otherwise an empty one, the lowest first;
3. otherwise the one whose request ended longest ago.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

MIN_SIMILARITY = 0.1


class Slot:
    """One sequence. `tokens` are exactly those the KV cache holds for it, in order from position 0."""

    def __init__(self, id: int, capacity: int) -> None:
        self.id = id
        self.capacity = capacity
        self.busy = False
        self.last_used = 0
        self.length = 0
        self._tokens = np.empty(capacity, np.int32)

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self.length]

    def append(self, tokens: Tokens) -> None:
        end = self.length + len(tokens)
        if end > self.capacity:
            raise ValueError(f"slot {self.id}: {end} tokens in a slot of {self.capacity}")
        self._tokens[self.length : end] = tokens
        self.length = end

    def append_one(self, token: int) -> None:
        if self.length >= self.capacity:
            raise ValueError(f"slot {self.id} is full")
        self._tokens[self.length] = token
        self.length += 1

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def common_prefix(self, prompt: Tokens) -> int:
        size = min(self.length, len(prompt))
        differs = np.flatnonzero(self._tokens[:size] != prompt[:size])
        return int(differs[0]) if len(differs) else size


class Choice(msgspec.Struct, frozen=True):
    """A slot for a prompt, and how many of the prompt's first tokens need not be computed again."""

    slot: Slot
    reusable: int


class Slots:
    def __init__(self, count: int, capacity: int) -> None:
        self._slots = [Slot(id, capacity) for id in range(count)]
        self._clock = 0

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, id: int) -> Slot:
        return self._slots[id]

    @property
    def busy(self) -> int:
        return sum(slot.busy for slot in self._slots)

    @property
    def busy_tokens(self) -> int:
        """What running requests hold. Tokens of idle slots do not count: whoever needs the room may have it."""
        return sum(slot.length for slot in self._slots if slot.busy)

    def acquire(self, prompt: Tokens) -> Choice | None:
        """A slot for `prompt`, cut back to the part that is reused; None when all are busy.

        The last prompt token is always computed again: its logits are where the answer begins.
        """
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        shared = {slot.id: slot.common_prefix(prompt) for slot in idle}
        slot = max(idle, key=lambda slot: shared[slot.id])
        if shared[slot.id] <= MIN_SIMILARITY * len(prompt):
            slot = min(idle, key=lambda slot: (slot.length > 0, slot.last_used, slot.id))
        reusable = max(min(shared[slot.id], len(prompt) - 1), 0)
        slot.truncate(reusable)
        slot.busy = True
        return Choice(slot, reusable)

    def release(self, slot: Slot) -> None:
        self._clock += 1
        slot.busy = False
        slot.last_used = self._clock

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself. Tests call it after every step."""
        ids = [slot.id for slot in self._slots]
        if ids != list(range(len(ids))):
            raise AssertionError(f"slot ids {ids}")
        for slot in self._slots:
            if not 0 <= slot.length <= slot.capacity:
                raise AssertionError(f"slot {slot.id} holds {slot.length} of {slot.capacity} tokens")
            if slot.last_used > self._clock:
                raise AssertionError(f"slot {slot.id} was used in the future")
