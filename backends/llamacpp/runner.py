"""Everything that happens on the engine thread: requests get slots, steps are computed, tokens become frames.

Tasks go waiting -> running -> gone. Running ones hold a slot; some of them only follow another task's prompt (see
`scheduler`). When the KV cache is full, in this order: guessed tokens are not computed, idle slots give up what they
remember (to the prompt cache), prompts are computed in smaller pieces, the youngest task is paused, and goes on when
there is room. A task that is alone and still finds no room is refused; nobody else is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain, islice

import numpy as np

from backends.adapters import NO_ADAPTERS, AdapterSet
from backends.base import BackendStats
from backends.llamacpp.accounts import Totals, check_books
from backends.llamacpp.bindings import DECODED, NO_KV_SPACE, Batch, Context, LlamaCppError, LoraAdapter, Model
from backends.llamacpp.drafting import Drafting
from backends.llamacpp.kv_cache import KvCache
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.sampler import Sampler
from backends.llamacpp.scheduler import (
    Task,
    Work,
    leader,
    plan,
    shift_range,
    shrunk,
    still_following,
    uncached,
    without_guesses,
    youngest,
)
from backends.llamacpp.sequence import NO_TOKENS, Sequence
from backends.llamacpp.slot_states import slot_states
from backends.llamacpp.slots import Slot
from backends.llamacpp.streams import Result, Stream
from backends.llamacpp.turns import Turns
from protocols.calls import SlotState
from protocols.errors import ContextOverflow, InternalError, InvalidRequest, ServingError
from protocols.events import Frame

log = logging.getLogger(__name__)

_COMPARED = 64
"""With how many of those who came before it a new prompt is compared, to tell how much of it is left to compute."""

_HEADROOM = 32
"""Tokens each running request may still generate before a paused one that just returned must make room again."""


class Runner:
    def __init__(
        self,
        model: Model,
        context: Context,
        *,
        context_length: int,
        prefill_chunk: int,
        prefix_sharing: bool = True,
        prompts: PromptCache | None = None,
        adapters: tuple[LoraAdapter, ...] = (),
        drafting: Drafting | None = None,
    ) -> None:
        """Without `drafting`, no tokens are guessed."""
        self.kv = KvCache(context, prompts)
        self.results: list[Result[Frame]] = []
        self.taken = 0  # what was submitted, for whoever counts what is on its way
        self._model = model
        self._context = context
        self._context_length = context_length
        self._prefill_chunk = prefill_chunk
        self.shares_prefixes = prefix_sharing
        self._drafting = drafting
        self._oversubscribed = context.unified and context.kv_size < context.sequences * context_length
        self._batch = Batch(context.batch_size)
        self._adapters = adapters
        self._applied = NO_ADAPTERS
        self._turns = Turns()
        self._when_idle: list[tuple[int, Callable[[], None]]] = []
        self._tasks: dict[Stream, list[Task]] = {}
        # Dicts keep the order of arrival.
        self._waiting: dict[Task, None] = {}
        self._paused: dict[Task, None] = {}
        self._running: dict[Task, None] = {}
        self._tickets = 0
        self._totals = Totals()

    @property
    def running(self) -> bool:
        return bool(self._running)

    @property
    def idle(self) -> bool:
        """Nothing to do, now or later, for the requests there are and those who wait for their slots."""
        return not self._tasks and not self._when_idle

    def submit(self, stream: Stream) -> None:
        self.taken += stream.generation.n
        tasks = self._tasks[stream] = []
        for generation in stream.generation.choices():
            sequence = Sequence(generation, self._model, self._context_length, time.monotonic)
            task = Task(self._tickets, sequence, stream)
            self._tickets += 1
            tasks.append(task)
            self._waiting[task] = None
        for task in tasks:
            while len(task.sequence.tokens) >= self._context_length and not task.sequence.finished:
                self._shift_tokens(task)  # what it resumes had outgrown the context
            if task.sequence.finished:
                self._emit(task, task.sequence.complete_frame())
        first = tasks[0]
        if not first.done:
            first.uncached = self._uncached(first)

    def cancel(self, stream: Stream) -> None:
        for task in self._tasks.pop(stream, ()):
            self._leave(task)

    def when_idle(self, slot: int, action: Callable[[], None]) -> None:
        """Calls `action` between two steps, as soon as no request has `slot`. Only a request for that slot waits."""
        self._when_idle.append((slot, action))

    def close(self) -> None:
        for stream in list(self._tasks):
            self.cancel(stream)

    # --- who runs ---

    def admit(self) -> None:
        """Slots to those who wait longest. Followers whose leader is done, or gone, begin."""
        if self._when_idle:
            self._act_on_idle_slots()
        for task in [task for task in self._running if task.leader is not None]:
            if task in self._running and not still_following(task):
                self._follow_or_begin(task)
        held: set[int] = set()  # slots that someone further ahead insists on
        for task in [*sorted(self._paused, key=lambda task: task.ticket), *self._waiting]:
            if self.kv.slots.busy == len(self.kv.slots):
                return
            wish = task.generation.slot
            if wish.id is not None and (wish.id in held or self.kv.slots[wish.id].busy):
                held.add(wish.id)
                continue
            if task.done:
                continue
            if not self._has_room(task):
                return
            task.choice = self.kv.reserve(
                task.sequence.tokens, task.adapters, wish, share=self._shares(task), taken=held
            )
            if task.choice is None:
                return
            self._waiting.pop(task, None)
            self._paused.pop(task, None)
            self._running[task] = None
            self._follow_or_begin(task)

    def _act_on_idle_slots(self) -> None:
        actions, self._when_idle = self._when_idle, []
        for slot, action in actions:
            if self.kv.slots[slot].busy:
                self._when_idle.append((slot, action))
            else:
                action()

    def _uncached(self, task: Task) -> int:
        if not task.generation.slot.reuse:
            return len(task.sequence.tokens)
        came_before = chain(reversed(self._waiting), reversed(self._running))
        latest = islice(came_before, _COMPARED) if self.shares_prefixes else ()
        others = [other for other in latest if other.stream is not task.stream]
        return uncached(task, others, self.kv.within_reach(task.sequence.tokens, task.adapters))

    def _shares(self, task: Task) -> bool:
        """The choices of one request share their prompt, whatever the setting."""
        return self.shares_prefixes or task.generation.n > 1

    def _has_room(self, task: Task) -> bool:
        """Whether it can run without another one having to stop for it soon."""
        if not self._running or not self._oversubscribed:
            return True
        tokens, known = task.sequence.tokens, 0
        if self._shares(task):
            known = self.kv.slots.longest(tokens, task.adapters)[1]
            if (head := leader(task, self._running, known, self.kv.slots.min_copy)) is not None:
                known = head[1]
        coming = sum(other.sequence.uncomputed for other in self._running if other.active)
        return self.kv.fits(len(tokens) - known + coming + _HEADROOM * (len(self._running) + 1))

    def _follow_or_begin(self, task: Task) -> None:
        assert task.choice is not None
        task.leader = None
        share, reuse = self._shares(task), task.generation.slot.reuse
        tokens = task.sequence.tokens
        if share and reuse:
            reach = self.kv.within_reach(tokens, task.adapters)
            head = leader(task, self._running, reach, self.kv.slots.min_copy)
            if head is not None:
                task.leader, task.promised = head
                return
        self.kv.fill(task.choice, tokens, task.adapters, share=share, reuse=reuse or task.begun)
        if task.begun:
            task.sequence.unpause(task.choice.slot)
        else:
            self._begin(task, task.choice.slot)

    def _begin(self, task: Task, slot: Slot) -> None:
        task.begun = True
        generation = task.generation
        try:
            sampler = Sampler.of(self._model, generation.sampling, generation.prompt, generation.resume)
        except (InvalidRequest, LlamaCppError) as error:
            self._fail(task, error)
            return
        if self._drafting is not None and generation.speculate:
            task.drafter = self._drafting.drafter(task.sequence.tokens)
        if not generation.leads:  # a prompt counts once, as the first choice found it
            task.sequence.admit(slot, sampler, self._tasks[task.stream][0].cached_tokens)
            return
        task.cached_tokens = min(slot.length, len(generation.prompt))
        self._totals.prompt += len(generation.prompt)
        self._totals.cached += task.cached_tokens
        self._emit(task, task.sequence.admit(slot, sampler, task.cached_tokens))

    # --- a step ---

    def step(self) -> None:
        for task in list(self._running):
            slot_full = task.active and task.sequence.slot.length >= self._context_length
            if slot_full and not task.sequence.uncomputed:
                self._shift(task)
        adapters = self._turns.next(task.adapters for task in self._running if task.active)
        if adapters is None:
            return
        work = plan(self._running, self._batch.capacity, self._prefill_chunk, adapters)
        self._apply(adapters)
        if self._drafting is not None:
            work = self._drafting.extend(work, self._batch.capacity)
        started = time.monotonic()
        self._compute(work)
        self._totals.steps += 1
        self._totals.step_requests += len(work)
        prefilled = sum(len(part.tokens) for part in work if len(part.tokens) > 1 + part.guesses)
        self._totals.prefill_rate.add(prefilled, time.monotonic() - started)

    def _apply(self, adapters: AdapterSet) -> None:
        if adapters != self._applied:
            self._context.apply_adapters([(self._adapters[id], scale) for id, scale in adapters])
            self._applied = adapters

    def _compute(self, work: list[Work]) -> None:
        """Computes `work` in one decode if it can, in several if it must, and draws the tokens that follow."""
        if not work:
            return
        self._batch.clear()
        rows = []
        for part in work:
            slot = part.task.sequence.slot
            rows.append(self._batch.add(part.tokens, slot.id, slot.length, logits=part.outputs))
        code = self._context.decode(self._batch)
        if code == NO_KV_SPACE:
            self._make_room(work)
            return
        if code != DECODED:
            self._isolate(work, code)
            return
        for part in work:
            part.task.sequence.slot.append(part.tokens)
        for part, row in zip(work, rows, strict=True):
            task = part.task
            if task.done:  # another choice of the same request failed just now
                self._take_back(part, part.guesses)
                continue
            if (progress := task.sequence.progress(part.logits)) is not None:
                self._emit(task, progress)
            if part.logits:
                self._draw(part, row)

    def _draw(self, part: Work, row: int) -> None:
        task, guesses, right = part.task, part.guesses, 0
        try:
            if guesses:
                first = row - guesses
                frame, right = task.sequence.draw_behind_guesses(self._context, first, part.tokens[1:])
            else:
                frame = task.sequence.draw(self._context, row)
        except (InvalidRequest, LlamaCppError) as error:
            self._take_back(part, guesses)
            self._fail(task, error)
            return
        self._totals.generated += len(frame.tokens)
        if task.drafter is not None:
            task.drafter.feed(frame.tokens)
            self._totals.guessed += guesses
            self._totals.guessed_right += right
            self._totals.guesses += bool(guesses)
            self._take_back(part, guesses - right)
        self._emit(task, frame)

    def _take_back(self, part: Work, count: int) -> None:
        """The last `count` tokens of `part` were guessed wrong: the slot forgets them."""
        if count:
            slot = part.task.sequence.slot
            self.kv.cut(slot, slot.length - count)

    # --- trouble ---

    def _make_room(self, work: list[Work]) -> None:
        """There was no room for `work`, and nothing of it was computed."""
        if (certain := without_guesses(work)) is not None:
            self._compute(certain)
        elif self.kv.evict(sum(len(part.tokens) for part in work)):
            self._compute(work)
        elif (less := shrunk(work)) is not None:
            self._compute(less)
        else:
            self._pause_youngest()
            self._compute([part for part in work if part.task.active])

    def _pause_youngest(self) -> None:
        task = youngest(self._running)
        if task is None:
            return
        if sum(other.active for other in self._running) == 1:
            log.error("request %s finds no room, though it is alone", task.generation.id)
            self._fail(task, ContextOverflow.of(len(task.generation.prompt), self.kv.capacity))
            return
        log.info("request %s waits: the KV cache is full", task.generation.id)
        slot = task.sequence.slot
        task.sequence.pause()
        task.choice = None
        del self._running[task]
        self._paused[task] = None
        self.kv.suspend(slot)
        task.uncached = self._uncached(task)

    def _isolate(self, work: list[Work], code: int) -> None:
        """The decode of `work` failed. Finds the part that can be computed: one request's trouble stays its own."""
        log.warning("llama_decode answered %d for %d requests", code, len(work))
        for part in work:
            if not self.kv.rewind(part.task.sequence.slot):
                self._fail(part.task, LlamaCppError("its state was lost with a failed decode"))
        work = [part for part in work if not part.task.done]
        if (certain := without_guesses(work)) is not None:
            self._compute(certain)
        elif len(work) > 1:
            middle = len(work) // 2
            self._compute(work[:middle])
            self._compute([part for part in work[middle:] if part.task.active])
        elif work:
            self._fail(work[0].task, LlamaCppError(f"it cannot be computed: llama_decode answered {code}"))

    def _shift(self, task: Task) -> None:
        """The context of `task` is full: it forgets old tokens and goes on."""
        sequence = task.sequence
        slot = sequence.slot
        keep, count = shift_range(task, slot.length, self._context_length, self._model.adds_bos)
        if self.kv.shift(slot, keep, count):
            sequence.shifted = True
            sequence.tokens = NO_TOKENS
            return
        sequence.tokens = np.append(slot.tokens, np.int32(sequence.next_token))
        self._shift_tokens(task)
        self.kv.cut(slot, keep)

    def _shift_tokens(self, task: Task) -> None:
        """The same to tokens that are not computed yet."""
        task.sequence.shifted = True
        tokens = task.sequence.tokens
        keep, count = shift_range(task, len(tokens), self._context_length, self._model.adds_bos)
        task.sequence.tokens = np.concatenate([tokens[:keep], tokens[keep + count :]])

    # --- the end ---

    def _emit(self, task: Task, frame: Frame) -> None:
        if task.sequence.finished:
            self._leave(task)
            last = all(other.done for other in self._tasks[task.stream])
            if last:
                del self._tasks[task.stream]
        else:
            last = False
        self.results.append(Result(task.stream, frame, last))

    def _fail(self, task: Task, error: ServingError | LlamaCppError) -> None:
        """Ends the request, with all its choices."""
        if task.stream not in self._tasks:
            return
        if not isinstance(error, ServingError):
            log.error("request %s: %s", task.generation.id, error)
            error = InternalError(InternalError.PUBLIC_MESSAGE)
        self.results.append(Result(task.stream, error, last=True))
        self.cancel(task.stream)

    def _leave(self, task: Task) -> None:
        """The slot is free, and its tokens stay for a prompt that begins the same."""
        if task.done:
            return
        task.done = True
        self._waiting.pop(task, None)
        self._paused.pop(task, None)
        self._running.pop(task, None)
        task.sequence.close()
        if task.choice is not None:
            self.kv.release(task.choice.slot)
            task.choice = task.leader = None

    # --- numbers ---

    def stats(self) -> BackendStats:
        return self._totals.stats(
            self.kv, self._waiting, self._paused, self._running, context_length=self._context_length
        )

    def slot_states(self) -> list[SlotState]:
        return slot_states(self.kv.slots, self._running, self._context_length)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict each other or llama.cpp. Tests call it after every step."""
        self.kv.check_integrity()
        if self._drafting is not None:
            self._drafting.check_integrity()
        check_books(self.kv.slots, self._waiting, self._paused, self._running, self._tasks.values())
