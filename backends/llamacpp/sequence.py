"""One request inside the engine: how far its prompt is, what each drawn token means, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from backends.llamacpp.bindings import Model, Tokens
from backends.llamacpp.sampling import SamplerChain, SamplerParams
from backends.llamacpp.slots import Slot
from backends.output.assembler import Assembler
from protocols.events import Event, Finished, FinishReason, Frame, Progress, Started, Timings, Usage

NO_TOKENS: Tokens = np.empty(0, np.int32)


class Generation(msgspec.Struct, frozen=True):
    """A request as the engine takes it: tokenised and checked. `prompt` has 1 to context_length - 1 tokens."""

    id: str
    prompt: Tokens
    params: SamplerParams = SamplerParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    resume: Tokens = NO_TOKENS


class Sequence:
    """Takes tokens one by one and turns each into the frame its client gets. Lives on the engine thread.

    The budget: prompt and answer together never exceed the context, and the answer never exceeds `max_tokens`. Tokens
    of `resume` are part of the answer and of its budget; they pass through the assembler without a trace.
    """

    def __init__(self, generation: Generation, model: Model, context_length: int, now: Callable[[], float]) -> None:
        self.generation = generation
        self.tokens: Tokens = np.concatenate([generation.prompt, generation.resume])
        self.reason: FinishReason | None = None
        self.next_token = -1  # drawn, not yet computed; meaningful once the prompt is
        self._model = model
        self._now = now
        self._assembler = Assembler(generation.stop)
        self._end_tokens: frozenset[int] = frozenset() if generation.ignore_eos else model.end_tokens
        room = context_length - len(generation.prompt)
        self._limit = room if generation.max_tokens is None else min(generation.max_tokens, room)
        self._answered = 0
        self._reused = 0
        self._in_pieces = False
        self._chain: SamplerChain | None = None
        self._slot: Slot | None = None
        self._admitted_at = self._first_token_at = now()
        for token in generation.resume.tolist():
            self._take(token)
        if self._answered >= self._limit and self.reason is None:
            self.reason = "length"

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def slot(self) -> Slot:
        assert self._slot is not None, "the sequence has no slot"
        return self._slot

    @property
    def chain(self) -> SamplerChain:
        assert self._chain is not None, "the sequence has no slot"
        return self._chain

    @property
    def uncomputed(self) -> int:
        """How many tokens of the prompt are not in the KV cache yet."""
        return max(len(self.tokens) - (self._slot.length if self._slot is not None else 0), 0)

    def admit(self, slot: Slot, chain: SamplerChain) -> Frame:
        """The sequence gets its slot, whose tokens are the reused part of the prompt."""
        self._slot, self._chain = slot, chain
        self._reused = slot.length
        self._admitted_at = self._now()
        chain.observe_prompt(self.generation.prompt)
        chain.replay(self.generation.resume)
        return Frame((self._started(),))

    def complete_frame(self) -> Frame:
        """All of a stream that needs no computation: its budget is 0, or what it resumes was complete."""
        return Frame((self._started(), *self._assembler.finish(), self._finished()))

    def progress(self, prompt_complete: bool) -> Frame | None:
        """To be called whenever tokens were computed. Prompts that take one step have no progress worth telling."""
        if self._answered > len(self.generation.resume) or (prompt_complete and not self._in_pieces):
            return None
        self._in_pieces = True
        total = len(self.generation.prompt)
        done = min(self.slot.length, total)
        event = Progress(done, self._cached_tokens, total, (self._now() - self._admitted_at) * 1000)
        return Frame((event,))

    def accept(self, token: int) -> Frame:
        """The frame for a token drawn from the logits of the last computed one."""
        if self._answered == len(self.generation.resume):
            self._first_token_at = self._now()
        events = self._take(token)
        if self.reason is None and self._answered >= self._limit:
            self.reason = "length"
        if self.reason is not None:
            events += self._assembler.finish()
            events.append(self._finished())
        self.next_token = token
        return Frame(tuple(events), (token,))

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()

    def _take(self, token: int) -> list[Event]:
        self._answered += 1
        if self.reason is not None:  # resumed past its own end
            return []
        if token in self._end_tokens:
            self.reason = "stop"
            return []
        events = self._assembler.feed(self._model.piece(token))
        if self._assembler.stop_sequence is not None:
            self.reason = "stop"
        return events

    @property
    def _cached_tokens(self) -> int:
        return min(self._reused, len(self.generation.prompt))

    def _started(self) -> Started:
        return Started(len(self.generation.prompt), self._cached_tokens)

    def _finished(self) -> Finished:
        assert self.reason is not None
        computed = 0 if self._slot is None else len(self.tokens) - self._reused
        return Finished(
            self.reason,
            Usage(len(self.generation.prompt), self._answered, self._cached_tokens),
            self._assembler.stop_sequence,
            Timings(
                cache_n=self._reused,
                prompt_n=computed,
                prompt_ms=(self._first_token_at - self._admitted_at) * 1000,
                predicted_n=self._answered - len(self.generation.resume),
                predicted_ms=(self._now() - self._first_token_at) * 1000,
            ),
        )
