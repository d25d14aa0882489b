"""`generation_settings`: every parameter of a generation as it applies, which llama.cpp repeats in its answers."""

from __future__ import annotations

import math
from typing import Any, assert_never

from protocols.events import Echo
from protocols.request import Constraint, GbnfConstraint, JsonSchemaConstraint, Request, Sampling, TokenBias

_RANDOM_SEED = 0xFFFFFFFF
_KINDS = {"token": 0, "word": 1, "pattern": 2, "pattern_full": 3}


_SPECULATION = {"off": "none", "ngram": "ngram-simple", "draft": "draft-simple"}


def generation_settings(request: Request, echo: Echo, *, stream: bool) -> dict[str, Any]:
    """Of one request. `echo` is the engine's view of it."""
    sampling = echo.sampling
    # Minus infinity is `null` in JSON.
    biases = [
        {"bias": bias.bias if math.isfinite(bias.bias) else None, "token": bias.token}
        for bias in sampling.logit_bias or ()
        if isinstance(bias, TokenBias)
    ]
    behind: dict[str, dict[str, Any]] = {
        "dry_penalty_last_n": {"dry_sequence_breakers": list(sampling.dry_sequence_breakers or ())},
        "adaptive_decay": {"stop": list(request.stop)},
        "stream": {"logit_bias": biases},
        "min_keep": _grammar(request.constraint, echo.grammar),
    }
    settings: dict[str, Any] = {}
    for name, value in short_settings(sampling, request.max_tokens).items():
        settings |= {name: value} | behind.get(name, {})
    return settings | {
        "n_keep": request.slot.keep,
        "n_discard": request.slot.discard,
        "ignore_eos": request.ignore_eos,
        "stream": stream,
        "speculative.types": _SPECULATION[echo.speculation],
        "n_probs": 0 if request.logprobs is None else request.logprobs.top,
        "timings_per_token": request.extras.timings,
        "post_sampling_probs": request.logprobs is not None and request.logprobs.after_sampling,
        "lora": [{"id": item.id, "scale": item.scale} for item in request.lora or ()],
    }


def short_settings(sampling: Sampling, max_tokens: int | None) -> dict[str, Any]:
    """Without lists and grammars: "the short variant … used by `/slots` and `/props`"."""
    limit = -1 if max_tokens is None else max_tokens
    return {
        "seed": _RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "mirostat": sampling.mirostat,
        "mirostat_tau": sampling.mirostat_tau,
        "mirostat_eta": sampling.mirostat_eta,
        "adaptive_target": sampling.adaptive_target,
        "adaptive_decay": sampling.adaptive_decay,
        "max_tokens": limit,
        "n_predict": limit,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": False,
        "stream": False,
        "n_probs": 0,
        "min_keep": sampling.min_keep,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(sampling.samplers or ()),
        "speculative.types": "none",
        "timings_per_token": False,
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [],
    }


def _grammar(constraint: Constraint | None, made: str) -> dict[str, Any]:
    """`made` is what the engine made of a schema."""
    match constraint:
        case None | JsonSchemaConstraint():
            return {"grammar": made, "grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": []}
        case GbnfConstraint(text=text, lazy=lazy, triggers=triggers, preserved_tokens=preserved):
            shown = [
                {"type": _KINDS[t.kind], "value": t.value} | ({} if t.token is None else {"token": t.token})
                for t in triggers
            ]
            return {"grammar": text, "grammar_lazy": lazy, "grammar_triggers": shown, "preserved_tokens": [*preserved]}
        case _:
            assert_never(constraint)
