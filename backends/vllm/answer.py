"""One choice of a request: what vLLM's tokens mean, and when the answer ends. vLLM's own text and stops are not used.

The budget: prompt and answer together never exceed the context, and the answer never exceeds `max_tokens`. Tokens of
`resume` are part of the answer and of its budget; they pass through the assembler without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backends.output.assembler import Assembler
from backends.output.pace import is_late, timed
from backends.prompts import Prepared
from backends.vocabulary import Vocabulary
from protocols.events import (
    Echo,
    Event,
    Finished,
    FinishReason,
    Frame,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from protocols.request import Request

LOWEST = -3.4028234663852886e38
"""What the logarithm of 0 is reported as: JSON has no infinity."""

Logprobs = Mapping[int, Any]
"""Token to vLLM's `Logprob`: the drawn one and the likeliest."""


class Answer:
    """`limit` is how many tokens the answer may have; `reason` is set once it has ended."""

    def __init__(
        self,
        request: Request,
        choice: int,
        prepared: Prepared,
        vocabulary: Vocabulary,
        context_length: int,
        now: Callable[[], float],
        *,
        replays: bool,
    ) -> None:
        """`replays`: the engine generates the tokens of `resume` again."""
        self.choice = choice
        self.reason: FinishReason | None = None
        self.cached_tokens = 0
        self._request = request
        self._prompt_tokens = len(prepared.tokens)
        self._shown = prepared.shown
        self._vocabulary = vocabulary
        self._now = now
        parser = None if prepared.parser is None else prepared.parser.make(request.id, choice)
        self._assembler = Assembler(request.stop, choice, request.stop_indent, parser)
        self._end_tokens = frozenset[int]() if request.ignore_eos else vocabulary.end_tokens
        room = context_length - self._prompt_tokens
        self.limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self._ends_with_context = self.limit == room
        self._answered = 0
        self._replayed = 0 if replays else len(request.resume)
        self._began_at = self._first_token_at = now()
        for token in request.resume:
            self._take(token)
        if self._answered >= self.limit and self.reason is None:
            self.reason = "length"

    @property
    def answered(self) -> int:
        """How many tokens the answer has so far, those that were resumed among them."""
        return self._answered

    def started(self, echo: Echo | None) -> Started:
        return Started(self._prompt_tokens, self.cached_tokens, self.choice, echo)

    def computed(self, cached_tokens: int) -> None:
        """The prompt is; `cached_tokens` of it were there already, of what is resumed behind it perhaps too."""
        self.cached_tokens = min(cached_tokens, self._prompt_tokens)
        self._first_token_at = self._now()

    def accept(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Frame | None:
        """The frame of tokens that the engine has made. None if all of them are those of `resume` again."""
        events: list[Event] = []
        taken: list[int] = []
        for index, token in enumerate(tokens):
            if self._replayed < len(self._request.resume):
                self._replayed += 1
                continue
            if self.reason is not None:
                break
            logprob = None if logprobs is None else self._logprob(token, logprobs[index])
            new = self._take(token, logprob)
            taken.append(token)
            events += new
            if self.reason is None and (
                self._answered >= self.limit or is_late(new, self._elapsed_ms, self._request.max_predict_ms)
            ):
                self.reason = "length"
        if self.reason is not None:
            events += self._assembler.finish(self.reason)
        if self._request.extras.timings:
            events = [timed(event, self._timings()) for event in events]
        if self.reason is not None:
            events.append(self._finished())
        return Frame(tuple(events), tuple(taken), self.choice) if taken or events else None

    def end(self, reason: FinishReason) -> Frame:
        """The answer ends without another token, unless it has ended for another reason before."""
        self.reason = self.reason or reason
        return Frame((*self._assembler.finish(self.reason), self._finished()), choice=self.choice)

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

    def _piece(self, token: int) -> bytes:
        vocabulary = self._vocabulary
        return vocabulary.special_piece(token) if token in self._shown else vocabulary.piece(token)

    def _logprob(self, token: int, found: Logprobs) -> TokenLogprob:
        assert self._request.logprobs is not None
        likeliest = sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))
        top = tuple(self._entry(id, entry.logprob) for id, entry in likeliest[: self._request.logprobs.top])
        return self._entry(token, found[token].logprob, top)

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(token, self._piece(token), max(min(logprob, 0.0), LOWEST), top)

    def _finished(self) -> Finished:
        assert self.reason is not None
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
            truncated=self.reason == "length" and self._ends_with_context and self._answered >= self.limit,
        )

    @property
    def _elapsed_ms(self) -> float:
        """Since the first token that was drawn here."""
        return (self._now() - self._first_token_at) * 1000

    def _timings(self) -> Timings:
        return Timings(
            cache_n=self.cached_tokens,
            prompt_n=self._prompt_tokens - self.cached_tokens,
            prompt_ms=(self._first_token_at - self._began_at) * 1000,
            predicted_n=self._answered - len(self._request.resume),
            predicted_ms=self._elapsed_ms,
        )
