"""The step loop: many requests, one context, one thread.

A step is one `llama_decode` over all running requests: one token for each that generates, then prompt tokens of those
that do not yet (`batch_size` in all, `prefill_chunk` of them while others generate). Then each request that has logits
draws its next token, and everything the step produced goes to the event loop in one call.

The engine thread owns model, context, slots and samplers; the event loop owns the streams. They meet in two places:
commands go in through a queue that is read between steps, results go out through `call_soon_threadsafe`.

What greedy decoding guarantees: the same steps give the same bits, other steps may not. llama.cpp's kernels depend on
the shape of a batch, and a prompt's chunks depend on what else is running and on what its slot remembers. Measured
(SmolLM2-135M Q4_1, AVX-512, flash attention, one KV cache per slot): a request repeated alone always repeated its
tokens; the logits of a generated token were bit-identical with 0 to 7 neighbours; so were those of a 17-token prompt,
however it was cut; but those of a 178-token prompt moved by up to 0.7 between chunks of 512, 64, 16 and 1. Flash
attention is what differs: without it, chunks of 512, 64 and 16 gave the same bits, and only single tokens others.
Of 8 greedy answers to 260-token prompts, generated all at once, 8 left their lone versions at some token (the 1st to
the 60th), each time between candidates at most 0.12 apart; of 8 to 38-token prompts, none did. Repacked weights and
GPUs have other kernels, and were not measured.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

import msgspec
import numpy as np

from backends.base import BackendStats
from backends.llamacpp.bindings import DECODED, NO_KV_SPACE, Batch, Context, LlamaCppError, Model, Tokens
from backends.llamacpp.sampling import SamplerChain
from backends.llamacpp.sequence import Generation, Sequence
from backends.llamacpp.slots import Slots
from protocols.errors import InternalError, Overloaded, ServingError, Unavailable
from protocols.events import Frame

log = logging.getLogger(__name__)

_RATE_SMOOTHING = 0.2
_RATE_MIN_TOKENS = 16
"""Steps with fewer prompt tokens say nothing about prefill speed: decoding dominates them."""


class Stream:
    """One request, seen from the event loop: the frames it has produced, then an error if it failed."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.items: asyncio.Queue[Frame | ServingError] = asyncio.Queue()


class _Result(msgspec.Struct, frozen=True):
    stream: Stream
    item: Frame | ServingError
    last: bool


class _Work(msgspec.Struct, frozen=True):
    """One sequence's share of a step: tokens to compute next, and whether the last one's logits are needed."""

    stream: Stream
    sequence: Sequence
    tokens: Tokens
    logits: bool


class _Snapshot(msgspec.Struct, frozen=True):
    """Statistics as of the last step, and how many submissions the engine had taken by then."""

    stats: BackendStats
    taken: int = 0
    taken_tokens: int = 0


class Engine:
    """`start`, `submit`, `cancel`, `stats` and `stop` belong to the event loop; everything below them to the thread."""

    def __init__(self, model: Model, context: Context, *, context_length: int, prefill_chunk: int) -> None:
        self.failure: str | None = None
        self._model = model
        self._context = context
        self._context_length = context_length
        self._prefill_chunk = prefill_chunk
        self._thread = threading.Thread(target=self._run, name="llamacpp-engine", daemon=True)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # The event loop's side.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[Stream] = set()
        self._submitted = self._submitted_tokens = 0
        # The thread's side. Dicts keep the order of arrival.
        self._slots = Slots(context.sequences, context.sequence_length)
        self._batch = Batch(context.batch_size)
        self._waiting: dict[Stream, Sequence] = {}
        self._running: dict[Stream, Sequence] = {}
        self._results: list[_Result] = []
        self._stopping = False
        self._taken = self._taken_tokens = 0
        self._prompt_total = self._cached_total = self._generated_total = self._steps = 0
        self._prefill_rate = 0.0
        self._snapshot = _Snapshot(self._stats())

    # --- on the event loop ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, generation: Generation) -> Stream:
        if self.failure is not None:
            raise Unavailable(self.failure)
        stream = Stream(generation)
        self._open.add(stream)
        self._submitted += 1
        self._submitted_tokens += len(generation.prompt)
        self._commands.put(partial(self._on_submit, stream))
        return stream

    def cancel(self, stream: Stream) -> None:
        """Frees what `stream` holds before the next step. Nothing happens if it has ended."""
        if stream in self._open:
            self._open.discard(stream)
            self._commands.put(partial(self._on_cancel, stream))

    def stats(self) -> BackendStats:
        """The last step's numbers, plus what was submitted since."""
        snapshot = self._snapshot
        unseen = self._submitted - snapshot.taken
        if not unseen or self.failure is not None:
            return snapshot.stats
        return msgspec.structs.replace(
            snapshot.stats,
            waiting=snapshot.stats.waiting + unseen,
            queued_prompt_tokens=snapshot.stats.queued_prompt_tokens + self._submitted_tokens - snapshot.taken_tokens,
        )

    def stop(self, why: str) -> None:
        """Ends all streams; the thread ends after the step it is in. `join` waits for that."""
        self._fail_open(Unavailable(why))
        self._commands.put(self._on_stop)

    def join(self) -> None:
        """Blocks until the thread has ended and its samplers are freed. Safe from any thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def _deliver(self, results: list[_Result]) -> None:
        for result in results:
            if result.stream in self._open:
                result.stream.items.put_nowait(result.item)
                if result.last:
                    self._open.discard(result.stream)

    def _fail_open(self, error: ServingError) -> None:
        self.failure = self.failure or error.message
        for stream in self._open:
            stream.items.put_nowait(error)
        self._open.clear()

    # --- on the engine thread ---

    def _run(self) -> None:
        try:
            while True:
                self._take_commands()
                if self._stopping:
                    break
                self._admit()
                self._publish()
                if self._running:
                    self._step()
                    self._publish()
        except BaseException:
            # Nothing can be served after this; whoever waits must hear of it, whatever it was.
            log.critical("the engine thread died", exc_info=True)
            self._post(partial(self._fail_open, Unavailable("The engine of this model has failed.")))
        finally:
            for sequence in self._running.values():
                sequence.close()
            for stream in list(self._running):
                self._slots.release(self._running.pop(stream).slot)
            self._waiting.clear()
            self._snapshot = _Snapshot(self._stats(), self._taken, self._taken_tokens)

    def _take_commands(self) -> None:
        """All commands there are; waits for one when there is nothing to compute."""
        if not self._running and not self._waiting:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _on_submit(self, stream: Stream) -> None:
        self._taken += 1
        self._taken_tokens += len(stream.generation.prompt)
        self._waiting[stream] = Sequence(stream.generation, self._model, self._context_length, time.monotonic)

    def _on_cancel(self, stream: Stream) -> None:
        self._waiting.pop(stream, None)
        if stream in self._running:
            self._leave(stream)

    def _on_stop(self) -> None:
        self._stopping = True

    def _admit(self) -> None:
        """Slots to those who wait longest."""
        for stream, sequence in list(self._waiting.items()):
            if sequence.finished:
                del self._waiting[stream]
                self._results.append(_Result(stream, sequence.complete_frame(), last=True))
                continue
            choice = self._slots.acquire(sequence.tokens)
            if choice is None:
                return
            slot = choice.slot
            if not self._context.truncate(slot.id, slot.length):
                # A recurrent state cannot be cut, only dropped.
                self._context.forget(slot.id)
                slot.truncate(0)
            banned = sorted(self._model.end_tokens) if stream.generation.ignore_eos else ()
            del self._waiting[stream]
            try:
                chain = SamplerChain(self._model, stream.generation.params, banned)
            except LlamaCppError as error:
                log.error("request %s: %s", stream.generation.id, error)
                self._slots.release(slot)
                self._results.append(_Result(stream, InternalError(InternalError.PUBLIC_MESSAGE), last=True))
                continue
            self._running[stream] = sequence
            self._prompt_total += len(stream.generation.prompt)
            self._cached_total += min(slot.length, len(stream.generation.prompt))
            self._results.append(_Result(stream, sequence.admit(slot, chain), last=False))

    def _step(self) -> None:
        work = self._plan()
        started = time.monotonic()
        self._compute(work)
        self._steps += 1
        prefilled = sum(len(part.tokens) for part in work if len(part.tokens) > 1)
        if prefilled >= _RATE_MIN_TOKENS:
            rate = prefilled / max(time.monotonic() - started, 1e-6)
            weight = _RATE_SMOOTHING if self._prefill_rate else 1.0
            self._prefill_rate += weight * (rate - self._prefill_rate)

    def _plan(self) -> list[_Work]:
        """One token of everyone who generates, and then prompts, first come first served.

        In the order of slots: with one KV cache per slot, llama.cpp computes only runs of neighbouring sequences
        together, and sees them as neighbours only in ascending order.
        """
        work: list[_Work] = []
        prompts: list[tuple[Stream, Sequence]] = []
        for stream, sequence in self._running.items():
            if sequence.uncomputed:
                prompts.append((stream, sequence))
            else:
                work.append(_Work(stream, sequence, np.array([sequence.next_token], np.int32), logits=True))
        room = self._batch.capacity - len(work)
        if work:
            room = min(room, self._prefill_chunk)
        for stream, sequence in prompts:
            if room <= 0:
                break
            start = sequence.slot.length
            tokens = sequence.tokens[start : start + room]
            work.append(_Work(stream, sequence, tokens, logits=len(tokens) == sequence.uncomputed))
            room -= len(tokens)
        work.sort(key=lambda part: part.sequence.slot.id)
        return work

    def _compute(self, work: list[_Work]) -> None:
        """Computes `work` in one decode if it can, in several if it must, and draws the tokens that follow."""
        self._batch.clear()
        rows = [
            self._batch.add(part.tokens, part.sequence.slot.id, part.sequence.slot.length, logits=part.logits)
            for part in work
        ]
        code = self._context.decode(self._batch)
        if code != DECODED:
            self._recover(work, code)
            return
        for part, row in zip(work, rows, strict=True):
            part.sequence.slot.append(part.tokens)
            if (progress := part.sequence.progress(part.logits)) is not None:
                self._results.append(_Result(part.stream, progress, last=False))
            if part.logits:
                self._draw(part.stream, part.sequence, row)

    def _draw(self, stream: Stream, sequence: Sequence, row: int) -> None:
        frame = sequence.accept(sequence.chain.sample(self._context, row))
        self._generated_total += 1
        self._results.append(_Result(stream, frame, last=sequence.finished))
        if sequence.finished:
            self._leave(stream)

    def _recover(self, work: list[_Work], code: int) -> None:
        """`work` was not computed. Finds the part that can be, so that one request's trouble stays its own."""
        log.warning("llama_decode answered %d for %d requests", code, len(work))
        if code == NO_KV_SPACE:
            if self._drop_idle_caches():
                self._compute(work)
                return
        else:
            work = self._rewind(work)
        if len(work) > 1:
            middle = len(work) // 2
            self._compute(work[:middle])
            self._compute(work[middle:])
        elif work and code == NO_KV_SPACE and len(work[0].tokens) > 1:
            part = work[0]
            half = msgspec.structs.replace(part, tokens=part.tokens[: len(part.tokens) // 2], logits=False)
            self._compute([half])
        elif work and code == NO_KV_SPACE:
            self._fail(work[0].stream, Overloaded("The model has no room left for this request.", retry_after_s=1.0))
        elif work:
            log.error("request %s cannot be computed (%d)", work[0].stream.generation.id, code)
            self._fail(work[0].stream, InternalError(InternalError.PUBLIC_MESSAGE))

    def _drop_idle_caches(self) -> bool:
        """Gives up what idle slots remember. False when there was nothing."""
        idle = [slot for slot in self._slots if not slot.busy and slot.length]
        for slot in idle:
            self._context.forget(slot.id)
            slot.truncate(0)
        return bool(idle)

    def _rewind(self, work: list[_Work]) -> list[_Work]:
        """Takes back what a failed decode may have stored. A sequence whose state cannot be cut is lost."""
        kept = []
        for part in work:
            slot = part.sequence.slot
            if self._context.truncate(slot.id, slot.length):
                kept.append(part)
            else:
                self._context.forget(slot.id)
                slot.truncate(0)
                self._fail(part.stream, InternalError(InternalError.PUBLIC_MESSAGE))
        return kept

    def _fail(self, stream: Stream, error: ServingError) -> None:
        self._results.append(_Result(stream, error, last=True))
        self._leave(stream)

    def _leave(self, stream: Stream) -> None:
        """The slot is free from here on; what it computed stays, for a prompt that begins the same."""
        sequence = self._running.pop(stream)
        sequence.close()
        self._slots.release(sequence.slot)

    def _publish(self) -> None:
        self._snapshot = _Snapshot(self._stats(), self._taken, self._taken_tokens)
        if self._results:
            self._post(partial(self._deliver, self._results))
            self._results = []

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._stopping = True  # the loop went away without `stop`; nobody is left to serve

    def _stats(self) -> BackendStats:
        return BackendStats(
            slots=len(self._slots),
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prompt_tokens=sum(len(stream.generation.prompt) for stream in self._waiting),
            kv_tokens_used=self._slots.busy_tokens,
            kv_tokens_capacity=len(self._slots) * self._context_length,
            prompt_tokens_total=self._prompt_total,
            cached_tokens_total=self._cached_total,
            generated_tokens_total=self._generated_total,
            steps_total=self._steps,
            prefill_tokens_per_s=self._prefill_rate,
        )
