"""Whether an answer other than the undisturbed one is what rounding makes of it.

llama.cpp's logits depend a little on what is computed together (`backends/llamacpp/engine.py` has the figures), so a
greedy answer may turn where two candidates are all but equal. Here an engine that is alone reads an answer again, token
by token, and says how far each of them was below the best candidate. An answer from which a token was lost, or in which
one came twice, has no such reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.bindings import DECODED, Batch, Logits, Tokens
from backends.llamacpp.settings import LlamaCppSettings
from protocols import llamacpp_native, openai_completions
from protocols.codec import Codec
from tests.backends.llamacpp.helpers import parts
from tests.chaos.asks import Ask
from tests.protocols import captures

NEAR_TIE = 1.0
"""Logits. What was measured between two ways to compute the same token is up to 0.8."""

CODECS: dict[str, Codec[Any]] = {
    **captures.CODECS,
    "/v1/completions": openai_completions.CODEC,
    "/completion": llamacpp_native.COMPLETION,
}


async def readings(settings: LlamaCppSettings, answers: Sequence[tuple[Ask, str]]) -> list[list[float] | None]:
    """For each answer to a greedy request that ignores the end: how far below the best candidate each token of it was.

    None for one that no tokens within `NEAR_TIE` of the best spell.
    """
    backend = LlamaCppBackend(settings)
    await backend.start()
    try:
        reader = _Reader(backend)
        found = []
        for ask, text in answers:
            (request,) = CODECS[ask.path].decode(msgspec.json.encode(ask.body), "reader").requests
            assert request.max_tokens is not None
            found.append(reader.read(await backend._tokens(request), text, request.max_tokens))
        return found
    finally:
        await backend.aclose()


class _Reader:
    """Uses the context of an idle engine."""

    def __init__(self, backend: LlamaCppBackend) -> None:
        runner, self._context = parts(backend)
        self._model = runner._model
        self._batch = Batch(self._context.batch_size)
        self._never = sorted(self._model.end_tokens | self._model.suppressed_tokens)

    def read(self, prompt: Tokens, text: str, tokens: int) -> list[float] | None:
        self._context.forget(0)
        # Half a character at the end of an answer is shown as the replacement character.
        return self._spell(text.rstrip("\ufffd").encode(), tokens, self._compute(prompt, 0), len(prompt))

    def _compute(self, tokens: Tokens | Sequence[int], position: int) -> Logits:
        self._batch.clear()
        row = self._batch.add(tokens, 0, position, logits=1)
        assert self._context.decode(self._batch) == DECODED
        logits = self._context.logits(row).copy()
        logits[self._never] = -np.inf
        return logits

    def _spell(self, rest: bytes, tokens: int, logits: Logits, position: int) -> list[float] | None:
        """The gaps of `tokens` tokens that spell `rest` behind what is computed, the likeliest first."""
        if not tokens:
            return None if rest else []
        gaps = logits.max() - logits
        near = np.flatnonzero(gaps < NEAR_TIE)
        for token in near[np.argsort(gaps[near])].tolist():
            piece = self._model.piece(token)
            if not (rest.startswith(piece) or (not rest and _half(piece))):
                continue
            behind = self._compute([token], position)
            found = self._spell(rest[len(piece) :], tokens - 1, behind, position + 1)
            if found is not None:
                return [float(gaps[token]), *found]
            self._context.truncate(0, position)
        return None


def _half(piece: bytes) -> bool:
    """Whether it is a part of a character."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False
