"""Draws the tokens of one sequence: the chain, then the grammar if there is one, then what is told about the token."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from backends.llamacpp import logprobs
from backends.llamacpp.bindings import Context, LlamaCppError, Logits, Model, Tokens
from backends.llamacpp.grammar import Grammar, GrammarSpec
from backends.llamacpp.sampler_params import SamplerParams
from backends.llamacpp.sampling import Candidates, DrySampler, SamplerChain
from backends.llamacpp.thinking import Thinking, ThinkingSpec
from backends.logit_bias import NO_BIASES, Biases
from protocols.errors import InvalidRequest
from protocols.events import TokenLogprob
from protocols.request import LogprobOptions

_DRAWS = 8
_MOST_COMPARISONS = 100_000
"""Out of their order, llama.cpp compares each candidate with each bias. Then it is better off with all of them."""
_MOST_ROUNDS = 100
"""llama.cpp's mask is wider than what may follow only in rare cases, and by a few tokens."""


class GrammarSource:
    """A grammar to copy: reading one can take long, so it is read on another thread than the engine's."""

    def __init__(self, model: Model, spec: GrammarSpec) -> None:
        self.gbnf = spec.gbnf
        self._grammar = Grammar(model, spec)

    @property
    def preserved(self) -> frozenset[int]:
        return self._grammar.preserved

    def copy(self) -> Grammar:
        return self._grammar.clone()

    def __del__(self) -> None:
        if grammar := self.__dict__.pop("_grammar", None):
            grammar.close()


class SamplerSpec(msgspec.Struct, frozen=True):
    """All that decides which token comes next. Made on any thread; serves any number of sequences."""

    params: SamplerParams = SamplerParams()
    biases: Biases = NO_BIASES
    dry: DrySampler | None = None
    grammar: GrammarSource | None = None
    logprobs: LogprobOptions | None = None
    thinking: ThinkingSpec | None = None

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens that the answer shows as text."""
        return self.grammar.preserved if self.grammar is not None else frozenset()

    def for_choice(self, index: int) -> SamplerSpec:
        return msgspec.structs.replace(self, params=self.params.for_choice(index))


class Drawn(NamedTuple):
    token: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Lives on the engine thread. `close` frees it, once."""

    def __init__(self, model: Model, spec: SamplerSpec, chain: SamplerChain) -> None:
        """Owns `chain` from here on, whatever happens."""
        self.spec = spec
        self._model = model
        self._chain = chain
        self._grammar: Grammar | None = None
        self._thinking = None if spec.thinking is None else Thinking(model, spec.thinking)
        self._banned = [token for token, bias in spec.biases.items() if bias == -np.inf]
        self._after_sampling = spec.logprobs is not None and spec.logprobs.after_sampling
        try:
            self._grammar = spec.grammar.copy() if spec.grammar is not None else None
        except (InvalidRequest, LlamaCppError):
            self.close()
            raise

    @classmethod
    def of(cls, model: Model, spec: SamplerSpec, prompt: Tokens, resume: Tokens) -> Sampler:
        """One that stands behind `resume`."""
        sampler = cls(model, spec, SamplerChain(model, spec.params, spec.biases, spec.dry))
        try:
            sampler._chain.observe_prompt(prompt)
            sampler._chain.replay(resume)
            sampler._replay(resume)
        except (InvalidRequest, LlamaCppError):
            sampler.close()
            raise
        return sampler

    def _replay(self, tokens: Tokens) -> None:
        """Brings grammar and thinking to where they stood; the chain has its own way."""
        if self._grammar is None and self._thinking is None:
            return
        for token in tokens.tolist():
            if not self._take(token):
                raise InvalidRequest("What was generated so far does not match the grammar", param="resume")

    def _take(self, token: int) -> bool:
        """Tells grammar and thinking of `token`, if it may come next."""
        thinking, grammar = self._thinking, self._grammar
        if grammar is not None and not (thinking is not None and thinking.inside):
            if grammar.allows(token):
                grammar.accept(token)
            elif thinking is None or not thinking.breaks_line(token):
                return False
        if thinking is not None:
            thinking.accept(token)
        return True

    def draw(self, context: Context, row: int) -> Drawn | None:
        """The next token, from the logits of `row` of the last decoded batch. None: nothing can follow.

        `InvalidRequest` if the grammar turns out to be too ambiguous to follow.
        """
        thinking = self._thinking
        if thinking is not None and (forced := thinking.forced) is not None:
            return self._forced(context.logits(row), forced)
        options = self.spec.logprobs
        if self._grammar is None and not self._after_sampling:
            token = self._chain.sample(context, row)
            if thinking is not None:
                thinking.accept(token)
            if options is None:
                return Drawn(token)
            return Drawn(token, logprobs.before_sampling(self._model, context.logits(row), token, options.top))
        logits = context.logits(row)
        candidates = Candidates.of(logits)
        token = self._chain.pick(candidates)
        if self._grammar is not None and thinking is not None and thinking.inside:
            if self._may_not_follow(thinking, token):
                thinking.close()
                return self._forced(logits, thinking.forced, drawn=True)
        if not self._take(token):
            assert self._grammar is not None
            allowed = self._draw_allowed(self._grammar, logits, candidates)
            if allowed is None:
                return None
            token = allowed
            self._take(token)
        self._chain.accept(token)
        return Drawn(token, self._logprob(logits, candidates, token))

    def _may_not_follow(self, thinking: Thinking, token: int) -> bool:
        """Inside the thinking before a grammar: what would end the answer, or begin what the grammar is for unseen."""
        if token in self._model.end_tokens:
            return self._grammar is not None and not self._grammar.spec.lazy
        return thinking.goes_on(token)

    def _forced(self, logits: Logits, token: int | None, *, drawn: bool = False) -> Drawn:
        """`token`, whatever is likely. A random number is drawn as for any other, and so `replay` counts right."""
        assert token is not None
        if not drawn:
            self._chain.pick(Candidates.of(logits))
        self._take(token)
        self._chain.accept(token)
        return Drawn(token)

    def _draw_allowed(self, grammar: Grammar, logits: Logits, candidates: Candidates) -> int | None:
        """The draw again, among what the grammar lets follow."""
        for round_ in range(_MOST_ROUNDS):
            candidates.fill(logits)
            if not grammar.mask(candidates.array):
                return None
            view = candidates.view
            possible = view["logit"] > -np.inf
            if self._banned:
                possible &= ~np.isin(view["id"], self._banned)
            left = int(np.count_nonzero(possible))
            if not left:
                return None
            if left * len(self.spec.biases) <= _MOST_COMPARISONS:
                candidates.keep(possible)
            token = self._chain.pick(candidates) if round_ < _DRAWS else _likeliest(candidates)
            if grammar.allows(token):
                return token
        raise LlamaCppError("llama.cpp reads the grammar otherwise than we do")

    def _logprob(self, logits: Logits, candidates: Candidates, token: int) -> TokenLogprob | None:
        options = self.spec.logprobs
        if options is None:
            return None
        if not options.after_sampling:
            return logprobs.before_sampling(self._model, logits, token, options.top)
        certain = self.spec.params.greedy
        return logprobs.after_sampling(self._model, candidates, token, options.top, certain=certain)

    def close(self) -> None:
        self._chain.close()
        if self._grammar is not None:
            self._grammar.close()


def _likeliest(candidates: Candidates) -> int:
    view = candidates.view
    return int(view["id"][view["logit"].argmax()])
