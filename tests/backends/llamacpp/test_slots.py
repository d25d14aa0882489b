"""Which slot a prompt gets, and what of it need not be computed again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.llamacpp.slots import Choice, Slot, Slots, Tokens, common_prefix

ONE = ((0, 1.0),)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def begin(slots: Slots, prompt: Tokens, share: bool = False, **wish: int) -> Choice | None:
    choice = slots.choose(prompt, share=share, **wish)  # type: ignore[arg-type]
    if choice is not None:
        slots.take(choice.slot)
        choice.slot.reserved = False
    return choice


def use(slots: Slots, *prompt: int, share: bool = False) -> tuple[int, int]:
    """Runs a prompt to its end, without copies; returns the slot it had and what was reused."""
    choice = begin(slots, tokens(*prompt), share)
    assert choice is not None
    slot = choice.slot
    reused = slot.common_prefix(tokens(*prompt))
    slot.truncate(reused)
    slot.append(tokens(*prompt[reused:]))
    slots.release(slot)
    return slot.id, reused


def test_common_prefix() -> None:
    assert common_prefix(tokens(1, 2, 3), tokens(1, 2, 4)) == 2
    assert common_prefix(tokens(1, 2), tokens(1, 2, 3)) == 2
    assert common_prefix(tokens(1), tokens(2)) == 0
    assert common_prefix(tokens(), tokens(2)) == 0


def test_the_longest_common_prefix_wins() -> None:
    for share in (False, True):
        slots = Slots(3, 16)
        use(slots, 1, 2, 3, 4, share=share)
        use(slots, 9, 8, 7, share=share)
        assert use(slots, 1, 2, 3, 5, share=share) == (0, 3)
        assert use(slots, 9, 8, 6, share=share) == (1, 2)


def test_a_small_common_prefix_does_not_cost_another_conversation_its_cache() -> None:
    slots = Slots(2, 64)
    use(slots, *range(20))
    assert use(slots, 0, *range(30, 50)) == (1, 0), "an empty slot is better"


def test_else_the_slot_idle_for_longest() -> None:
    slots = Slots(2, 64)
    use(slots, 1, 2, 3)
    use(slots, 4, 5, 6)
    use(slots, 1, 2, 3)
    assert use(slots, 7, 8, 9) == (1, 0)


def test_what_can_be_copied_is_not_taken_from_another_conversation() -> None:
    system, one, other = range(50), range(100, 200), range(200, 240)
    slots = Slots(2, 256)
    use(slots, *system, *one)
    assert use(slots, *system, *other, share=True)[0] == 1
    slots = Slots(2, 256)
    use(slots, *system, *one)
    assert use(slots, *system, *other, share=False) == (0, 50)


def test_what_a_busy_slot_offers_beats_a_little_of_ones_own() -> None:
    long = tokens(*range(100))
    slots = Slots(3, 256)
    use(slots, *range(20))
    choice = begin(slots, tokens(7, 7))
    assert choice is not None
    choice.slot.replace(long)
    copying = slots.choose(long, share=True)
    alone = slots.choose(long, share=False)
    assert copying is not None
    assert alone is not None
    assert (copying.slot.id, copying.refresh) == (2, True)
    assert (alone.slot.id, alone.refresh) == (0, False)
    assert slots.longest(long) == (choice.slot, 100)
    assert slots.longest(long, beside=choice.slot) == (slots[0], 20)


def test_a_conversation_that_is_cut_short_goes_to_the_prompt_cache() -> None:
    slots = Slots(1, 64)
    use(slots, *range(40))
    assert slots.choose(tokens(*range(20), 99), share=False) == Choice(slots[0], refresh=False)
    assert slots.choose(tokens(*range(19), 99), share=False) == Choice(slots[0], refresh=True)
    assert slots.choose(tokens(5), share=False) == Choice(slots[0], refresh=True)


def test_empty_slots_are_filled_where_busy_ones_are() -> None:
    slots = Slots(6, 16)
    taken = [begin(slots, tokens(i, i)) for i in range(5)]
    assert [choice.slot.id for choice in taken if choice] == [0, 1, 2, 3, 4]
    for id in (1, 3):
        slots.release(slots[id])
    assert [c.slot.id for c in (begin(slots, tokens(9)), begin(slots, tokens(8)), begin(slots, tokens(7))) if c] == [
        1,
        3,
        5,
    ]


def test_wishes() -> None:
    slots = Slots(3, 16)
    use(slots, 1, 2, 3)
    wished = slots.choose(tokens(1, 2, 3), share=True, id=2)
    assert wished is not None
    assert wished.slot.id == 2
    unused = slots.choose(tokens(1, 2, 3), share=True, reuse=False)
    assert unused is not None
    assert unused.slot.id == 1
    elsewhere = slots.choose(tokens(1, 2, 3), share=True, taken={0, 1})
    assert elsewhere is not None
    assert elsewhere.slot.id == 2
    slots.take(slots[2])
    assert slots.choose(tokens(1), share=True, id=2) is None
    assert slots.choose(tokens(1), share=True, taken={0, 1}) is None


def test_busy_slots_are_not_given_away() -> None:
    slots = Slots(1, 16)
    choice = slots.choose(tokens(1, 2), share=False)
    assert choice is not None
    slots.take(choice.slot)
    assert slots.choose(tokens(1, 2), share=False) is None
    choice.slot.append(tokens(1, 2))
    assert (slots.busy, slots.busy_tokens) == (1, 0), "reserved: the tokens are still anybody's"
    assert slots.disposable() == [choice.slot]
    choice.slot.reserved = False
    assert (slots.busy_tokens, slots.disposable()) == (2, [])
    slots.release(choice.slot)
    assert (slots.busy, slots.busy_tokens) == (0, 0)


def test_a_slot_never_holds_more_than_it_can() -> None:
    slots = Slots(1, 3)
    with pytest.raises(ValueError, match="4 tokens in a slot of 3"):
        slots[0].append(tokens(1, 2, 3, 4))


def test_what_a_context_shift_moved_is_no_use_to_other_prompts() -> None:
    slot = Slot(0, 16)
    slot.append(tokens(0, 1, 2, 3, 4, 5))
    slot.discard(2, 2)
    assert slot.tokens.tolist() == [0, 1, 4, 5]
    assert slot.common_prefix(tokens(0, 1, 4, 5)) == 2
    slot.discard(1, 1)
    assert slot.common_prefix(tokens(0, 4, 5)) == 1
    slot.truncate(1)
    slot.append(tokens(7, 8))
    assert slot.common_prefix(tokens(0, 7, 8)) == 3


def test_tokens_are_only_good_for_the_same_adapters() -> None:
    prompt = tokens(*range(40))
    slots = Slots(2, 64)
    slots[0].append(prompt)
    slots[0].adapters = ONE
    for share in (False, True):
        other, same = slots.choose(prompt, share=share), slots.choose(prompt, ONE, share=share)
        assert other == Choice(slots[1], refresh=True)
        assert same == Choice(slots[0], refresh=False)
    assert slots.choose(prompt, share=True, id=0) == Choice(slots[0], refresh=True)
    assert slots.longest(prompt) == (None, 0)
    assert slots.longest(prompt, ONE) == (slots[0], 40)
    assert len(slots[0].computed_with(ONE)) == 40
    assert len(slots[0].computed_with(())) == 0


class SlotsMachine(RuleBasedStateMachine):
    """Any order of use keeps the books straight, and what is reused is really there."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3, 8)
        self.kv: dict[int, list[int]] = {0: [], 1: [], 2: []}  # an independent account of what was computed
        self.busy: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        computed=st.integers(0, 8),
        share=st.booleans(),
        taken=st.sets(st.integers(0, 2), max_size=2),
    )
    def run(self, prompt: list[int], computed: int, share: bool, taken: set[int]) -> None:
        choice = self.slots.choose(tokens(*prompt), share=share, taken=taken)
        if choice is None:
            assert len(self.busy | taken) == 3
            return
        id = choice.slot.id
        assert id not in self.busy | taken
        self.slots.take(choice.slot)
        choice.slot.reserved = False
        source, common = self.slots.longest(tokens(*prompt))
        assert source is None or self.kv[source.id][:common] == prompt[:common]
        reused = choice.slot.common_prefix(tokens(*prompt))
        assert reused <= common
        rest = prompt[reused:][:computed]  # a cancelled prefill computes only some
        self.kv[id] = prompt[:reused] + rest
        choice.slot.truncate(reused)
        choice.slot.append(tokens(*rest))
        self.busy.add(id)

    @rule(id=st.integers(0, 2))
    def end(self, id: int) -> None:
        if id in self.busy:
            self.busy.discard(id)
            self.slots.release(self.slots[id])

    @invariant()
    def books_are_straight(self) -> None:
        self.slots.check_integrity()
        assert {slot.id: slot.tokens.tolist() for slot in self.slots} == self.kv
        assert {slot.id for slot in self.slots if slot.busy} == self.busy


TestSlotsMachine = SlotsMachine.TestCase
