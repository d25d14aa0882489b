"""The parameters of a generation that every dialect with llama.cpp's extras shares: one table, one meaning.

"declarative fields; `null` = absent; wrong type or outside hard range → 400 …. Soft clamps" are the engine's: a `top_p`
of 2 is 1 there. A dialect's body inherits from `SamplingFields` and narrows what its own specification narrows.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from protocols.affinity import affinity
from protocols.body import LIST, STRING, STRING_OR_LIST, Wire, plain_json, shown
from protocols.errors import InvalidRequest
from protocols.request import (
    Constraint,
    Extras,
    GbnfConstraint,
    GrammarTrigger,
    JsonSchemaConstraint,
    LogitBias,
    LogprobOptions,
    LoraScale,
    Prompt,
    Request,
    Sampling,
    SlotOptions,
    TextBias,
    TokenBias,
)

I32 = 2**31 - 1
MAX_CHOICES = 128
"""OpenAI's limit for `n`. How many of them run at once is the engine's to say."""
MAX_BIASES = 4096
MAX_PROBS = 1000
"""Alternatives per token. More would keep everyone else waiting for them."""

Strings = Annotated[list[str], Field(max_length=128)]
Stop = Annotated[Annotated[str, Tag(STRING)] | Annotated[Strings, Tag(LIST)], STRING_OR_LIST]
Samplers = Annotated[Annotated[str, Field(max_length=64), Tag(STRING)] | Annotated[Strings, Tag(LIST)], STRING_OR_LIST]
Natural = Annotated[int, Field(ge=0, le=I32)]
"""A count, and "-1 is an error now" where it once meant the whole context."""
NaturalOrAll = Annotated[int, Field(ge=-1, le=I32)]
Positive = Annotated[int, Field(ge=1, le=I32)]
Integer = Annotated[int, Field(ge=-(2**31), le=I32)]
Temperature = Annotated[float, Field(ge=0, le=2)]
"""The range of those specifications that have one."""
Probability = Annotated[float, Field(ge=0, le=1)]


class LoraField(Wire):
    id: Integer
    scale: float = 0.0


class TriggerField(Wire):
    """Type 0 is a token, 1 a word, 2 a pattern, 3 a pattern for the whole text."""

    type: Literal[0, 1, 2, 3]
    value: str
    token: Natural | None = None


class SamplingFields(Wire):
    # How long the answer is, how often there is one, and where it ends.
    n_predict: NaturalOrAll | None = None
    max_completion_tokens: NaturalOrAll | None = None
    max_tokens: NaturalOrAll | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    n_indent: Natural | None = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=2**53)] | None = None
    # How the next token is chosen.
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: Integer | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: Annotated[float, Field(ge=0, le=0.99)] | None = None
    mirostat: Integer | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repeat_last_n: Natural | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Natural | None = None
    dry_penalty_last_n: Natural | None = None
    dry_sequence_breakers: Annotated[list[str], Field(min_length=1, max_length=64)] | None = None
    min_keep: Natural | None = None
    samplers: Samplers | None = None
    logit_bias: Any = None
    # What the answer must look like.
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar_lazy: bool | None = None
    grammar_triggers: Annotated[list[TriggerField], Field(max_length=1024)] | None = None
    preserved_tokens: Annotated[list[str], Field(max_length=1024)] | None = None
    # Probabilities that are reported.
    n_probs: Annotated[int, Field(ge=0, le=MAX_PROBS)] | None = None
    post_sampling_probs: bool | None = None
    # Slots, their KV cache, and adapters.
    id_slot: NaturalOrAll | None = None
    cache_prompt: bool | None = None
    n_keep: NaturalOrAll | None = None
    n_discard: Natural | None = None
    lora: Annotated[list[LoraField], Field(max_length=1024)] | None = None
    # Whether tokens are guessed: "none" turns it off and "ngram…" on, by what was said; others are the model's matter.
    speculative_type: str | None = Field(None, alias="speculative.type")
    # What comes with the answer.
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = None
    sse_ping_interval: NaturalOrAll | None = None
    # Checked, and without a say in what the answer is.
    backend_sampling: bool | None = None
    n_cache_reuse: Natural | None = None
    # Which requests belong together.
    prompt_cache_key: str | None = None


def request(
    fields: SamplingFields,
    *,
    id: str,
    model: str,
    prompt: Prompt,
    constraint: Constraint | None = None,
    logprobs: LogprobOptions | None = None,
    max_tokens: int | None = None,
    session: str | None = None,
) -> Request:
    """The request for `fields`. The dialect's own `constraint` and `logprobs` go before theirs.

    `max_tokens` is the limit of a dialect that has one where the body names none; None is none. `session` is what else
    in the body says which requests belong together.
    """
    return Request(
        id=id,
        model=model,
        affinity=affinity(fields.prompt_cache_key, session),
        prompt=prompt,
        sampling=sampling(fields),
        max_tokens=token_limit(fields, max_tokens),
        stop=stop(fields),
        n=choices(fields),
        ignore_eos=bool(fields.ignore_eos),
        constraint=constraint or own_constraint(fields),
        logprobs=logprobs or own_logprobs(fields),
        slot=slot_options(fields),
        lora=lora(fields),
        speculate=speculate(fields),
        stop_indent=fields.n_indent or 0,
        # -1 is "no limit".
        max_predict_ms=float(limit) if (limit := fields.t_max_predict_ms) is not None and limit >= 0 else None,
        extras=Extras(
            echo=bool(fields.verbose),
            progress=bool(fields.return_progress),
            timings=bool(fields.timings_per_token),
        ),
    )


def keepalive_s(fields: SamplingFields) -> float | None:
    """ "`sse_ping_interval` s (30, -1 off)"; llama.cpp takes 0 for off as well."""
    seconds = fields.sse_ping_interval
    if seconds is None:
        return None
    return float(seconds) if seconds > 0 else math.inf


def token_limit(fields: SamplingFields, default: int | None = None) -> int | None:
    """ "`n_predict` > `max_completion_tokens` > `max_tokens`"; None, for -1 or where none is given, is no limit."""
    for limit in (fields.n_predict, fields.max_completion_tokens, fields.max_tokens):
        if limit is not None:
            return None if limit < 0 else limit
    return default


def choices(fields: SamplingFields) -> int:
    return fields.n_cmpl or fields.n or 1


def only_one_choice(fields: SamplingFields) -> None:
    """For a dialect whose answers have no choices."""
    if choices(fields) > 1:
        name = "n_cmpl" if fields.n_cmpl else "n"
        raise InvalidRequest(f"Invalid '{name}': there is one answer here, so it can only be 1.", param=name)


def stop(fields: SamplingFields) -> tuple[str, ...]:
    given = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return tuple(text for text in given if text)  # an empty stop string would match before the first token


def sampling(fields: SamplingFields) -> Sampling:
    if fields.model_fields_set.isdisjoint(Sampling.__struct_fields__):
        return _UNSAID
    given = {name: getattr(fields, name) for name in _SAME_NAME}
    breakers = fields.dry_sequence_breakers
    return Sampling(
        **given,
        dry_sequence_breakers=None if breakers is None else tuple(breakers),
        # A string is a sequence of letters: "edkypmxt".
        samplers=None if fields.samplers is None else tuple(fields.samplers),
        logit_bias=None if fields.logit_bias is None else logit_biases(fields.logit_bias) or None,
    )


_UNSAID = Sampling()

_SAME_NAME = tuple(
    name for name in Sampling.__struct_fields__ if name not in ("dry_sequence_breakers", "samplers", "logit_bias")
)


def own_logprobs(fields: SamplingFields) -> LogprobOptions | None:
    return LogprobOptions(fields.n_probs, bool(fields.post_sampling_probs)) if fields.n_probs else None


def slot_options(fields: SamplingFields) -> SlotOptions:
    return SlotOptions(
        id=None if fields.id_slot is None or fields.id_slot < 0 else fields.id_slot,
        reuse=fields.cache_prompt is not False,
        keep=fields.n_keep or 0,
        discard=fields.n_discard or 0,
    )


def lora(fields: SamplingFields) -> tuple[LoraScale, ...] | None:
    """None where `lora` is absent; an empty list is no adapter at all."""
    return None if fields.lora is None else tuple(LoraScale(item.id, item.scale) for item in fields.lora)


def speculate(fields: SamplingFields) -> bool | None:
    if fields.speculative_type == "none":
        return False
    return True if fields.speculative_type and fields.speculative_type.startswith("ngram") else None


# --- constraints ------------------------------------------------------------


def constraint(fields: SamplingFields, schema: dict[str, Any] | None, path: str, *, calls: bool) -> Constraint | None:
    """Of the dialect's own `schema`, which stands at `path`, or else of `grammar` or `json_schema`.

    `calls`: whether tools may be called.
    """
    if fields.grammar:
        if schema is not None or fields.json_schema is not None:
            raise InvalidRequest("A 'grammar' and a JSON schema exclude each other: give only one.", param="grammar")
        if calls:
            raise InvalidRequest("A 'grammar' and 'tools' that may be called exclude each other.", param="grammar")
    if schema is None:
        return own_constraint(fields)
    if schema and fields.json_schema is not None:
        raise InvalidRequest(
            f"'json_schema' and the schema of '{path}' exclude each other: give only one.", param="json_schema"
        )
    return schema_constraint(schema or fields.json_schema or {}, path)


def own_constraint(fields: SamplingFields) -> Constraint | None:
    """That of `grammar`, which "wins over `json_schema`", or of the latter."""
    if fields.grammar:
        return _grammar(fields.grammar, fields)
    return None if fields.json_schema is None else schema_constraint(fields.json_schema, "json_schema")


def schema_constraint(schema: dict[str, Any], path: str) -> JsonSchemaConstraint:
    """ "empty `json_schema {}` = any object" """
    return JsonSchemaConstraint(plain_json(schema, path) or {"type": "object"})


_KINDS: dict[int, Literal["token", "word", "pattern", "pattern_full"]] = {
    0: "token",
    1: "word",
    2: "pattern",
    3: "pattern_full",
}


def _grammar(text: str, fields: SamplingFields) -> GbnfConstraint:
    if not fields.grammar_lazy:
        return GbnfConstraint(text)
    if not fields.grammar_triggers:
        raise InvalidRequest(
            "'grammar_lazy' needs 'grammar_triggers': without one the grammar would never apply.",
            param="grammar_triggers",
        )
    triggers = []
    for i, trigger in enumerate(fields.grammar_triggers):
        if trigger.type == 0 and trigger.token is None:
            path = f"grammar_triggers[{i}].token"
            raise InvalidRequest(f"Missing '{path}': a trigger of type 0 is a token.", param=path)
        triggers.append(GrammarTrigger(_KINDS[trigger.type], trigger.value, trigger.token))
    return GbnfConstraint(text, True, tuple(triggers), tuple(fields.preserved_tokens or ()))


# --- logit_bias ------------------------------------------------------------

_DECIMAL = re.compile(r"[+-]?[0-9]+", re.ASCII)


def logit_biases(value: object) -> tuple[LogitBias, ...]:
    """Of `{"token id or text": bias}` or `[[token id or text, bias], …]`; a bias of false bans the token.

    "Ids outside [0, n_vocab) are ignored": here those that are no id anywhere, and the engine's own there.
    """
    biases: list[LogitBias] = []
    match value:
        case dict():
            for key, bias in value.items():
                path = f"logit_bias.{key}" if len(key) <= 40 else "logit_bias"
                token = int(key[:20]) if _DECIMAL.fullmatch(key) else key
                _add_bias(biases, token, _bias(bias, path))
        case list():
            for i, pair in enumerate(value):
                path = f"logit_bias[{i}]"
                if not isinstance(pair, list) or len(pair) != 2:
                    raise _wrong(path, "a pair of a token or text and its bias", pair)
                if isinstance(pair[0], bool) or not isinstance(pair[0], int | str):
                    raise _wrong(f"{path}[0]", "a token id or a text", pair[0])
                _add_bias(biases, pair[0], _bias(pair[1], f"{path}[1]"))
        case _:
            raise _wrong("logit_bias", "an object, or a list of pairs", value)
    if len(biases) > MAX_BIASES:
        raise _wrong("logit_bias", f"at most {MAX_BIASES} items", value)
    return tuple(biases)


def _add_bias(biases: list[LogitBias], key: int | str, bias: float) -> None:
    if isinstance(key, str):
        biases.append(TextBias(key, bias))
    elif 0 <= key <= I32:
        biases.append(TokenBias(key, bias))


def _bias(value: object, path: str) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(path, "a number, or false", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(path, "a finite number", value) from None


def _wrong(path: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{path}': expected {expected}, got {shown(value)}.", param=path)
