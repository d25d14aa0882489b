"""One choice of a request: what its tokens mean, and when it ends. The same whatever engine draws them.

The budget: prompt and answer together never exceed the context, and the answer never exceeds `max_tokens`. Tokens of
`resume` are part of the answer and of its budget; they pass through the assembler without a trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.output.assembler import Assembler
from backends.output.pace import is_late, timed
from protocols.events import Event, Finished, FinishReason, Frame, Timings, TokenLogprob, Usage


class Budget(msgspec.Struct, frozen=True):
    """`room`: tokens that the context has for the answer. `max_predict_ms`: see `pace.is_late`."""

    room: int
    max_tokens: int | None = None
    max_predict_ms: float | None = None

    @property
    def tokens(self) -> int:
        return self.room if self.max_tokens is None else min(self.max_tokens, self.room)


class Answer(ABC):
    """`reason` is set once the answer has ended. Engines say when the prompt was computed, and how much was cached."""

    def __init__(
        self,
        assembler: Assembler,
        piece: Callable[[int], bytes],
        budget: Budget,
        now: Callable[[], float],
        *,
        choice: int,
        prompt_tokens: int,
        resume: Sequence[int],
        end_tokens: frozenset[int],
        with_timings: bool,
    ) -> None:
        """`piece`: the text of a token. `with_timings`: events of text have the times so far."""
        self.choice = choice
        self.reason: FinishReason | None = None
        self.cached_tokens = 0
        self._assembler = assembler
        self._piece = piece
        self._budget = budget
        self._now = now
        self._prompt_tokens = prompt_tokens
        self._resumed = len(resume)
        self._end_tokens = end_tokens
        self._with_timings = with_timings
        self._answered = 0
        self._began_at = self._first_token_at = now()
        for token in resume:
            self._take(token)
        if self._answered >= budget.tokens and self.reason is None:
            self.reason = "length"

    @property
    def answered(self) -> int:
        """How many tokens the answer has so far, those that were resumed among them."""
        return self._answered

    def end(self, reason: FinishReason) -> Frame:
        """The answer ends without another token, unless it has ended for another reason before."""
        self.reason = self.reason or reason
        return Frame((*self._assembler.finish(self.reason), self._finished()), choice=self.choice)

    def _frame(self, drawn: Iterable[tuple[int, TokenLogprob | None]]) -> Frame:
        """That of tokens which the engine has just drawn. What it has drawn behind the answer's end is left out."""
        events: list[Event] = []
        taken: list[int] = []
        for token, logprob in drawn:
            if self.reason is not None:
                break
            new = self._take(token, logprob)
            taken.append(token)
            events += new
            if self.reason is None and (
                self._answered >= self._budget.tokens or is_late(new, self._elapsed_ms, self._budget.max_predict_ms)
            ):
                self.reason = "length"
        if self.reason is not None:
            events += self._assembler.finish(self.reason)
        if self._with_timings:
            events = [timed(event, self._timings()) for event in events]
        if self.reason is not None:
            events.append(self._finished())
        return Frame(tuple(events), tuple(taken), self.choice)

    def _take(self, token: int, logprob: TokenLogprob | None = None) -> list[Event]:
        self._answered += 1
        if self.reason is not None:  # resumed past its own end
            return []
        if token in self._end_tokens:
            self.reason = "stop"
            return self._assembler.feed(b"", logprob) if logprob is not None else []
        events = self._assembler.feed(self._piece(token), logprob)
        self.reason = self._assembler.ended
        return events

    def _finished(self) -> Finished:
        assert self.reason is not None
        budget = self._budget
        return Finished(
            self._assembler.finish_reason(self.reason),
            Usage(
                self._prompt_tokens,
                self._answered,
                self.cached_tokens,
                min(self._assembler.reasoning_tokens, self._answered),
            ),
            self._assembler.stop_sequence,
            self._timings(),
            choice=self.choice,
            truncated=self.reason == "length" and budget.tokens == budget.room and self._answered >= budget.tokens,
        )

    @property
    def _elapsed_ms(self) -> float:
        """Since the first token that was drawn here."""
        return (self._now() - self._first_token_at) * 1000

    @abstractmethod
    def _timings(self) -> Timings: ...
