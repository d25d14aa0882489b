"""The engine thread's work for embeddings and rankings: inputs of all requests together, a batch at a time."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from backends.base import BackendStats
from backends.llamacpp.bindings import LlamaCppError, Tokens
from backends.llamacpp.embedding_context import EmbeddingContext
from backends.llamacpp.rate import Rate
from backends.llamacpp.streams import Call, Result
from backends.pooling import Matrix, normalized
from protocols.errors import InternalError

log = logging.getLogger(__name__)


class _Job:
    """One request inside the engine: what it has so far, and how many of its inputs were taken into batches."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.taken = 0
        self.matrices: list[Matrix] = []

    @property
    def next_input(self) -> Tokens:
        return self.call.inputs[self.taken]

    @property
    def exhausted(self) -> bool:
        return self.taken == len(self.call.inputs)


class Embedder:
    """`open_context` is called for the first request, or by `open`. `slots` is only told to whoever asks for `stats`.

    `chunk` is how many tokens make a batch while others generate and wait for it to end; a single input may have more.
    Every input that is submitted must fit the context's `input_length`.
    """

    def __init__(self, open_context: Callable[[], EmbeddingContext], *, slots: int, chunk: int) -> None:
        self.results: list[Result[list[Matrix]]] = []
        self.taken = 0  # what was submitted, for whoever counts what is on its way
        self._open_context = open_context
        self._context: EmbeddingContext | None = None
        self._slots = slots
        self._chunk = chunk
        self._jobs: dict[Call, _Job] = {}
        self._waiting: deque[_Job] = deque()  # those with inputs that no batch has taken
        self._batch: list[tuple[_Job, Tokens]] = []
        self._queued_tokens = self._total_tokens = self._steps = 0
        self._rate = Rate()

    def open(self) -> EmbeddingContext:
        if self._context is None:
            self._context = self._open_context()
        return self._context

    @property
    def running(self) -> bool:
        return bool(self._batch)

    @property
    def idle(self) -> bool:
        return not self._jobs

    def submit(self, call: Call) -> None:
        self.taken += 1
        self._queued_tokens += call.tokens
        job = self._jobs[call] = _Job(call)
        self._waiting.append(job)

    def cancel(self, call: Call) -> None:
        job = self._jobs.pop(call, None)
        if job is None:
            return
        self._queued_tokens -= sum(len(tokens) for tokens in call.inputs[job.taken :])
        if job in self._waiting:
            self._waiting.remove(job)

    def close(self) -> None:
        for call in list(self._jobs):
            self.cancel(call)
        if self._context is not None:
            self._context.close()
            self._context = None

    def admit(self, *, beside_generation: bool = False) -> None:
        """Fills the next batch with an input of each request in turn, so that one input never waits for thousands.

        Whose next input finds no room goes first next time.
        """
        if not self._waiting:
            return
        try:
            context = self.open()
        except LlamaCppError as error:
            log.error("there can be no embeddings: %s", error)
            for call in list(self._jobs):
                self._fail(call)
            return
        room = min(context.batch_size, self._chunk) if beside_generation else context.batch_size
        passed: list[_Job] = []
        while self._waiting and len(self._batch) < context.max_inputs:
            job = self._waiting.popleft()
            tokens = job.next_input
            if len(tokens) > room and self._batch:
                passed.append(job)
                continue
            job.taken += 1
            room -= len(tokens)
            self._batch.append((job, tokens))
            if not job.exhausted:
                self._waiting.append(job)
        self._waiting.extendleft(reversed(passed))

    def step(self) -> None:
        batch, self._batch = self._batch, []
        started = time.monotonic()
        self._compute(batch)
        self._steps += 1
        tokens = sum(len(tokens) for _, tokens in batch)
        self._queued_tokens -= tokens
        self._total_tokens += tokens
        self._rate.add(tokens, time.monotonic() - started)

    def _compute(self, batch: list[tuple[_Job, Tokens]]) -> None:
        try:
            matrices = self.open().compute([tokens for _, tokens in batch])
        except LlamaCppError as error:
            if len(batch) > 1:  # one request's trouble stays its own
                for part in batch:
                    self._compute([part])
                return
            log.error("an input cannot be computed: %s", error)
            self._fail(batch[0][0].call)
            return
        for (job, _), matrix in zip(batch, matrices, strict=True):
            job.matrices.append(normalized(matrix, job.call.normalize))
            if len(job.matrices) == len(job.call.inputs):
                self._jobs.pop(job.call, None)
                self.results.append(Result(job.call, job.matrices, last=True))

    def _fail(self, call: Call) -> None:
        if call in self._jobs:
            self.results.append(Result(call, InternalError(InternalError.PUBLIC_MESSAGE), last=True))
            self.cancel(call)

    def stats(self) -> BackendStats:
        """A request runs while the next batch has an input of it."""
        running = len({job.call for job, _ in self._batch})
        return BackendStats(
            slots=self._slots,
            running=running,
            waiting=len(self._jobs) - running,
            queued_prompt_tokens=self._queued_tokens,
            prompt_tokens_total=self._total_tokens,
            steps_total=self._steps,
            prefill_tokens_per_s=self._rate.per_s,
        )
