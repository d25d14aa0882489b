"""What the runner has done so far, and the proof that its books are in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

from backends.base import BackendStats
from backends.llamacpp.kv_cache import KvCache
from backends.llamacpp.rate import Rate
from backends.llamacpp.scheduler import Task
from backends.llamacpp.slots import Slots


class Totals:
    """Counts that only ever grow: tokens, but for steps, the requests in them, and how often there were `guesses`."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.generated = self.steps = 0
        self.guessed = self.guessed_right = self.guesses = 0
        self.step_requests = 0
        self.prefill_rate = Rate()

    def stats(
        self,
        kv: KvCache,
        waiting: Collection[Task],
        paused: Collection[Task],
        running: Collection[Task],
        *,
        context_length: int,
    ) -> BackendStats:
        """Every choice of a request counts as one that runs or waits, its prompt counts once."""
        slots, prompts = kv.slots, kv.prompts
        return BackendStats(
            slots=len(slots),
            running=len(running),
            waiting=len(waiting) + len(paused),
            queued_prompt_tokens=sum(len(t.generation.prompt) for t in waiting if t.generation.leads),
            uncached_tokens_queued=sum(t.remaining for t in chain(waiting, paused, running)),
            kv_tokens_used=slots.busy_tokens,
            kv_tokens_capacity=min(len(slots) * context_length, kv.capacity),
            prompt_cache_tokens=prompts.n_tokens if prompts is not None else 0,
            prompt_cache_bytes=prompts.size if prompts is not None else 0,
            prompt_tokens_total=self.prompt,
            cached_tokens_total=self.cached,
            generated_tokens_total=self.generated,
            steps_total=self.steps,
            prefill_tokens_per_s=self.prefill_rate.per_s,
            draft_tokens_total=self.guessed,
            draft_accepted_total=self.guessed_right,
            drafts_total=self.guesses,
            step_requests_total=self.step_requests,
        )


def check_books(
    slots: Slots,
    waiting: Collection[Task],
    paused: Collection[Task],
    running: Collection[Task],
    requests: Iterable[list[Task]],
) -> None:
    """Raises AssertionError unless every task of `requests` that goes on is in one place, with the slot it says."""
    owned = [task.choice.slot.id for task in running if task.choice is not None]
    busy = [slot.id for slot in slots if slot.busy]
    if sorted(owned) != busy or len(owned) != len(running):
        raise AssertionError(f"slots {busy} are busy, tasks hold {owned}")
    for task in (*waiting, *paused):
        if task.choice is not None or task.done:
            raise AssertionError("a waiting task holds a slot, or has ended")
    for task in running:
        assert task.choice is not None
        if task.active and task.choice.slot.adapters != task.adapters:
            raise AssertionError(f"slot {task.choice.slot.id} was computed with other adapters")
        if task.choice.slot.reserved != (task.leader is not None):
            raise AssertionError(f"slot {task.choice.slot.id}: only a follower's slot is reserved")
    known = {task for tasks in requests for task in tasks if not task.done}
    if known != {*waiting, *paused, *running}:
        raise AssertionError("a task was lost")
