"""Moves tokens: into slots, from slot to slot, and between slots and the prompt cache. The only writer of both books.

Each operation changes llama.cpp's KV cache and `Slots` together, so that the books always say what the cache holds.
All of it is on the engine thread.

An idle slot keeps its tokens until someone needs the slot or the room; then they go to the prompt cache. llama-server's
`cache_idle_slots` puts idle slots into its prompt cache whenever a request starts, and empties them where all share one
KV cache: its slots cannot take tokens from each other, and it drops idle ones for room without saving them. Here a
prompt copies what it needs from any slot, and the slot keeps it for the next one, while an entry of the prompt cache
serves one prompt and is gone; and what makes room is saved first. So there is no such setting. What it could win is
speed in a common cache, where steps also look at idle tokens: 12.8 ms with none, 16.2 with 4,608 (SmolLM2-135M, one
sequence, 2 threads). With one cache per slot, the default, they cost nothing.

One cache per slot or one for all: where conversations have nothing in common, a step in the common cache looks at the
tokens of all of them for each; where they share a long beginning, it looks at that once. Milliseconds a step with one
cache per slot / in a common one (SmolLM2-135M Q4_1, 2 threads, no flash attention):

    8 streams, 500 tokens each, nothing shared      56 / 87
    8 streams that share 1,500 tokens              117 / 79
    16 streams that share 1,500 tokens             209 / 130

With one per slot a copy costs 8 ms per 2,048 tokens of a slot (`_min_copy`), in a common one nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from backends.adapters import AdapterSet
from backends.llamacpp.bindings import Batch, Context, LlamaCppError
from backends.llamacpp.prompt_cache import PromptCache, RestoreFailed, State
from backends.llamacpp.slots import Choice, Slot, Slots, Tokens
from protocols.errors import InvalidRequest, Overloaded
from protocols.request import SlotOptions

log = logging.getLogger(__name__)


class KvCache:
    def __init__(self, context: Context, prompts: PromptCache | None) -> None:
        self.slots = Slots(context.sequences, context.sequence_length, min_copy=_min_copy(context))
        self.prompts = prompts
        self._context = context

    @property
    def capacity(self) -> int:
        return self._context.kv_size

    def fits(self, tokens: int) -> bool:
        """Whether `tokens` more have room beside what running requests hold. One cache per slot always has it."""
        return not self._context.unified or self.slots.busy_tokens + tokens <= self.capacity

    def within_reach(self, prompt: Tokens, adapters: AdapterSet) -> int:
        """How many of the first tokens of `prompt` need not be computed, wherever they are."""
        _, length = self.slots.longest(prompt, adapters)
        return length if self.prompts is None else max(length, self.prompts.longest(prompt, adapters))

    # --- a request comes and goes ---

    def reserve(
        self,
        prompt: Tokens,
        adapters: AdapterSet,
        wish: SlotOptions,
        *,
        share: bool,
        taken: Collection[int] = (),
    ) -> Choice | None:
        """A slot for `prompt`. Its tokens stay until `fill`, as a source for others."""
        choice = self.slots.choose(prompt, adapters, share=share, reuse=wish.reuse, id=wish.id, taken=taken)
        if choice is not None:
            self.slots.take(choice.slot)
        return choice

    def fill(self, choice: Choice, prompt: Tokens, adapters: AdapterSet, *, share: bool, reuse: bool = True) -> None:
        """Brings all that is known of `prompt` into its slot, and keeps elsewhere what is lost there.

        The last token is always computed again: its logits are where the answer begins.
        """
        slot = choice.slot
        if choice.refresh and self.prompts is not None:
            self._refresh(slot, prompt, adapters, share=share, reuse=reuse)
        slot.reserved = False
        usable = len(prompt) - 1
        own = min(slot.common_prefix(prompt, adapters), usable) if reuse else 0
        source, common = self.slots.longest(prompt, adapters, beside=slot) if share and reuse else (None, 0)
        common = min(common, usable)
        if source is not None and common >= own + self.slots.min_copy:
            self._copy(source, slot, common)
        else:
            self._truncate(slot, own)
        slot.adapters = adapters

    def release(self, slot: Slot) -> None:
        self.slots.release(slot)

    def clear(self, slot: Slot) -> None:
        self._context.forget(slot.id)
        slot.truncate(0)

    # --- room ---

    def evict(self, tokens: int) -> bool:
        """Frees room for `tokens`, taken from idle slots, the longest unused first. False when there was none."""
        freed = 0
        for slot in self.slots.disposable():
            if freed >= tokens:
                break
            freed += slot.room_taken
            self.put_away(slot)
        return freed > 0

    def suspend(self, slot: Slot) -> None:
        """Takes all tokens from a running request, which gives up its slot."""
        self.put_away(slot)
        self.slots.release(slot)

    def shift(self, slot: Slot, keep: int, count: int) -> bool:
        """Drops `count` tokens behind the first `keep`. False: the rest would not be right, or not only this slot's."""
        if not self._context.can_shift or slot.tied > keep + count:
            return False
        self._context.shift(slot.id, keep, count)
        slot.discard(keep, count)
        return True

    def cut(self, slot: Slot, length: int) -> None:
        """Keeps at most the first `length` tokens; none, if this model's states cannot be cut."""
        self._truncate(slot, min(length, slot.length))

    def rewind(self, slot: Slot) -> bool:
        """Takes back what a failed decode may have stored. False: all of the slot is lost."""
        if self._context.truncate(slot.id, slot.length):
            return True
        self.clear(slot)
        return False

    # --- what operators do to an idle slot ---

    def export(self, slot: Slot) -> tuple[Tokens, State]:
        """A copy of what the slot holds that is of use to another prompt, with its keys and values."""
        self._settle(slot)
        if slot.exact < slot.length:
            self._truncate(slot, slot.exact)
        state = np.empty(self._context.state_size(slot.id), np.uint8)
        if (written := self._context.save(slot.id, state)) != len(state):
            raise LlamaCppError(f"slot {slot.id}: {written} bytes of a state of {len(state)} could be read")
        return slot.tokens.copy(), state

    def put_away(self, slot: Slot) -> None:
        """Empties the slot; its conversation goes to the prompt cache."""
        self._save(slot)
        self.clear(slot)

    def put_back(self, slot: Slot, tokens: Tokens, state: State, adapters: AdapterSet) -> None:
        """Makes an empty slot what `export` gave. It stays empty on errors; `Overloaded`: no room now."""
        if len(tokens) > slot.capacity:
            raise InvalidRequest(f"{len(tokens)} tokens are too many for a slot of {slot.capacity}", param="filename")
        self._settle(slot)
        if self._context.unified:
            self._vacate(len(tokens))
            if not self.fits(len(tokens)):
                raise Overloaded(f"The KV cache has no room for {len(tokens)} tokens now", retry_after_s=1.0)
        if self._restore(slot, state) != len(state) or self._context.length(slot.id) != len(tokens):
            self.clear(slot)
            raise RestoreFailed(f"a state of {len(state)} bytes could not be restored")
        slot.replace(tokens)
        slot.adapters = adapters

    # --- below ---

    def _settle(self, slot: Slot) -> None:
        """Makes what waits for the next decode happen now: computes a token behind the others and takes it back."""
        if slot.id in self._context.unsettled:
            batch = Batch(1)
            batch.add([0], slot.id, slot.length, logits=False)
            self._context.decode(batch)
            self.rewind(slot)

    def _truncate(self, slot: Slot, length: int) -> None:
        if length == slot.length and length:
            return
        if not length or not self._context.truncate(slot.id, length):
            self.clear(slot)  # a recurrent state cannot be cut, only dropped
        slot.truncate(length)

    def _copy(self, source: Slot, slot: Slot, length: int) -> None:
        if not self._context.copy(source.id, slot.id, length):
            self.clear(slot)
            return
        slot.replace(source.tokens[:length])
        if self._context.unified:
            slot.borrowed = slot.tied = length
            source.tied = max(source.tied, length)

    def _refresh(self, slot: Slot, prompt: Tokens, adapters: AdapterSet, *, share: bool, reuse: bool) -> None:
        """The slot's conversation into the prompt cache, and the one that `prompt` continues out of it."""
        assert self.prompts is not None
        self._save(slot)
        if reuse and slot.id not in self._context.unsettled:
            others = self.slots.longest(prompt, adapters, beside=slot)[1] if share else 0
            best = None
            if self._context.unified:  # one cache per slot is never short of room
                best = self.prompts.best(slot.computed_with(adapters), prompt, adapters, within_reach=others)
            if best is not None:
                self._vacate(len(best.tokens))
            try:
                entry = self.prompts.load(
                    slot.computed_with(adapters),
                    prompt,
                    lambda state: self._restore(slot, state),
                    adapters,
                    within_reach=others,
                )
            except RestoreFailed as error:
                log.warning("slot %d: %s", slot.id, error)
                self.clear(slot)
            else:
                if entry is not None:
                    slot.replace(entry.tokens)
                    slot.adapters = entry.adapters
        self.prompts.update()

    def _vacate(self, tokens: int) -> None:
        """Room for `tokens` in a common cache, taken from idle slots as far as there is too little."""
        self.evict(tokens - (self.capacity - sum(slot.room_taken for slot in self.slots)))

    def _restore(self, slot: Slot, state: State) -> int:
        slot.truncate(0)  # whatever comes of it
        self._context.forget(slot.id)
        return self._context.restore(slot.id, state)

    def _save(self, slot: Slot) -> None:
        """What waits for the next decode cannot be read yet. It is a copy, so nothing is lost but time."""
        if self.prompts is None or slot.id in self._context.unsettled:
            return
        if slot.exact < slot.length:
            self._truncate(slot, slot.exact)  # the rest remembers tokens that are gone
        if not slot.length:
            return
        entry = self.prompts.alloc(slot.tokens, self._context.state_size(slot.id), adapters=slot.adapters)
        if entry is not None and self._context.save(slot.id, entry.state) != len(entry.state):
            log.warning("slot %d: its state could not be read", slot.id)
            self.prompts.discard(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError when a book is wrong or llama.cpp holds something else. Tests call it after a step."""
        self.slots.check_integrity()
        if self.prompts is not None:
            self.prompts.check_integrity()
        for slot in self.slots:
            if (held := self._context.length(slot.id)) != slot.length:
                raise AssertionError(f"slot {slot.id} holds {held} tokens, on the books are {slot.length}")
        if sum(slot.room_taken for slot in self.slots) > self.capacity:
            raise AssertionError("more tokens on the books than the KV cache has room for")


def _min_copy(context: Context) -> int:
    """How many tokens must be saved to make a copy worth it.

    In a common KV cache it costs nothing. Between caches of their own it moves all of a slot, used or not: 8 ms for
    2,048 tokens of SmolLM2-135M on 2 threads, which is what computing 2 tokens takes. Larger models compute longer per
    token they store, so this errs on the side of computing.
    """
    return 1 if context.unified else max(4, context.sequence_length // 512)
