"""Adds guesses to a step: asks those who make them, within what the step, the context and the budgets have room for."""

from __future__ import annotations

from typing import assert_never

import msgspec
import numpy as np

from backends.llamacpp.draft_model import DraftModel, Wanted
from backends.llamacpp.scheduler import Work
from backends.llamacpp.sequence import NO_TOKENS
from backends.llamacpp.settings import Speculation
from backends.llamacpp.slots import Tokens
from backends.llamacpp.speculation import (
    Drafter,
    ModelDrafter,
    NgramDrafter,
    Price,
    equal_lengths,
    lengths,
)


class Drafting:
    """`apart`: rows that only some sequences have are computed apart, as with one KV cache per slot."""

    def __init__(
        self, settings: Speculation, context_length: int, *, apart: bool, model: DraftModel | None = None
    ) -> None:
        self._settings = settings
        self._context_length = context_length
        self._apart = apart
        self._model = model

    def drafter(self, tokens: Tokens) -> Drafter:
        """For an answer behind `tokens`: the draft model's if there is one."""
        if self._model is not None:
            return ModelDrafter()
        return NgramDrafter(tokens, self._settings.ngram_size, self._context_length)

    def extend(self, work: list[Work], capacity: int) -> list[Work]:
        """`work` with guesses behind the tokens of those who generate, in what is left of a batch of `capacity`."""
        if not any(part.task.drafter is not None for part in work):
            return work
        room = capacity - sum(len(part.tokens) for part in work)
        generating = [part for part in work if not part.task.sequence.uncomputed]
        price = Price.of(max(len(generating), 1), self._settings.row_cost)
        parts: list[tuple[Work, Drafter]] = []
        chances: list[list[float]] = []
        for part in generating:
            drafter = part.task.drafter
            if drafter is not None and (line := drafter.chances(self._most(part), price.row)):
                parts.append((part, drafter))
                chances.append(line)
        if self._apart and len(generating) > 1:
            counts = equal_lengths(chances, price, len(generating))
        else:
            counts = lengths(chances, price)
        guesses: dict[int, Tokens] = {}  # by sequence
        asking: list[tuple[ModelDrafter, Wanted]] = []
        for (part, drafter), count in zip(parts, counts, strict=True):
            count, slot = min(count, room), part.task.sequence.slot
            room -= count
            match drafter:
                case _ if not count:
                    continue
                case NgramDrafter():
                    guesses[slot.id] = drafter.guess(count)
                case ModelDrafter():
                    asking.append((drafter, Wanted(slot.id, np.concatenate([slot.tokens, part.tokens]), count)))
                case _:
                    assert_never(drafter)
        if asking:
            guesses |= self._ask_model(asking)
        return [_with(part, guesses.get(part.task.sequence.slot.id, NO_TOKENS)) for part in work]

    def _most(self, part: Work) -> int:
        """A step brings one token more than were guessed, and all of them must be wanted and have a place."""
        sequence = part.task.sequence
        places = self._context_length - sequence.slot.length - 1
        return max(min(self._settings.max_tokens, sequence.remaining - 1, places), 0)

    def _ask_model(self, asking: list[tuple[ModelDrafter, Wanted]]) -> dict[int, Tokens]:
        assert self._model is not None, "drafters of a model come from a model"
        answers = self._model.draft([wanted for _, wanted in asking])
        for (drafter, _), tokens in zip(asking, answers, strict=True):
            drafter.guessed(tokens)
        return {wanted.sequence: tokens for (_, wanted), tokens in zip(asking, answers, strict=True)}

    def check_integrity(self) -> None:
        if self._model is not None:
            self._model.check_integrity()

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


def _with(part: Work, guesses: Tokens) -> Work:
    if not len(guesses):
        return part
    return msgspec.structs.replace(part, tokens=np.concatenate([part.tokens, guesses]), guesses=len(guesses))
