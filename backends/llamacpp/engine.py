"""The step loop: many requests, one context, one thread.

A step is one `llama_decode` over all running requests: one token for each that generates, then prompt tokens of those
that do not yet (`batch_size` in all, `prefill_chunk` of them while others generate). Then each request that has logits
draws its next token, and everything the step produced goes to the event loop in one call. `Runner` does all this, and
`Embedder` the same for embeddings and rankings, in a context of its own; here is the thread they run on. Each has one
step in turn, and while something generates, batches of embeddings too are only as large as `prefill_chunk`.

The engine thread owns model, context, slots and samplers; the event loop owns the streams. They meet in two places:
commands go in through a queue that is read between steps, results go out through `call_soon_threadsafe`.

What greedy decoding guarantees: the same steps give the same bits, other steps may not. llama.cpp's kernels depend on
the shape of a batch, and a prompt's chunks depend on what else is running and on what its slot remembers. Measured
(SmolLM2-135M Q4_1, AVX-512, 2 threads), as the largest difference of a logit:

                                                     own KV cache each       one for all
                                                     flash off   flash on    flash off   flash on
    a generated token, with 1 to 7 neighbours        0           0           0.8         0.7
    a 178-token prompt in chunks of 64, of 16        0           0.6, 0.7    0           0.6, 0.7
    the same, token by token                         0.7         0.7         0.7         0.7

A prompt of which all but the last token is cached is one of the last kind. Of 8 greedy answers to 260-token prompts,
generated all at once with flash attention, 8 left their lone versions at some token (the 1st to the 60th), each time
between candidates at most 0.12 apart; of 8 to 38-token prompts, none did. Repacked weights and GPUs have other
kernels, and were not measured.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import msgspec

from backends.base import BackendStats
from backends.llamacpp.arrivals import Arrivals
from backends.llamacpp.bindings import LlamaCppError, Tokens
from backends.llamacpp.embedder import Embedder
from backends.llamacpp.runner import Runner
from backends.llamacpp.sequence import Generation
from backends.llamacpp.streams import Call, Receiver, Result, Stream
from protocols.errors import InternalError, ServingError, Unavailable
from protocols.sink import Sink

log = logging.getLogger(__name__)


Answer = TypeVar("Answer")


class _Worker(Protocol):
    """A part of the engine with requests of its own. Only the thread calls it."""

    results: list[Result[Any]]
    taken: int

    @property
    def idle(self) -> bool:
        """Nothing to do, now or later, for the requests there are."""
        ...

    @property
    def running(self) -> bool:
        """Whether there is something to compute."""
        ...

    def step(self) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> BackendStats: ...


class _Snapshot(msgspec.Struct, frozen=True):
    """Statistics as of the last step, and how many submissions the engine had taken by then."""

    stats: BackendStats
    taken: int = 0


class Engine:
    """`start`, `submit`, `cancel`, `stats` and `stop` belong to the event loop; everything below them to the thread."""

    def __init__(self, runner: Runner | None, embedder: Embedder, *, context_shift: bool = False) -> None:
        """`runner` is None for a model that generates nothing."""
        self.failure: str | None = None
        self._runner = runner
        self._embedder = embedder
        self._workers: list[_Worker] = [embedder] if runner is None else [runner, embedder]
        self._context_shift = context_shift
        self._thread = threading.Thread(target=self._run, name="llamacpp-engine", daemon=True)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: set[asyncio.Future[Any]] = set()
        self._open: set[Receiver[Any]] = set()
        self._arrivals = Arrivals(share=runner is not None and runner.shares_prefixes)
        self._stopping = False
        self._snapshot = _snapshot(self._workers)

    # --- on the event loop ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, generation: Generation, sink: Sink | None = None) -> Stream:
        """Only where there is a runner."""
        assert self._runner is not None
        if generation.slot.shift is None:
            slot = msgspec.structs.replace(generation.slot, shift=self._context_shift)
            generation = msgspec.structs.replace(generation, slot=slot)
        stream = Stream(generation, sink)
        self._send(stream, partial(self._runner.submit, stream))
        self._arrivals.generation(generation)
        return stream

    def embed(self, inputs: Sequence[Tokens], normalize: int) -> Call:
        call = Call(inputs, normalize)
        self._send(call, partial(self._embedder.submit, call))
        self._arrivals.embedding(call.tokens)
        return call

    def cancel(self, stream: Stream) -> None:
        """Frees what `stream` holds before the next step. Nothing happens if it has ended."""
        if stream in self._open and self._runner is not None:
            self._open.discard(stream)
            self._commands.put(partial(self._runner.cancel, stream))

    async def ask(self, question: Callable[[Runner], Answer], *, slot: int | None = None) -> Answer:
        """What `question` returns or raises on the engine thread, between two steps; with `slot`, once it is idle.

        Cancelled before that, it is not asked. A `LlamaCppError` becomes `InternalError`. Only where there is a runner.
        """
        if self.failure is not None:
            raise Unavailable(self.failure)
        assert self._runner is not None
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.add(asked)
        put = partial(self._answer, asked, partial(question, self._runner))
        self._commands.put(put if slot is None else partial(self._runner.when_idle, slot, put))
        try:
            return await asked
        finally:
            self._asked.discard(asked)

    def cancel_call(self, call: Call) -> None:
        """Drops those of its inputs that are not computed yet. Nothing happens if it has ended."""
        if call in self._open:
            self._open.discard(call)
            self._commands.put(partial(self._embedder.cancel, call))

    def _send(self, receiver: Receiver[Any], command: Callable[[], None]) -> None:
        if self.failure is not None:
            raise Unavailable(self.failure)
        self._open.add(receiver)
        self._arrivals.taken(self._snapshot.taken)
        self._commands.put(command)

    def stats(self) -> BackendStats:
        """The last step's numbers, plus what was submitted since."""
        snapshot = self._snapshot
        self._arrivals.taken(snapshot.taken)
        unseen = self._arrivals.unseen
        if not unseen.requests or self.failure is not None:
            return snapshot.stats
        return msgspec.structs.replace(
            snapshot.stats,
            waiting=snapshot.stats.waiting + unseen.requests,
            queued_prompt_tokens=snapshot.stats.queued_prompt_tokens + unseen.tokens,
            uncached_tokens_queued=snapshot.stats.uncached_tokens_queued + unseen.uncached,
        )

    def stop(self, why: str) -> None:
        """Ends all requests; the thread ends after the step it is in. `join` waits for that."""
        self._fail_open(Unavailable(why))
        self._commands.put(self._on_stop)

    def join(self) -> None:
        """Blocks until the thread has ended and its samplers are freed. Safe from any thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def _deliver(self, results: list[Result[Any]]) -> None:
        for result in results:
            if result.stream in self._open:
                result.stream.receive(result.item)
                if result.last:
                    self._open.discard(result.stream)

    def _fail_open(self, error: ServingError) -> None:
        self.failure = self.failure or error.message
        for receiver in self._open:
            receiver.receive(error)
        self._open.clear()
        for asked in self._asked:
            _reject(asked, error)

    # --- on the engine thread ---

    def _run(self) -> None:
        died = True
        try:
            self._serve()
            died = False
        except BaseException:
            log.critical("the engine thread died", exc_info=True)
        finally:
            try:
                for worker in self._workers:
                    worker.close()
                self._snapshot = _snapshot(self._workers)
            finally:
                if died:  # nothing can be served after this; whoever waits must hear of it, whatever it was
                    self._post(partial(self._fail_open, Unavailable("The engine of this model has failed.")))

    def _serve(self) -> None:
        while True:
            taken = self._take_commands()
            if self._stopping:
                return
            generating = False
            if self._runner is not None:
                self._runner.admit()
                generating = self._runner.running
            self._embedder.admit(beside_generation=generating)
            if taken or any(worker.results for worker in self._workers):
                self._publish()
            for worker in self._workers:
                if worker.running:
                    worker.step()
                    self._publish()

    def _take_commands(self) -> int:
        """How many commands there were; all of them are done. Waits for one when there is nothing to compute."""
        taken = 0
        if all(worker.idle for worker in self._workers):
            self._commands.get()()
            taken = 1
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return taken
            command()
            taken += 1

    def _answer(self, asked: asyncio.Future[Answer], question: Callable[[], Answer]) -> None:
        if asked.done():
            return
        try:
            answer = question()
        except ServingError as error:
            self._post(partial(_reject, asked, error))
        except LlamaCppError as error:
            log.error("%s", error)
            self._post(partial(_reject, asked, InternalError(InternalError.PUBLIC_MESSAGE)))
        else:
            self._post(partial(_resolve, asked, answer))

    def _on_stop(self) -> None:
        self._stopping = True

    def _publish(self) -> None:
        self._snapshot = _snapshot(self._workers)
        for worker in self._workers:
            if worker.results:
                self._post(partial(self._deliver, worker.results))
                worker.results = []

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._stopping = True  # the loop went away without `stop`; nobody is left to serve


def _resolve(asked: asyncio.Future[Answer], answer: Answer) -> None:
    if not asked.done():
        asked.set_result(answer)


def _reject(asked: asyncio.Future[Answer], error: ServingError) -> None:
    if not asked.done():
        asked.set_exception(error)


def _snapshot(workers: Sequence[_Worker]) -> _Snapshot:
    """Slots, KV cache and speed are those of the first, which generates where one does; the rest is the sum."""
    stats, *others = (worker.stats() for worker in workers)
    for other in others:
        stats = msgspec.structs.replace(
            stats,
            running=stats.running + other.running,
            waiting=stats.waiting + other.waiting,
            queued_prompt_tokens=stats.queued_prompt_tokens + other.queued_prompt_tokens,
            uncached_tokens_queued=stats.uncached_tokens_queued + other.queued_prompt_tokens,
            prompt_tokens_total=stats.prompt_tokens_total + other.prompt_tokens_total,
            steps_total=stats.steps_total + other.steps_total,
        )
    return _Snapshot(stats, sum(worker.taken for worker in workers))
