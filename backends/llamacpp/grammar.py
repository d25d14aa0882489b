"""A grammar that constrains what is generated: llama.cpp's sampler, used outside the chain and guarded.

llama.cpp masks the vocabulary; whether one token may follow is asked of our own `Matcher` as well, and llama.cpp is
told of a token only if both agree. Telling it of any other ends the process.

A step of the engine:

1. Draw a token from the chain, without telling the chain or the grammar.
2. `allows(token)`: nearly always yes, and costs microseconds.
3. Otherwise `mask` a candidate array made of all logits, apply the chain to it, and go to 2 with what it selected. Each
   round also rules out the token refused before, so this ends. `mask` returning 0 means that nothing can follow.
4. `accept(token)` here and in the chain.

Prompt tokens are not accepted; tokens of an answer that is resumed are, in order. A lazy grammar lets everything pass
until it meets a trigger (`triggers.py`), and then counts the text from where the trigger begins; a token that triggers
but goes on in a way that the grammar forbids is refused. Trigger patterns are of the kind in `regex_syntax.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as c
import msgspec
import numpy as np

from backends.grammar import gbnf
from backends.grammar.gbnf_matcher import Matcher, State
from backends.grammar.gbnf_rules import TokenRef, invalid
from backends.grammar.triggers import Trigger, Watch
from backends.llamacpp.bindings import LlamaCppError, Model
from protocols.errors import InvalidRequest

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """`gbnf` has a rule `root`. `preserved` are texts of special tokens that are to be shown as text."""

    gbnf: str
    lazy: bool = False
    triggers: tuple[Trigger, ...] = ()
    preserved: tuple[str, ...] = ()


class _Next(NamedTuple):
    """What accepting `token` leads to. If it is a trigger: `fed` counts, but for `skipped` bytes of the first."""

    token: int
    state: State | None
    watch: Watch | None
    fed: tuple[int, ...] = ()
    skipped: int = 0


class Grammar:
    """`InvalidRequest` for a grammar or triggers that are wrong. May be made on any thread; serves one sequence then.

    Owns its native sampler, which must not be added to a chain; `close` frees it, once.
    """

    def __init__(self, model: Model, spec: GrammarSpec) -> None:
        self.spec = spec
        self.preserved = frozenset(_preserved(model, spec.preserved))
        self._model = model
        self._refused: set[int] = set()
        self._next: _Next | None = None
        self._watch: Watch | None = None
        self._trigger_tokens: frozenset[int] = frozenset()
        self._heard: list[tuple[int, int]] = []  # while awaiting: each token, and where its text ends
        rules = gbnf.parse(spec.gbnf)
        self._matcher = Matcher(rules, _token_ids(model, rules.tokens))
        self._state = self._matcher.start
        if spec.lazy:
            self._await_triggers()
        self._sampler = _made(c.llama_sampler_init_grammar(model.vocab, spec.gbnf.encode(), b"root"))

    def _await_triggers(self) -> None:
        if not self.spec.triggers:
            raise InvalidRequest("no triggers set for lazy grammar!", param="grammar_triggers")
        tokens, texts = set(), []
        for trigger in self.spec.triggers:
            token = self._trigger_token(trigger)
            if token is None:
                if trigger.kind == "word" and not self._matcher.accepts(trigger.value):
                    raise _unaccepted(trigger)
                texts.append(trigger)
            elif self._matcher.advance(self._matcher.start, token, _text(self._model, token)) is None:
                raise _unaccepted(trigger)
            else:
                tokens.add(token)
        self._trigger_tokens = frozenset(tokens)
        self._watch = Watch.of(texts)

    def _trigger_token(self, trigger: Trigger) -> int | None:
        """The token that the trigger stands for, if it does; else it is found in the text."""
        if trigger.kind == "token":
            if not 0 <= trigger.token < self._model.vocab_size:
                raise InvalidRequest(f"Grammar trigger token {trigger.token} does not exist", param="grammar_triggers")
            return trigger.token
        if not trigger.value:
            raise InvalidRequest("Grammar trigger without a value", param="grammar_triggers")
        if trigger.kind != "word":
            return None
        ids = self._model.tokenize(trigger.value, add_special=False, parse_special=True).tolist()
        if len(ids) != 1:
            return None
        if ids[0] not in self.preserved:
            raise InvalidRequest(
                f"Grammar trigger word should be marked as preserved token: {trigger.value}", param="grammar_triggers"
            )
        return int(ids[0])

    @property
    def awaiting(self) -> bool:
        """Lazy, and no trigger has come yet: everything is allowed."""
        return self._watch is not None

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self.awaiting or self._matcher.complete(self._state)

    def allows(self, token: int) -> bool:
        """`InvalidRequest` if the grammar turns out to be too ambiguous to follow."""
        if not 0 <= token < self._model.vocab_size:
            raise LlamaCppError(f"token {token} is outside the vocabulary of {self._model.vocab_size}")
        self._next = self._look_ahead(token)
        if self._next is None:
            self._refused.add(token)
        return self._next is not None

    def _look_ahead(self, token: int) -> _Next | None:
        if token in self._model.end_tokens:
            return _Next(token, self._state, self._watch) if self.is_complete else None
        text = _text(self._model, token)
        if self._watch is not None:
            return self._listen(self._watch, token, text)
        state = self._matcher.advance(self._state, token, text)
        if state is None or not self._native_allows(token):
            return None
        return _Next(token, state, None)

    def _listen(self, watch: Watch, token: int, text: bytes) -> _Next | None:
        if token in self._trigger_tokens:
            return self._triggered([(token, text)], 0)
        watch, start = watch.feed(text)
        if start is None:
            return _Next(token, None, watch)
        end = self._heard[-1][1] if self._heard else 0
        overlapping = [(t, _text(self._model, t)) for t, t_end in self._heard if t_end > start] + [(token, text)]
        return self._triggered(overlapping, start - (end + len(text) - sum(len(t) for _, t in overlapping)))

    def _triggered(self, tokens: list[tuple[int, bytes]], skipped: int) -> _Next | None:
        state = self._matcher.start
        for index, (token, text) in enumerate(tokens):
            following = self._matcher.advance(state, token, text if index else text[skipped:])
            if following is None:
                return None
            state = following
        return _Next(tokens[-1][0], state, None, tuple(token for token, _ in tokens), skipped)

    def mask(self, candidates: Any) -> int:
        """Sets the logits of forbidden candidates (a `llama_token_data_array`) to -inf. Returns how many are left."""
        view = _view(candidates)
        if view.size and not 0 <= view["id"].min() <= view["id"].max() < self._model.vocab_size:
            raise LlamaCppError("a candidate is outside the vocabulary")
        if not self.awaiting:
            c.llama_sampler_apply(self.handle, ctypes.byref(candidates))
        if self._refused:
            view["logit"][np.isin(view["id"], list(self._refused))] = -np.inf
        return int(np.count_nonzero(view["logit"] > -np.inf))

    def accept(self, token: int) -> None:
        """`LlamaCppError` for a token that the grammar does not allow."""
        if (self._next is None or self._next.token != token) and not self.allows(token):
            raise LlamaCppError(f"the grammar does not allow token {token}")
        following = self._next
        assert following is not None
        self._next = None
        self._refused.clear()
        if token in self._model.end_tokens:
            return
        if self._watch is not None and following.watch is not None:
            end = self._heard[-1][1] if self._heard else 0
            self._heard.append((token, end + len(_text(self._model, token))))
            self._watch = following.watch
            return
        if self._watch is None:
            c.llama_sampler_accept(self.handle, token)  # `_look_ahead` has asked llama.cpp
        else:
            self._activate(following)
        assert following.state is not None
        self._matcher, self._state = self._matcher.renewed(following.state)
        self._watch = None
        self._heard.clear()

    def _activate(self, following: _Next) -> None:
        """The trigger has come: tells llama.cpp of the text so far that counts."""
        fed = following.fed
        if following.skipped:
            # Only a lazy grammar takes a part of a token's text. It is triggered by what the matcher has let pass.
            patterns = (ctypes.c_char_p * 1)(rb"^[\s\S]{%d}([\s\S])" % following.skipped)
            sampler = _made(
                c.llama_sampler_init_grammar_lazy_patterns(
                    self._model.vocab, self.spec.gbnf.encode(), b"root", patterns, 1, None, 0
                )
            )
            self.close()
            self._sampler = sampler
            c.llama_sampler_accept(self.handle, fed[0])
            fed = fed[1:]
        for token in fed:
            if not self._native_allows(token):
                raise LlamaCppError(f"llama.cpp reads the grammar otherwise than we do, at token {token}")
            c.llama_sampler_accept(self.handle, token)

    def _native_allows(self, token: int) -> bool:
        candidate = (c.llama_token_data * 1)(c.llama_token_data(token, 0.0, 0.0))
        array = c.llama_token_data_array(data=candidate, size=1, selected=-1, sorted=False)
        c.llama_sampler_apply(self.handle, ctypes.byref(array))
        return bool(candidate[0].logit == 0.0)

    def clone(self) -> Grammar:
        """Another one at the same place, to be closed on its own. Both live on the same thread."""
        sampler = _made(c.llama_sampler_clone(self.handle))
        copy = Grammar.__new__(Grammar)
        copy.__dict__.update(self.__dict__)
        copy._sampler = sampler
        copy._heard, copy._refused = list(self._heard), set(self._refused)
        return copy

    @property
    def handle(self) -> Any:
        if self._sampler is None:
            raise LlamaCppError("the grammar is closed")
        return self._sampler

    def close(self) -> None:
        if self._sampler is not None:
            c.llama_sampler_free(self._sampler)
            self._sampler = None


def _made(sampler: Any) -> Any:
    """A grammar that llama.cpp refuses is a null pointer object; using it ends the process."""
    if not sampler:
        raise invalid("llama.cpp cannot read it")
    return sampler


def _unaccepted(trigger: Trigger) -> InvalidRequest:
    what = repr(trigger.value) if trigger.value else str(trigger.token)
    return InvalidRequest(
        f"The grammar does not begin with its trigger {what}: the text that it applies to starts there.",
        param="grammar_triggers",
    )


def _preserved(model: Model, texts: tuple[str, ...]) -> list[int]:
    """Those that are one token."""
    ids = [model.tokenize(text, add_special=False, parse_special=True).tolist() for text in texts]
    return [one[0] for one in ids if len(one) == 1]


def _token_ids(model: Model, tokens: Iterable[TokenRef]) -> dict[str, int]:
    """The ids of the tokens that a grammar names by their text."""
    found = {}
    for token in tokens:
        if isinstance(token.token, str):
            ids = model.tokenize(token.token, add_special=False, parse_special=True).tolist()
            if len(ids) != 1:
                raise invalid(f"'{token.token}' is not one token")
            found[token.token] = id_ = ids[0]
        elif token.token >= model.vocab_size:
            raise invalid(f"token {token.token} is outside the vocabulary of {model.vocab_size}")
        else:
            id_ = token.token
        if id_ in model.end_tokens and not token.negated:
            raise invalid(f"the token {token.token} ends a text by itself, and is not part of a grammar")
    return found


def _text(model: Model, token: int) -> bytes:
    """What a grammar sees of a token. Unlike an answer, it sees special tokens."""
    if text := model.piece(token):
        return text
    buffer = ctypes.create_string_buffer(256)
    size = c.llama_token_to_piece(model.vocab, token, buffer, len(buffer), 0, True)
    if size < 0:
        buffer = ctypes.create_string_buffer(-size)
        size = c.llama_token_to_piece(model.vocab, token, buffer, len(buffer), 0, True)
    return buffer.raw[:size]


def _view(candidates: Any) -> Any:
    """The candidates as a numpy array, without a copy."""
    address = ctypes.cast(candidates.data, ctypes.c_void_p).value
    if not candidates.size or address is None:
        return np.empty(0, _CANDIDATE)
    return np.frombuffer((ctypes.c_char * (candidates.size * _CANDIDATE.itemsize)).from_address(address), _CANDIDATE)
