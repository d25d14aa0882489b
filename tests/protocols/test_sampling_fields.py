"""The parameters that dialects share: what each becomes, and that a wrong one is named."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.body import parse_object, validated
from protocols.errors import InvalidRequest
from protocols.request import (
    GbnfConstraint,
    GrammarTrigger,
    JsonSchemaConstraint,
    LogprobOptions,
    LoraScale,
    Request,
    Sampling,
    SlotOptions,
    TextBias,
    TextPrompt,
    TokenBias,
)
from protocols.sampling_fields import MAX_BIASES, SamplingFields, request

PROMPT = TextPrompt("Hi")
PLAIN = Request("r1", "m", PROMPT)


def decode(fields: dict[str, Any], **dialect: Any) -> Request:
    wire = validated(SamplingFields, parse_object(json.dumps(fields).encode()))
    return request(wire, id="r1", model="m", prompt=PROMPT, **dialect)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(fields)
    return caught.value


def test_nothing_given_is_nothing_asked() -> None:
    assert decode({}) == PLAIN
    assert decode(dict.fromkeys(SamplingFields.model_fields)) == PLAIN


def test_every_sampling_parameter_has_its_field() -> None:
    numbers: dict[str, Any] = {
        name: 1
        for name in Sampling.__struct_fields__
        if name not in ("adaptive_decay", "dry_sequence_breakers", "samplers", "logit_bias")
    }
    given = numbers | {"adaptive_decay": 0.5, "dry_sequence_breakers": ["\n"], "samplers": ["top_k", "temperature"]}
    assert decode(given).sampling == Sampling(
        **numbers, adaptive_decay=0.5, dry_sequence_breakers=("\n",), samplers=("top_k", "temperature")
    )


def test_samplers_may_be_letters() -> None:
    assert decode({"samplers": "edk"}).sampling.samplers == ("e", "d", "k")
    assert decode({"samplers": ""}).sampling.samplers == decode({"samplers": []}).sampling.samplers == ()


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}, 7),
        ({"max_tokens": 5, "n_predict": -1}, None),
        ({"n_predict": 0}, 0),
        ({}, 16),
    ],
)
def test_the_limit_with_the_highest_priority_counts(fields: dict[str, Any], limit: int | None) -> None:
    assert decode(fields, max_tokens=16).max_tokens == limit


@pytest.mark.parametrize(("fields", "n"), [({"n": 2}, 2), ({"n": 2, "n_cmpl": 3}, 3), ({"n_cmpl": 1, "n": 2}, 1)])
def test_n_cmpl_wins_over_n(fields: dict[str, Any], n: int) -> None:
    assert decode(fields).n == n


@pytest.mark.parametrize(("stop", "expected"), [("x", ("x",)), ("", ()), ([""], ()), (["x", "", "y"], ("x", "y"))])
def test_stop(stop: Any, expected: tuple[str, ...]) -> None:
    assert decode({"stop": stop}).stop == expected


def test_the_rest_of_a_request() -> None:
    fields = {
        "ignore_eos": True,
        "n_indent": 4,
        "t_max_predict_ms": 50,
        "id_slot": 2,
        "cache_prompt": False,
        "n_keep": -1,
        "n_discard": 7,
        "lora": [{"id": 1, "scale": 0.5}, {"id": 0}],
        "n_probs": 3,
        "post_sampling_probs": True,
    }
    assert decode(fields) == msgspec.structs.replace(
        PLAIN,
        ignore_eos=True,
        stop_indent=4,
        max_predict_ms=50.0,
        slot=SlotOptions(2, reuse=False, keep=-1, discard=7),
        lora=(LoraScale(1, 0.5), LoraScale(0, 0.0)),
        logprobs=LogprobOptions(3, after_sampling=True),
    )
    assert decode({"id_slot": -1, "t_max_predict_ms": -1, "cache_prompt": True, "n_probs": 0}) == PLAIN
    assert decode({"lora": []}).lora == ()


def test_what_does_not_change_the_answer_is_taken() -> None:
    fields = {"backend_sampling": True, "n_cache_reuse": 64, "sse_ping_interval": -1, "from_2030": [1]}
    assert decode(fields) == PLAIN


@pytest.mark.parametrize(
    ("name", "speculate"), [("none", False), ("ngram-simple", True), ("ngram-mod", True), ("draft-simple", None)]
)
def test_guessing_is_turned_on_and_off(name: str, speculate: bool | None) -> None:
    assert decode({"speculative.type": name}) == msgspec.structs.replace(PLAIN, speculate=speculate)


# --- constraints ------------------------------------------------------------


def test_grammar_and_schema() -> None:
    schema = {"type": "string"}
    assert decode({"grammar": "root ::= x"}).constraint == GbnfConstraint("root ::= x")
    assert decode({"json_schema": schema}).constraint == JsonSchemaConstraint(schema)
    assert decode({"json_schema": schema, "grammar": "root ::= x"}).constraint == GbnfConstraint("root ::= x")
    assert decode({"json_schema": schema, "grammar": ""}).constraint == JsonSchemaConstraint(schema)
    assert decode({"json_schema": {}}).constraint == JsonSchemaConstraint({"type": "object"})
    own = JsonSchemaConstraint({"type": "null"})
    assert decode({"json_schema": schema}, constraint=own).constraint == own


def test_lazy_grammar() -> None:
    triggers = [
        {"type": 0, "value": "<t>", "token": 5},
        {"type": 1, "value": "w"},
        {"type": 2, "value": "p"},
        {"type": 3, "value": "f"},
    ]
    fields = {"grammar": "g", "grammar_lazy": True, "grammar_triggers": triggers, "preserved_tokens": ["<t>"]}
    assert decode(fields).constraint == GbnfConstraint(
        "g",
        lazy=True,
        triggers=(
            GrammarTrigger("token", "<t>", 5),
            GrammarTrigger("word", "w"),
            GrammarTrigger("pattern", "p"),
            GrammarTrigger("pattern_full", "f"),
        ),
        preserved_tokens=("<t>",),
    )
    assert decode(fields | {"grammar_lazy": False}).constraint == GbnfConstraint("g")
    assert decode({"grammar_lazy": True}).constraint is None


# --- logit_bias ------------------------------------------------------------


def test_logit_bias() -> None:
    expected = (TokenBias(5, 1.0), TokenBias(7, -math.inf), TextBias("Hi", -2.5), TextBias("no", -math.inf))
    array = [[5, 1], [7, False], ["Hi", -2.5], ["no", False]]
    assert decode({"logit_bias": array}).sampling.logit_bias == expected
    assert decode({"logit_bias": {"5": 1, "7": False, "Hi": -2.5, "no": False}}).sampling.logit_bias == expected


def test_ids_that_cannot_be_tokens_are_ignored() -> None:
    assert decode({"logit_bias": {"-1": 5, "9" * 40: 5, str(2**31): 1}}) == PLAIN
    assert decode({"logit_bias": [[-1, 5], [10**30, 5]]}) == PLAIN


@pytest.mark.parametrize(
    ("bias", "param", "words"),
    [
        ("5", "logit_bias", "expected an object, or a list of pairs, got a string"),
        ({"5": True}, "logit_bias.5", "expected a number, or false, got true"),
        ({"5": None}, "logit_bias.5", "got null"),
        ({"5": 10**400}, "logit_bias.5", "expected a finite number"),
        ([5], "logit_bias[0]", "expected a pair of a token or text and its bias, got 5"),
        ([[5, 1], [5]], "logit_bias[1]", "got a list of 1"),
        ([[5.5, 1]], "logit_bias[0][0]", "expected a token id or a text, got 5.5"),
        ([[True, 1]], "logit_bias[0][0]", "got true"),
        ([[5, "x"]], "logit_bias[0][1]", "got a string"),
        ([[5, 1]] * (MAX_BIASES + 1), "logit_bias", "at most 4096 items"),
    ],
)
def test_wrong_biases(bias: Any, param: str, words: str) -> None:
    error = refused(logit_bias=bias)
    assert error.param == param
    assert words in error.message


# --- refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n_predict": -2}, "n_predict", "at least -1"),
        ({"n_predict": 2**31}, "n_predict", "at most 2147483647"),
        ({"n": 0}, "n", "at least 1"),
        ({"n_cmpl": 129}, "n_cmpl", "at most 128"),
        ({"n_indent": -1}, "n_indent", "at least 0"),
        ({"n_keep": -2}, "n_keep", "at least -1"),
        ({"n_discard": -1}, "n_discard", "at least 0"),
        ({"n_cache_reuse": -1}, "n_cache_reuse", "at least 0"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms", "at least -1"),
        ({"repeat_last_n": -1}, "repeat_last_n", "at least 0"),
        ({"dry_allowed_length": -1}, "dry_allowed_length", "at least 0"),
        ({"dry_penalty_last_n": -1}, "dry_penalty_last_n", "at least 0"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers", "at least 1 item"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers", "expected a list, got a string"),
        ({"adaptive_decay": 1}, "adaptive_decay", "at most 0.99"),
        ({"min_keep": -1}, "min_keep", "at least 0"),
        ({"n_probs": 1001}, "n_probs", "at most 1000"),
        ({"sse_ping_interval": -2}, "sse_ping_interval", "at least -1"),
        ({"temperature": "hot"}, "temperature", "expected a number, got a string"),
        ({"top_k": 1.5}, "top_k", "expected an integer"),
        ({"top_k": True}, "top_k", "expected an integer, got true"),
        ({"seed": 2**63}, "seed", "at most"),
        ({"cache_prompt": 1}, "cache_prompt", "expected true or false, got 1"),
        ({"samplers": 5}, "samplers", "expected a string or a list, got 5"),
        ({"samplers": ["top_k", 5]}, "samplers[1]", "expected a string, got 5"),
        ({"stop": ["x"] * 129}, "stop", "at most 128 items"),
        ({"stop": ["a", 5]}, "stop[1]", "expected a string, got 5"),
        ({"lora": {"id": 0}}, "lora", "expected a list, got an object"),
        ({"lora": [{"scale": 1}]}, "lora[0].id", "Missing"),
        ({"lora": [{"id": 0, "scale": "x"}]}, "lora[0].scale", "expected a number"),
        ({"grammar": 5}, "grammar", "expected a string"),
        ({"json_schema": True}, "json_schema", "expected an object, got true"),
        ({"json_schema": {"maximum": 10**30}}, "json_schema", "more than 64 bits"),
        ({"grammar": "g", "grammar_lazy": True}, "grammar_triggers", "needs 'grammar_triggers'"),
        (
            {"grammar": "g", "grammar_lazy": True, "grammar_triggers": [{"type": 0, "value": ""}]},
            "grammar_triggers[0].token",
            "Missing",
        ),
        ({"grammar_triggers": [{"type": 4, "value": ""}]}, "grammar_triggers[0].type", "expected one of 0, 1, 2 or 3"),
        ({"grammar_triggers": [{"type": 1}]}, "grammar_triggers[0].value", "Missing"),
    ],
)
def test_wrong_values(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message
    assert words in error.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "5", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["5", "x", "type"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(SamplingFields.model_fields)), _JSON, max_size=5))
def test_any_value_is_a_request_that_can_travel_or_refused(fields: dict[str, Any]) -> None:
    try:
        decoded = decode(fields)
    except InvalidRequest as error:
        assert error.message
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(decoded), type=Request) == decoded
