"""The probabilities reported with a token, computed from arrays: no loop ever runs over the vocabulary."""

from __future__ import annotations

import math

import numpy as np

from backends.llamacpp.bindings import Logits, Model
from backends.llamacpp.sampling import Candidates
from protocols.errors import InvalidRequest
from protocols.events import TokenLogprob
from protocols.request import LogprobOptions

LOWEST = float(np.finfo(np.float32).min)
"""What the logarithm of 0 is reported as: JSON has no infinity."""

MAX_TOP = 1000
"""Alternatives per token. More would keep everyone else waiting for them."""


def check_options(options: LogprobOptions | None) -> None:
    if options is not None and not 0 <= options.top <= MAX_TOP:
        raise InvalidRequest(f"logprobs must be between 0 and {MAX_TOP}", param="logprobs")


def before_sampling(model: Model, logits: Logits, token: int, top: int) -> TokenLogprob:
    """ln of the softmax of the raw logits: what the model thinks, whatever the samplers make of it."""
    highest = float(logits.max())
    normaliser = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
    top = min(top, len(logits))
    likeliest: list[int] = []
    if top:
        ids = np.argpartition(logits, -top)[-top:] if top < len(logits) else np.arange(len(logits))
        likeliest = ids[np.lexsort((ids, -logits[ids]))].tolist()
    alternatives = tuple(_entry(model, id_, float(logits[id_]) - normaliser) for id_ in likeliest)
    return _entry(model, token, float(logits[token]) - normaliser, alternatives)


def after_sampling(model: Model, candidates: Candidates, token: int, top: int, *, certain: bool) -> TokenLogprob:
    """ln of the probabilities that the token was drawn with. Candidates that had none are not listed.

    `certain` when the likeliest was taken without a draw: then there are no probabilities, and it is the only one.
    """
    if certain:
        entry = _entry(model, token, 0.0)
        return _entry(model, token, 0.0, (entry,) if top else ())
    view = candidates.view
    view = view[view["p"] > 0]
    chosen = view["p"][view["id"] == token]
    if len(view) > top > 0:
        view = view[np.argpartition(view["p"], -top)[-top:]]
    order = np.lexsort((view["id"], -view["p"]))[:top]
    alternatives = tuple(
        _entry(model, id_, math.log(p))
        for id_, p in zip(view["id"][order].tolist(), view["p"][order].tolist(), strict=True)
    )
    return _entry(model, token, math.log(float(chosen[0])) if len(chosen) else -math.inf, alternatives)


def _entry(model: Model, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(token, model.piece(token), max(min(logprob, 0.0), LOWEST), top)
