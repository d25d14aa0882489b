"""From a `Request` to what the engine draws tokens with: every parameter checked, every text turned into tokens."""

from __future__ import annotations

import math
from typing import assert_never

from backends.grammar import json_schema
from backends.grammar.triggers import Trigger
from backends.llamacpp.bindings import Model
from backends.llamacpp.grammar import GrammarSpec
from backends.llamacpp.logprobs import check_options
from backends.llamacpp.sampler import GrammarSource, SamplerSpec
from backends.llamacpp.sampler_params import SamplerParams
from backends.llamacpp.sampling import dry_sampler
from backends.llamacpp.thinking import thinking_spec
from backends.logit_bias import merged_biases
from backends.output.selection import ParserSpec
from protocols.errors import InvalidRequest
from protocols.request import Constraint, GbnfConstraint, JsonSchemaConstraint, Request, TextBias

_QUICK_BIASES = 100


def check_limits(request: Request) -> None:
    """The ranges of what decides about the number, the length and the report of answers."""
    if request.max_tokens is not None and request.max_tokens < 0:
        raise InvalidRequest("max_tokens must be at least 0", param="max_tokens")
    if request.stop_indent < 0:
        raise InvalidRequest("stop_indent must be at least 0", param="stop_indent")
    if request.max_predict_ms is not None and not -1 <= request.max_predict_ms < math.inf:
        raise InvalidRequest("max_predict_ms must be a number that is at least -1", param="max_predict_ms")
    for name, value, least in (
        ("n", request.n, 1),
        ("slot.keep", request.slot.keep, -1),
        ("slot.discard", request.slot.discard, 0),
    ):
        if value < least:
            raise InvalidRequest(f"{name} must be at least {least}", param=name)
    check_options(request.logprobs)


def is_quick(request: Request) -> bool:
    """Whether `sampler_spec` takes so little that the event loop may do it."""
    sampling = request.sampling
    biases = sampling.logit_bias or ()
    texts = sum(len(bias.text) for bias in biases if isinstance(bias, TextBias))
    dries = bool(sampling.dry_multiplier)
    return request.constraint is None and not dries and len(biases) <= _QUICK_BIASES and texts <= 20 * _QUICK_BIASES


def sampler_spec(model: Model, request: Request, parser: ParserSpec | None = None) -> SamplerSpec:
    """`parser` reads the answer. `InvalidRequest` names the field that cannot be used. Safe on any thread."""
    params = SamplerParams.of(request.sampling)
    return SamplerSpec(
        params=params,
        biases=merged_biases(model, request.sampling.logit_bias, ignore_eos=request.ignore_eos),
        dry=dry_sampler(model, params),
        grammar=None if request.constraint is None else GrammarSource(model, grammar_spec(request.constraint)),
        logprobs=request.logprobs,
        thinking=thinking_spec(model, request, parser),
    )


def grammar_spec(constraint: Constraint) -> GrammarSpec:
    match constraint:
        case JsonSchemaConstraint(schema=schema):
            return GrammarSpec(json_schema.to_gbnf(schema))
        case GbnfConstraint(text=text, lazy=lazy, triggers=triggers, preserved_tokens=preserved):
            return GrammarSpec(
                text,
                lazy,
                tuple(Trigger(t.kind, t.value, -1 if t.token is None else t.token) for t in triggers) if lazy else (),
                preserved,
            )
        case _:
            assert_never(constraint)
