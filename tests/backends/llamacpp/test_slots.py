"""Which slot a prompt gets, and what of it need not be computed again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.llamacpp.slots import Slots, Tokens


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def use(slots: Slots, *prompt: int) -> tuple[int, int]:
    """Runs a prompt to its end; returns the slot it had and what was reused."""
    choice = slots.acquire(tokens(*prompt))
    assert choice is not None
    choice.slot.append(tokens(*prompt[choice.reusable :]))
    slots.release(choice.slot)
    return choice.slot.id, choice.reusable


def test_the_longest_common_prefix_wins() -> None:
    slots = Slots(3, 16)
    use(slots, 1, 2, 3, 4)
    use(slots, 9, 8, 7)
    assert use(slots, 1, 2, 3, 5) == (0, 3)
    assert use(slots, 9, 8, 6) == (1, 2)


def test_the_last_prompt_token_is_always_computed() -> None:
    slots = Slots(1, 16)
    use(slots, 1, 2, 3)
    assert use(slots, 1, 2, 3) == (0, 2)
    assert use(slots, 1) == (0, 0)


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


def test_busy_slots_are_not_given_away() -> None:
    slots = Slots(1, 16)
    choice = slots.acquire(tokens(1, 2))
    assert choice is not None
    assert slots.acquire(tokens(1, 2)) is None
    assert (slots.busy, slots.busy_tokens) == (1, 0)
    choice.slot.append(tokens(1, 2))
    assert slots.busy_tokens == 2
    slots.release(choice.slot)
    assert (slots.busy, slots.busy_tokens) == (0, 0)


def test_a_slot_never_holds_more_than_it_can() -> None:
    slots = Slots(1, 3)
    with pytest.raises(ValueError, match="4 tokens in a slot of 3"):
        slots[0].append(tokens(1, 2, 3, 4))


class SlotsMachine(RuleBasedStateMachine):
    """Any order of use keeps the books straight, and what is reused is really there."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3, 8)
        self.kv: dict[int, list[int]] = {0: [], 1: [], 2: []}  # an independent account of what was computed
        self.busy: set[int] = set()

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6), computed=st.integers(0, 8))
    def run(self, prompt: list[int], computed: int) -> None:
        choice = self.slots.acquire(tokens(*prompt))
        if choice is None:
            assert len(self.busy) == 3
            return
        id = choice.slot.id
        assert id not in self.busy
        assert choice.reusable < len(prompt)
        assert self.kv[id][: choice.reusable] == prompt[: choice.reusable]
        rest = prompt[choice.reusable :][:computed]  # a cancelled prefill computes only some
        self.kv[id] = prompt[: choice.reusable] + rest
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


TestSlotsMachine = SlotsMachine.TestCase
