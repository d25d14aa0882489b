"""From a `Request` to what the engine draws tokens with: every parameter checked, every text turned into tokens."""

from __future__ import annotations

from typing import assert_never

from backends.grammar import json_schema
from backends.grammar.triggers import Trigger
from backends.llamacpp.bindings import Model
from backends.llamacpp.grammar import GrammarSpec
from backends.llamacpp.sampler import GrammarSource, SamplerSpec
from backends.llamacpp.sampler_params import SamplerParams
from backends.llamacpp.sampling import dry_sampler
from backends.llamacpp.thinking import thinking_spec
from backends.logit_bias import merged_biases
from backends.output.selection import ParserSpec
from protocols.request import Constraint, GbnfConstraint, JsonSchemaConstraint, Request, TextBias

_QUICK_BIASES = 100


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
