"""Which tokens are in each slot's part of the KV cache, and which slot a new prompt gets. Knows nothing of llama.cpp.

Slot `i` is sequence `i` of the context. A slot keeps its tokens when its request ends: a later prompt that begins with
the same tokens computes only the rest. With sharing, a prompt may also take its beginning from any other slot, idle or
not, as a copy. An idle slot's tokens are a cache, free to be overwritten.

A prompt gets, of the idle slots:
1. the one that shares the longest prefix with it, if that is more than `MIN_SIMILARITY` of the prompt: less would throw
   away another conversation's cache to save next to nothing. With sharing there is a way for both conversations to go
   on, a copy in another slot. So the prompt must then need nearly all that the slot holds, or `MIN_KEPT` of it if no
   slot is empty, and no other slot may offer clearly more;
2. otherwise an empty one, between busy ones if there is such a place: llama.cpp computes together only sequences with
   neighbouring ids (with one KV cache per slot, {0, 2, 4, 6} took 65 ms a step and {0, 1, 2, 3} 45);
3. otherwise the one whose request ended longest ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from backends.adapters import NO_ADAPTERS, AdapterSet

Tokens = npt.NDArray[np.int32]

MIN_SIMILARITY = 0.1
MIN_KEPT = 0.5
SMALL_LOSS = 32
"""So many tokens of another conversation may be overwritten without a thought."""


def common_prefix(one: Tokens, other: Tokens) -> int:
    size = min(len(one), len(other))
    if not size or one[0] != other[0]:
        return 0
    differs = one[:size] != other[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


class Slot:
    """One sequence. `tokens` are exactly those the KV cache holds for it, in order from position 0.

    `exact` of them were computed in this very context, and are good for other prompts too, with the same `adapters`;
    what a context shift has moved remembers tokens that are gone. `reserved`: a request has the slot but has not
    touched its tokens yet. `borrowed` of the first tokens take no room of their own, and `tied` have a twin in another
    slot: both only in a KV cache that all slots share.
    """

    def __init__(self, id: int, capacity: int) -> None:
        self.id = id
        self.capacity = capacity
        self.busy = False
        self.reserved = False
        self.last_used = 0
        self.length = 0
        self.exact = capacity
        self.adapters = NO_ADAPTERS
        self.borrowed = 0
        self.tied = 0
        self._tokens = np.empty(capacity, np.int32)

    @property
    def tokens(self) -> Tokens:
        return self._tokens[: self.length]

    @property
    def room_taken(self) -> int:
        return self.length - self.borrowed

    def computed_with(self, adapters: AdapterSet) -> Tokens:
        return self._tokens[: self.length if adapters == self.adapters else 0]

    def append(self, tokens: Tokens) -> None:
        end = self.length + len(tokens)
        if end > self.capacity:
            raise ValueError(f"slot {self.id}: {end} tokens in a slot of {self.capacity}")
        self._tokens[self.length : end] = tokens
        self.length = end

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        self.borrowed = min(self.borrowed, length)
        self.tied = min(self.tied, length)
        if self.length <= self.exact:
            self.exact = self.capacity

    def replace(self, tokens: Tokens) -> None:
        self.truncate(0)
        self.append(tokens)

    def discard(self, keep: int, count: int) -> None:
        """`count` tokens behind the first `keep` are gone, and those after them have moved down."""
        end = self.length - count
        self._tokens[keep:end] = self._tokens[keep + count : self.length].copy()
        exact = min(self.exact, keep)
        self.truncate(end)
        self.borrowed, self.tied = min(self.borrowed, keep), min(self.tied, keep)
        self.exact = exact

    def common_prefix(self, prompt: Tokens, adapters: AdapterSet = NO_ADAPTERS) -> int:
        """What of the slot is good for `prompt`."""
        if adapters != self.adapters:
            return 0
        return common_prefix(self._tokens[: min(self.length, self.exact)], prompt)


class Choice(msgspec.Struct, frozen=True):
    """A slot for a prompt, and whether its present tokens are another conversation, to be put into the prompt cache."""

    slot: Slot
    refresh: bool


class Slots:
    """`min_copy`: a copy from another slot must save this many tokens more than what the slot has itself."""

    def __init__(self, count: int, capacity: int, *, min_copy: int = 1) -> None:
        self.min_copy = min_copy
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
        """The room running requests take. Idle slots do not count: whoever needs their room may have it."""
        return sum(slot.room_taken for slot in self._slots if slot.busy and not slot.reserved)

    def disposable(self) -> list[Slot]:
        """Slots whose tokens nobody would miss at once, the longest unused first."""
        slots = [slot for slot in self._slots if slot.length and (slot.reserved or not slot.busy)]
        return sorted(slots, key=lambda slot: slot.last_used)

    def choose(
        self,
        prompt: Tokens,
        adapters: AdapterSet = NO_ADAPTERS,
        *,
        share: bool,
        reuse: bool = True,
        id: int | None = None,
        taken: Collection[int] = (),
    ) -> Choice | None:
        """A slot for `prompt` that is not among `taken`; None when there is no idle one. `id` asks for one slot."""
        idle = [
            slot
            for slot in self._slots
            if not slot.busy and (slot.id == id if id is not None else slot.id not in taken)
        ]
        if not idle:
            return None
        if reuse:
            best = max(idle, key=lambda slot: slot.common_prefix(prompt, adapters))
            own = best.common_prefix(prompt, adapters)
            kept = own >= MIN_KEPT * best.length
            if id is not None:
                return Choice(best, refresh=not kept)
            if own > MIN_SIMILARITY * len(prompt):
                if not share:
                    return Choice(best, refresh=not kept)
                small = best.length - own <= SMALL_LOSS
                in_place = small or (kept and all(slot.length for slot in idle))
                if in_place and own + self.min_copy > self.longest(prompt, adapters)[1]:
                    return Choice(best, refresh=False)
        return Choice(min(idle, key=self._cost), refresh=True)

    def _cost(self, slot: Slot) -> tuple[bool, int, int]:
        if slot.length:
            return (True, slot.last_used, slot.id)
        neighbours = self._slots[max(slot.id - 1, 0) : slot.id + 2]
        return (False, -sum(other.busy for other in neighbours), slot.id)

    def take(self, slot: Slot) -> None:
        slot.busy = slot.reserved = True

    def release(self, slot: Slot) -> None:
        if not slot.reserved:
            self._clock += 1
            slot.last_used = self._clock
        slot.busy = slot.reserved = False

    def longest(
        self, prompt: Tokens, adapters: AdapterSet = NO_ADAPTERS, *, beside: Slot | None = None
    ) -> tuple[Slot | None, int]:
        """The slot that shares the longest prefix with `prompt`, not counting `beside`, and the prefix's length."""
        best, length = None, 0
        for slot in self._slots:
            if slot is not beside and (common := slot.common_prefix(prompt, adapters)) > length:
                best, length = slot, common
        return best, length

    def check_integrity(self) -> None:
        """Raises AssertionError when the bookkeeping contradicts itself. Tests call it after every step."""
        ids = [slot.id for slot in self._slots]
        if ids != list(range(len(ids))):
            raise AssertionError(f"slot ids {ids}")
        for slot in self._slots:
            if not 0 <= slot.length <= slot.capacity:
                raise AssertionError(f"slot {slot.id} holds {slot.length} of {slot.capacity} tokens")
            if not (slot.borrowed <= slot.tied <= slot.length):
                raise AssertionError(f"slot {slot.id}: {slot.borrowed} borrowed, {slot.tied} tied, {slot.length} held")
            if slot.reserved and not slot.busy:
                raise AssertionError(f"slot {slot.id} is reserved for nobody")
            if slot.last_used > self._clock:
                raise AssertionError(f"slot {slot.id} was used in the future")
