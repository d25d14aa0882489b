"""One choice of a request on vLLM, whose own text and stops are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from backends.output.answer import Answer, Budget
from backends.output.assembler import Assembler
from backends.prompts import Prepared
from backends.vocabulary import Vocabulary
from protocols.events import Echo, Frame, Started, Timings, TokenLogprob
from protocols.request import Request

LOWEST = -3.4028234663852886e38
"""What the logarithm of 0 is reported as: JSON has no infinity."""

Logprobs = Mapping[int, Any]
"""Token to vLLM's `Logprob`: the drawn one and the likeliest."""


class VllmAnswer(Answer):
    """`limit` is how many tokens the answer may have."""

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
        self._request = request
        self._replayed = 0 if replays else len(request.resume)

        def piece(token: int) -> bytes:
            return vocabulary.special_piece(token) if token in prepared.shown else vocabulary.piece(token)

        parser = None if prepared.parser is None else prepared.parser.make(request.id, choice)
        prompt_tokens = len(prepared.tokens)
        budget = Budget(context_length - prompt_tokens, request.max_tokens, request.max_predict_ms)
        self.limit = budget.tokens
        super().__init__(
            Assembler(request.stop, choice, request.stop_indent, parser),
            piece,
            budget,
            now,
            choice=choice,
            prompt_tokens=prompt_tokens,
            resume=request.resume,
            end_tokens=frozenset() if request.ignore_eos else vocabulary.end_tokens,
            with_timings=request.extras.timings,
        )

    def started(self, echo: Echo | None) -> Started:
        return Started(self._prompt_tokens, self.cached_tokens, self.choice, echo)

    def computed(self, cached_tokens: int) -> None:
        """The prompt is; `cached_tokens` of it were there already, of what is resumed behind it perhaps too."""
        self.cached_tokens = min(cached_tokens, self._prompt_tokens)
        self._first_token_at = self._now()

    def accept(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None) -> Frame | None:
        """The frame of tokens that the engine has made. None if all of them are those of `resume` again."""
        frame = self._frame(self._new(tokens, logprobs))
        return frame if frame.tokens or frame.events else None

    def _new(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None
    ) -> Iterator[tuple[int, TokenLogprob | None]]:
        for index, token in enumerate(tokens):
            if self._replayed < len(self._request.resume):
                self._replayed += 1
                continue
            yield token, None if logprobs is None else self._logprob(token, logprobs[index])

    def _logprob(self, token: int, found: Logprobs) -> TokenLogprob:
        assert self._request.logprobs is not None
        likeliest = sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))
        top = tuple(self._entry(id, entry.logprob) for id, entry in likeliest[: self._request.logprobs.top])
        return self._entry(token, found[token].logprob, top)

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(token, self._piece(token), max(min(logprob, 0.0), LOWEST), top)

    def _timings(self) -> Timings:
        return Timings(
            cache_n=self.cached_tokens,
            prompt_n=self._prompt_tokens - self.cached_tokens,
            prompt_ms=(self._first_token_at - self._began_at) * 1000,
            predicted_n=self._answered - self._resumed,
            predicted_ms=self._elapsed_ms,
        )
