"""One request inside the engine: how far its prompt is, what each drawn token means, and when it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
import numpy as np

from backends.adapters import NO_ADAPTERS, AdapterSet
from backends.llamacpp.bindings import Context, Model, Tokens
from backends.llamacpp.sampler import Sampler, SamplerSpec
from backends.llamacpp.slots import Slot
from backends.output.answer import Answer, Budget
from backends.output.assembler import Assembler
from backends.output.selection import ParserSpec
from protocols.events import (
    Echo,
    Event,
    Finished,
    Frame,
    Progress,
    Started,
    Timings,
    TokenLogprob,
)
from protocols.request import Extras, SlotOptions

NO_TOKENS: Tokens = np.empty(0, np.int32)


class Generation(msgspec.Struct, frozen=True):
    """One choice of a request as the engine takes it: tokenised and checked.

    `prompt` has 1 to context_length - 1 tokens. `choice` is one of the `n` from `first_choice` on. `slot.shift` is
    decided: the model's setting has been applied. `shown` are control tokens that are text for the `parser`.
    """

    id: str
    prompt: Tokens
    sampling: SamplerSpec = SamplerSpec()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    resume: Tokens = NO_TOKENS
    n: int = 1
    first_choice: int = 0
    choice: int = 0
    slot: SlotOptions = SlotOptions()
    adapters: AdapterSet = NO_ADAPTERS
    stop_indent: int = 0
    max_predict_ms: float | None = None
    speculate: bool = False
    extras: Extras = Extras()
    echo: Echo | None = None
    parser: ParserSpec | None = None
    shown: frozenset[int] = frozenset()

    @property
    def leads(self) -> bool:
        """Whether this choice begins the request's stream, and counts its prompt."""
        return self.choice == self.first_choice

    def choices(self) -> list[Generation]:
        """All choices of the request, each with random numbers of its own."""
        numbers = range(self.first_choice, self.first_choice + self.n)
        return [msgspec.structs.replace(self, choice=i, sampling=self.sampling.for_choice(i)) for i in numbers]


class Sequence(Answer):
    """Takes tokens one by one and turns each into the frame its client gets. Lives on the engine thread.

    With `slot.shift` the context is no limit: whoever runs the sequence drops old tokens when it is full.

    `tokens` are those to compute before the next one is drawn: the prompt, and after `pause` the answer so far too.
    """

    def __init__(self, generation: Generation, model: Model, context_length: int, now: Callable[[], float]) -> None:
        self.generation = generation
        self.tokens: Tokens = np.concatenate([generation.prompt, generation.resume])
        self.next_token = -1  # drawn, not yet computed; meaningful once the prompt is
        self._shown = generation.sampling.shown | generation.shown  # control tokens that are text here
        self._reused = 0
        self._guessed = self._guessed_right = 0
        self.shifted = False  # whether old tokens were dropped to make room
        self._in_pieces = False
        self._sampler: Sampler | None = None
        self._slot: Slot | None = None

        def piece(token: int) -> bytes:
            return model.special_piece(token) if token in self._shown else model.piece(token)

        parser = None if generation.parser is None else generation.parser.make(generation.id, generation.choice)
        room = sys.maxsize if generation.slot.shift else context_length - len(generation.prompt)
        super().__init__(
            Assembler(generation.stop, generation.choice, generation.stop_indent, parser),
            piece,
            Budget(room, generation.max_tokens, generation.max_predict_ms),
            now,
            choice=generation.choice,
            prompt_tokens=len(generation.prompt),
            resume=generation.resume.tolist(),
            end_tokens=frozenset() if generation.ignore_eos else model.end_tokens,
            with_timings=generation.extras.timings,
        )

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def slot(self) -> Slot:
        assert self._slot is not None, "the sequence has no slot"
        return self._slot

    @property
    def uncomputed(self) -> int:
        """How many tokens of the prompt are not in the KV cache yet."""
        return max(len(self.tokens) - (self._slot.length if self._slot is not None else 0), 0)

    @property
    def remaining(self) -> int:
        """How many tokens the answer may still get."""
        return self._budget.tokens - self._answered

    def admit(self, slot: Slot, sampler: Sampler, cached_tokens: int) -> Frame:
        """The sequence gets its slot, whose tokens are the reused part of the prompt. Usage says `cached_tokens`.

        `sampler` stands behind what is resumed, and is the sequence's from here on.
        """
        self._slot, self._sampler = slot, sampler
        self._reused, self.cached_tokens = slot.length, cached_tokens
        self._began_at = self._now()
        return Frame((self._started(),), choice=self.generation.choice)

    def pause(self) -> None:
        """Gives up the slot, whose tokens may be lost, in the middle of the prompt or of the answer."""
        if not self.uncomputed:
            self.tokens = np.append(self.slot.tokens, np.int32(self.next_token))
        self._slot = None

    def unpause(self, slot: Slot) -> None:
        """Goes on in `slot`, whose tokens are a beginning of `tokens`."""
        self._slot = slot

    def complete_frame(self) -> Frame:
        """All of a stream that needs no computation: its budget is 0, or what it resumes was complete."""
        assert self.reason is not None
        started = (self._started(),) if self.generation.leads else ()
        end = self.end(self.reason)
        return msgspec.structs.replace(end, events=(*started, *end.events))

    def progress(self, prompt_complete: bool) -> Frame | None:
        """To be called whenever tokens were computed. Prompts that take one step have no progress worth telling."""
        alone = prompt_complete and not self._in_pieces and not self.generation.extras.progress
        if self._answered > self._resumed or alone:
            return None
        self._in_pieces = True
        total = len(self.generation.prompt)
        done = min(self.slot.length, total)
        event = Progress(done, self.cached_tokens, total, (self._now() - self._began_at) * 1000, self.generation.choice)
        return Frame((event,), choice=self.generation.choice)

    def draw(self, context: Context, row: int) -> Frame:
        """Draws the next token, from the logits of the last computed one, and makes its frame.

        `InvalidRequest` or `LlamaCppError` if this sequence cannot go on.
        """
        assert self._sampler is not None, "the sequence has no slot"
        drawn = self._sampler.draw(context, row)
        if drawn is not None:
            return self.accept(*drawn)
        self._note_first_token()
        return self.end("stop")  # the grammar is at its end, and no token may say so

    def draw_behind_guesses(self, context: Context, row: int, guesses: Tokens) -> tuple[Frame, int]:
        """Draws as `draw` does, as often as the guess for the next token turns out right, and once more.

        `guesses` were computed behind the token that is due, whose logits are in `row`. Returns one frame for all that
        was drawn, and how many of the guesses the answer goes on behind.
        """
        self._guessed += len(guesses)
        events: list[Event] = []
        tokens: list[int] = []
        right = 0
        for guess in [*guesses.tolist(), None]:
            frame = self.draw(context, row + right)
            events += frame.events
            tokens += frame.tokens
            if self.finished or self.next_token != guess:
                break
            right += 1
            self._guessed_right += 1
        return Frame(tuple(events), tuple(tokens), self.generation.choice), right

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> Frame:
        """The frame for a token drawn from the logits of the last computed one."""
        self._note_first_token()
        self.next_token = token
        if logprob is not None and token in self._shown:
            logprob = msgspec.structs.replace(logprob, data=self._piece(token))
        return self._frame([(token, logprob)])

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def _note_first_token(self) -> None:
        if self._answered == self._resumed:
            self._first_token_at = self._now()

    def _started(self) -> Started:
        return Started(self._prompt_tokens, self.cached_tokens, self.choice, self.generation.echo)

    def _finished(self) -> Finished:
        finished = super()._finished()
        return msgspec.structs.replace(
            finished,
            slot=-1 if self._slot is None else self._slot.id,
            slot_tokens=0 if self._slot is None else self._slot.length,
            truncated=self.shifted or finished.truncated,
        )

    def _timings(self) -> Timings:
        given = len(self.generation.prompt) + len(self.generation.resume)
        return Timings(
            cache_n=self._reused,
            prompt_n=0 if self._slot is None else given - self._reused,
            prompt_ms=(self._first_token_at - self._began_at) * 1000,
            predicted_n=self._answered - self._resumed,
            predicted_ms=self._elapsed_ms,
            draft_n=self._guessed,
            draft_n_accepted=self._guessed_right,
        )
