"""What an answer is held to, as vLLM is told. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.output.selection import OutputFormats, ParserSpec, parser_for
from backends.vllm.constraints import constrained, structured
from protocols.errors import InvalidRequest
from protocols.request import GbnfConstraint, JsonSchemaConstraint, Request, TextPrompt, Tool, ToolChoice
from tests.backends.contract import chat
from tests.backends.grammar.test_json_schema import matches

FORMATS = OutputFormats.of("", "hermes", "think")
TOOL = Tool("look", "", {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}, strict=True)


def asked(choice: ToolChoice, prompt_tail: str = "") -> tuple[Request, ParserSpec]:
    prompt = msgspec.structs.replace(chat("x"), tools=(TOOL,), tool_choice=choice)
    parser = parser_for(prompt, FORMATS, prompt_tail)
    assert parser is not None
    return Request("r", "m", prompt), parser


def test_forms() -> None:
    assert structured(None) is None
    assert structured(JsonSchemaConstraint({"type": "null"})) == {"json": '{"type":"null"}'}
    assert structured(GbnfConstraint('root ::= "a"')) == {"grammar": 'root ::= "a"'}


def test_a_schema_that_admits_everything() -> None:
    schemas: tuple[Any, ...] = ({}, True)
    for schema in schemas:
        given = structured(JsonSchemaConstraint(schema))
        assert given is not None
        assert matches(given["grammar"], '{"a": [1, null]}')


def test_a_clients_lazy_grammar_is_refused() -> None:
    request = Request("r", "m", TextPrompt("x"), constraint=GbnfConstraint('root ::= "a"', lazy=True))
    with pytest.raises(InvalidRequest) as refusal:
        constrained(request, None)
    assert refusal.value.param == "grammar_lazy"


def test_ends_count_where_there_is_a_constraint() -> None:
    request = Request("r", "m", TextPrompt("x"), ignore_eos=True)
    assert constrained(request, None).ignore_eos
    held = msgspec.structs.replace(request, constraint=JsonSchemaConstraint({}))
    assert not constrained(held, None).ignore_eos


def test_a_demanded_call_is_a_grammar() -> None:
    constraint = constrained(*asked(ToolChoice("required"))).constraint
    assert isinstance(constraint, GbnfConstraint)
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
    assert matches(constraint.text, call)
    assert not matches(constraint.text, "No.")


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'


def test_a_call_that_is_not_demanded_is_constrained_where_it_begins() -> None:
    constraint = constrained(*asked(ToolChoice("auto"))).constraint
    assert isinstance(constraint, GbnfConstraint) and not constraint.lazy
    for said in ("", "No.", "Is 1 < 2? <tool_cal", "<<tool", CALL, f"I look. <{CALL}", f"{CALL}\n{CALL}"):
        assert matches(constraint.text, said), said
    for wrong in (f"{CALL} or not", CALL.replace("3", '"3"'), "I look. <tool_call>", f"x{CALL[:-1]}"):
        assert not matches(constraint.text, wrong), wrong


def test_control_tokens_are_in_no_grammar() -> None:
    assert constrained(*asked(ToolChoice("auto")), control_tokens=True).constraint is None
    assert constrained(*asked(ToolChoice("required")), control_tokens=True).constraint is not None


@pytest.mark.parametrize(
    ("constraint", "answer"),
    [
        (None, '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'),
        (JsonSchemaConstraint({"type": "integer"}), "17"),
        (GbnfConstraint('root ::= "root" [a-z] other # root\nother ::= "x"{2}'), "rootaxx"),
    ],
)
def test_thinking_comes_before(constraint: Any, answer: str) -> None:
    request, parser = asked(ToolChoice("required" if constraint is None else "auto"), "<think>\n")
    assert parser.thinking
    held = constrained(msgspec.structs.replace(request, constraint=constraint), parser).constraint
    assert isinstance(held, GbnfConstraint)
    for breaks in ("", "\n\n"):
        assert matches(held.text, f"Let me <see>.</thi no</think>{breaks}{answer}")
    assert not matches(held.text, answer)
    assert not matches(held.text, f"Hm.</think>\n\n\n\n{answer}x")
