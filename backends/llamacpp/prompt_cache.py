"""What became of conversations whose slot was needed: their sequence states, in ordinary memory, until they come back.

Only the policy: what is kept, what goes first, and which entry a new prompt takes. Reading and writing states is passed
in, so this knows nothing of llama.cpp. Entries are in order of insertion, and the oldest goes first. An entry that is
taken is removed: its conversation lives in a slot then.

An entry is worth loading if it saves more of the new prompt than what is in the slot already, *and* wastes less of
itself: a short prompt that happens to be the beginning of a long conversation must not consume it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from backends.adapters import NO_ADAPTERS, AdapterSet
from backends.llamacpp.slots import Tokens, common_prefix

State = npt.NDArray[np.uint8]

MIN_KEPT = 0.25
"""An entry of which a prompt uses less than this is left to its own conversation."""

log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True, eq=False):
    """One conversation: its tokens, the bytes of its sequence, and states to go back to where it cannot be cut.

    Only good for prompts with the same `adapters`.
    """

    tokens: Tokens
    state: State
    checkpoints: tuple[bytes, ...] = ()
    adapters: AdapterSet = NO_ADAPTERS

    @property
    def size(self) -> int:
        return len(self.state) + sum(map(len, self.checkpoints))

    def common_prefix(self, prompt: Tokens, adapters: AdapterSet) -> int:
        return common_prefix(self.tokens, prompt) if adapters == self.adapters else 0


class RestoreFailed(Exception):
    """A state could not be put back. Its entry is kept; what the sequence holds now is undefined."""


def _allocate(size: int) -> State:
    return np.empty(size, np.uint8)


class PromptCache:
    """Limits: `limit_size` in bytes, `limit_tokens`; 0 is no limit.

    The limit in tokens guards against entries that cost next to nothing each; while bytes are limited, it never cuts
    below what they would allow.
    """

    def __init__(
        self, *, limit_size: int = 0, limit_tokens: int = 0, allocate: Callable[[int], State] = _allocate
    ) -> None:
        self.limit_size = limit_size
        self.limit_tokens = limit_tokens
        self.size = 0
        self.n_tokens = 0
        self._allocate = allocate
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def alloc(
        self,
        prompt: Tokens,
        state_size: int,
        checkpoints: tuple[bytes, ...] = (),
        adapters: AdapterSet = NO_ADAPTERS,
    ) -> Entry | None:
        """A new last entry, whose `state` the caller must fill; None when it is not needed or there is no room."""
        if any(entry.common_prefix(prompt, adapters) == len(prompt) for entry in self._entries):
            return None
        size = state_size + sum(map(len, checkpoints))
        if self.limit_size and size > self.limit_size:
            return None
        for entry in list(self._entries):
            if entry.common_prefix(prompt, adapters) == len(entry.tokens):
                self._remove(entry)
        while self.limit_size and self._entries and self.size + size > self.limit_size:
            self._remove(self._entries[0])
        try:
            state = self._allocate(state_size)
        except MemoryError:
            self.limit_size = max(1, int(0.4 * self.size))
            log.warning("no memory for a state of %d bytes; the prompt cache shrinks to %d", size, self.limit_size)
            self.update()
            return None
        entry = Entry(prompt.copy(), state, checkpoints, adapters)
        self._entries.append(entry)
        self.size += entry.size
        self.n_tokens += len(entry.tokens)
        return entry

    def discard(self, entry: Entry) -> None:
        """Takes back an entry that could not be filled."""
        self._remove(entry)

    def load(
        self,
        cached: Tokens,
        prompt: Tokens,
        restore: Callable[[State], int],
        adapters: AdapterSet = NO_ADAPTERS,
        *,
        within_reach: int = 0,
    ) -> Entry | None:
        """Moves the best entry for `prompt` into the sequence that holds `cached` now; None if that is best as it is.

        `cached` is what the sequence holds with the same `adapters`, nothing if they are others. `restore` returns how
        many bytes it has read.
        """
        best = self.best(cached, prompt, adapters, within_reach=within_reach)
        if best is None:
            return None
        if restore(best.state) != len(best.state):
            raise RestoreFailed(f"a state of {len(best.state)} bytes could not be restored")
        self._remove(best)
        return best

    def best(
        self, cached: Tokens, prompt: Tokens, adapters: AdapterSet = NO_ADAPTERS, *, within_reach: int = 0
    ) -> Entry | None:
        """What `load` would take.

        `within_reach` of the first prompt tokens could be had without computing them in another way than from `cached`.
        Nothing would be wasted by that, so an entry has to save more.
        """
        own = common_prefix(cached, prompt)
        best_kept = own / len(cached) if len(cached) and own >= within_reach else -1.0
        best_similarity = max(own, within_reach) / len(prompt)
        best: Entry | None = None
        for entry in self._entries:
            common = entry.common_prefix(prompt, adapters)
            kept, similarity = common / len(entry.tokens), common / len(prompt)
            if kept >= MIN_KEPT and kept > best_kept and similarity > best_similarity:
                best, best_kept, best_similarity = entry, kept, similarity
        return best

    def longest(self, prompt: Tokens, adapters: AdapterSet = NO_ADAPTERS) -> int:
        """How many of the first tokens of `prompt` an entry could give."""
        common = [(entry.common_prefix(prompt, adapters), len(entry.tokens)) for entry in self._entries]
        return max((shared for shared, length in common if shared >= MIN_KEPT * length), default=0)

    def update(self) -> None:
        """Brings the cache within its limits, oldest entries first."""
        while self.limit_size and self._entries and self.size > self.limit_size:
            self._remove(self._entries[0])
        limit = self.limit_tokens
        if self.limit_size:
            limit = max(limit, int(self.limit_size / max(1.0, self.size / max(1, self.n_tokens))))
        while self.limit_tokens and self._entries and self.n_tokens > limit:
            self._remove(self._entries[0])

    def clear(self) -> None:
        self._entries.clear()
        self.size = self.n_tokens = 0

    def _remove(self, entry: Entry) -> None:
        index = next(i for i, other in enumerate(self._entries) if other is entry)
        del self._entries[index]
        self.size -= entry.size
        self.n_tokens -= len(entry.tokens)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong or an entry is superfluous. Tests call it."""
        if self.size != sum(entry.size for entry in self._entries):
            raise AssertionError(f"{self.size} bytes on the books")
        if self.n_tokens != sum(len(entry.tokens) for entry in self._entries):
            raise AssertionError(f"{self.n_tokens} tokens on the books")
        if self.limit_size and self.size > self.limit_size:
            raise AssertionError(f"{self.size} bytes, allowed are {self.limit_size}")
        for i, one in enumerate(self._entries):
            if not len(one.tokens):
                raise AssertionError("an empty entry")
            for other in self._entries[i + 1 :]:
                if one.common_prefix(other.tokens, other.adapters) == min(len(one.tokens), len(other.tokens)):
                    raise AssertionError("an entry is the beginning of another")
