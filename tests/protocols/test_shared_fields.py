"""llama.cpp's parameters mean the same in every dialect, and what several dialects cannot do they refuse alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses
from protocols.affinity import affinity
from protocols.codec import Codec
from protocols.errors import InvalidRequest
from protocols.request import (
    GbnfConstraint,
    JsonSchemaConstraint,
    LoraScale,
    Request,
    Sampling,
    SlotOptions,
    TextBias,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
DIALECTS: dict[str, tuple[Codec[Any], dict[str, Any]]] = {
    "chat": (openai_chat.CODEC, CHAT),
    "completions": (openai_completions.CODEC, {"prompt": "Hi"}),
    "responses": (openai_responses.CODEC, {"input": "Hi"}),
    "messages": (anthropic_messages.CODEC, CHAT),
    "native": (llamacpp_native.COMPLETION, {"prompt": "Hi"}),
    "native chat": (llamacpp_native.CHAT, CHAT),
}
ONE_ANSWER = ("responses", "messages")
TOOLS: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "f"}},
    "responses": {"type": "function", "name": "f"},
    "messages": {"name": "f", "input_schema": {}},
}
SCHEMAS: dict[str, tuple[str, Any]] = {
    "chat": ("response_format", {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}),
    "responses": ("text", {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}}}),
    "messages": ("output_config", {"format": {"type": "json_schema", "schema": {"a": 1}}}),
}

NUMBERS: dict[str, Any] = {
    name: 1
    for name in Sampling.__struct_fields__
    if name not in ("adaptive_decay", "dry_sequence_breakers", "samplers", "logit_bias")
}


def decode(dialect: str, **fields: Any) -> Request:
    codec, body = DIALECTS[dialect]
    return codec.decode(json.dumps({"model": "m", **body, **fields}).encode(), "r1").request


def refused(dialect: str, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(dialect, **fields)
    return caught.value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_takes_llamacpps_parameters(dialect: str) -> None:
    request = decode(
        dialect, **NUMBERS, adaptive_decay=0.5, dry_sequence_breakers=["\n"], samplers="kt", logit_bias={"a": -1},
        n_predict=7, stop=["", "x"], ignore_eos=True, n_indent=2, t_max_predict_ms=5, id_slot=3, cache_prompt=False,
        n_keep=4, n_discard=6, lora=[{"id": 0, "scale": 0.5}], prompt_cache_key="k",
    )  # fmt: skip
    assert request.sampling == Sampling(
        **NUMBERS,
        adaptive_decay=0.5,
        dry_sequence_breakers=("\n",),
        samplers=("k", "t"),
        logit_bias=(TextBias("a", -1.0),),
    )
    assert (request.max_tokens, request.stop, request.ignore_eos) == (7, ("x",), True)
    assert (request.stop_indent, request.max_predict_ms) == (2, 5.0)
    assert request.slot == SlotOptions(3, False, None, 4, 6)
    assert request.lora == (LoraScale(0, 0.5),)
    assert request.affinity == affinity("k")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_takes_a_grammar_or_a_schema(dialect: str) -> None:
    assert decode(dialect, grammar='root ::= "x"').constraint == GbnfConstraint('root ::= "x"')
    assert decode(dialect, json_schema={"a": 1}).constraint == JsonSchemaConstraint({"a": 1})
    assert decode(dialect).constraint is None


@pytest.mark.parametrize("dialect", SCHEMAS)
def test_one_answer_has_one_form(dialect: str) -> None:
    name, schema = SCHEMAS[dialect]
    assert decode(dialect, **{name: schema}).constraint == JsonSchemaConstraint({"a": 1})
    assert refused(dialect, **{name: schema}, json_schema={"b": 1}).param == "json_schema"
    assert refused(dialect, **{name: schema}, grammar="g").param == "grammar"
    assert refused(dialect, json_schema={"b": 1}, grammar="g").param == "grammar"


@pytest.mark.parametrize("dialect", TOOLS)
def test_a_grammar_leaves_no_room_for_calls(dialect: str) -> None:
    tools = [TOOLS[dialect]]
    assert refused(dialect, grammar="g", tools=tools).param == "grammar"
    never = {"type": "none"} if dialect == "messages" else "none"
    assert decode(dialect, grammar="g", tools=tools, tool_choice=never).constraint == GbnfConstraint("g")


@pytest.mark.parametrize("dialect", ONE_ANSWER)
def test_where_there_is_one_answer_no_more_can_be_asked_for(dialect: str) -> None:
    assert decode(dialect, n=1, n_cmpl=1).n == 1
    for name in ("n", "n_cmpl"):
        error = refused(dialect, **{name: 2})
        assert error.param == name
        assert name in error.message


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_parameter_of_the_wrong_type_is_named(dialect: str) -> None:
    for name, value in (("mirostat", "x"), ("prompt_cache_key", 5), ("samplers", 5), ("repeat_last_n", -1)):
        assert refused(dialect, **{name: value}).param == name
