"""A small model that guesses what a large one will say. Lives on the engine thread, as the large one's context does."""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from backends.llamacpp.bindings import DECODED, Batch, Context, LlamaCppError, Logits, Model
from backends.llamacpp.slots import Slot, Tokens

log = logging.getLogger(__name__)

_REST_STEPS = 64
"""A step without room in its KV cache costs the draft model all it has read; it is then left alone for as many."""


class Wanted(msgspec.Struct, frozen=True):
    """Guesses wanted: `count` behind `tokens`, those of sequence `sequence` up to the one that is computed next."""

    sequence: int
    tokens: Tokens
    count: int


class DraftModel:
    """Owns `model` and `context`, which has the sequences of the large model's."""

    def __init__(self, model: Model, context: Context, p_min: float) -> None:
        self._model = model
        self._context = context
        self._p_min = p_min
        self._batch = Batch(context.batch_size)
        self._held = [Slot(id, context.sequence_length) for id in range(context.sequences)]
        self._rest = 0

    def draft(self, wanted: list[Wanted]) -> list[Tokens]:
        """The guesses for each of `wanted`: the likeliest tokens, as long as they are likelier than `p_min`.

        Fewer than asked for, or none, where the model is not sure, has no room, or has not read the text yet: a step
        reads as many tokens of it as fit one batch.
        """
        guesses: list[list[int]] = [[] for _ in wanted]
        if self._rest:
            self._rest -= 1
        else:
            self._guess(wanted, guesses)
        return [np.array(tokens, np.int32) for tokens in guesses]

    def _guess(self, wanted: list[Wanted], guesses: list[list[int]]) -> None:
        open_ = self._catch_up(wanted)
        while open_:
            following: list[tuple[int, int]] = []
            for index, row in open_:
                token, chance = _likeliest(self._context.logits(row))
                if chance < self._p_min:
                    continue
                guesses[index].append(token)
                if len(guesses[index]) < wanted[index].count:
                    following.append((index, token))
            self._batch.clear()
            rows = [self._add(wanted[index].sequence, [token]) for index, token in following]
            open_ = [(index, row) for (index, _), row in zip(following, rows, strict=True)]
            if open_ and not self._decode():
                return

    def _catch_up(self, wanted: list[Wanted]) -> list[tuple[int, int]]:
        """Reads what is new in the texts. Which of `wanted` are read to their end, and the rows that follow there."""
        ready: list[tuple[int, int]] = []
        self._batch.clear()
        for index, want in enumerate(wanted):
            held = self._held[want.sequence]
            if len(want.tokens) + want.count > held.capacity:
                continue
            self._cut(held, min(held.common_prefix(want.tokens), len(want.tokens) - 1))
            new = want.tokens[held.length : held.length + self._batch.room]
            if len(new):
                row = self._add(want.sequence, new)
                if held.length == len(want.tokens):
                    ready.append((index, row))
        return ready if self._batch.size and self._decode() else []

    def _add(self, sequence: int, tokens: Tokens | list[int]) -> int:
        held = self._held[sequence]
        row = self._batch.add(tokens, sequence, held.length, logits=True)
        held.append(np.asarray(tokens, np.int32))
        return row

    def _decode(self) -> bool:
        """False: it could not be computed. Nothing is held then, and nothing wanted for a while."""
        code = self._context.decode(self._batch)
        if code == DECODED:
            return True
        log.warning("the draft model rests: llama_decode answered %d", code)
        for held in self._held:
            self._cut(held, 0)
        self._rest = _REST_STEPS
        return False

    def _cut(self, held: Slot, length: int) -> None:
        if length == held.length:
            return
        if length and self._context.truncate(held.id, length):
            held.truncate(length)
        else:
            self._context.forget(held.id)
            held.truncate(0)

    def check_integrity(self) -> None:
        """Raises AssertionError when llama.cpp holds something else than the books say. Tests call it after a step."""
        for held in self._held:
            if (found := self._context.length(held.id)) != held.length:
                raise AssertionError(f"draft sequence {held.id} holds {found} tokens, on the books are {held.length}")

    def close(self) -> None:
        self._context.close()
        self._model.close()


def _likeliest(logits: Logits) -> tuple[int, float]:
    """The likeliest token and its probability."""
    token = int(logits.argmax())
    return token, 1.0 / float(np.exp(logits - logits[token]).sum())


def check_same_vocabulary(model: Model, draft: Model) -> None:
    """`LlamaCppError` says how the two differ: the tokens of one would mean something else to the other."""
    for name, one, other in (
        ("tokens", model.vocab_size, draft.vocab_size),
        ("begin of text", (model.adds_bos, model.bos_text), (draft.adds_bos, draft.bos_text)),
        ("end of text", model.eos_text, draft.eos_text),
        ("end tokens", sorted(model.end_tokens), sorted(draft.end_tokens)),
    ):
        if one != other:
            raise LlamaCppError(f"its vocabulary is not the model's: {name} {other}, not {one}")
    for token in range(model.vocab_size):
        if (one_piece := model.special_piece(token)) != (other_piece := draft.special_piece(token)):
            raise LlamaCppError(
                f"its vocabulary is not the model's: token {token} is {other_piece!r}, not {one_piece!r}"
            )


def can_be_cut(context: Context) -> bool:
    """Whether sequences can give up their last tokens. The state of a recurrent model can only be dropped as a whole.

    `context` must be empty. False also if it cannot compute two tokens.
    """
    batch = Batch(2)
    batch.add([0, 0], 0, 0, logits=True)
    cut = context.decode(batch) == DECODED and context.truncate(0, 1)
    context.forget(0)
    return cut
