"""What the slots hold and who has them, for whoever watches."""

from __future__ import annotations

from collections.abc import Iterable

from backends.llamacpp.scheduler import Task
from backends.llamacpp.slots import Slot, Slots
from protocols.calls import SlotState


def slot_states(slots: Slots, tasks: Iterable[Task], context_length: int) -> list[SlotState]:
    """One for each slot, in their order. `tasks` are those that have one."""
    owners = {task.choice.slot.id: task for task in tasks if task.choice is not None}
    return [_state(slot, owners.get(slot.id), context_length) for slot in slots]


def _state(slot: Slot, task: Task | None, context_length: int) -> SlotState:
    if task is None:
        return SlotState(slot.id, context_length, cached_tokens=slot.length)
    generation = task.generation
    prompt_tokens = len(generation.prompt)
    return SlotState(
        slot.id,
        context_length,
        cached_tokens=slot.length,
        request=generation.id,
        prompt_tokens=prompt_tokens,
        processed_tokens=min(slot.length, prompt_tokens) if task.active else 0,
        generated_tokens=task.sequence.answered,
        max_tokens=generation.max_tokens,
        speculative=generation.speculate,
        sampling=generation.sampling.params.to_sampling(),
    )
