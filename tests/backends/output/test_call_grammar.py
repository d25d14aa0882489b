"""What a grammar lets a model write is read as the calls that it must make."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.grammar.call_rules import call_gbnf
from backends.grammar.gbnf import parse
from backends.grammar.gbnf_matcher import Matcher
from backends.grammar.tool_grammar import tool_grammar
from backends.grammar.triggers import Trigger, Watch
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import Json, Until
from backends.output.tools.table import TOOL_FORMATS
from protocols.request import Tool, ToolChoice
from tests.backends.grammar.derivations import derived
from tests.backends.output.support import TOOLS, Output, run, spec, values

each_format = pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)

_NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
TREE = Tool(
    "mcp__files__read-tree",
    "References, and names that not every format can write",
    {
        "$defs": {"node": _NODE},
        "type": "object",
        "properties": {
            "root": {"$ref": "#/$defs/node"},
            "like": {"$ref": "#/properties/root"},
            "mode": {"const": "fast"},
            "level": {"type": "integer", "minimum": 3, "maximum": 12},
            "-n": {"type": "boolean"},
        },
        "required": ["root", "level"],
    },
)
OPEN = Tool("open", "Any arguments", {"type": "object"})
UNREADABLE = Tool("odd", "One argument cannot be followed", {"properties": {"a": {"pattern": "(?<=x)y"}, "b": {}}})
ALL = (*TOOLS, TREE, OPEN, UNREADABLE)


def forced(format: ToolFormat, tools: tuple[Tool, ...] = ALL, **choice: Any) -> str:
    constraint = tool_grammar(tools, ToolChoice("required", **choice), format)
    assert constraint is not None and not constraint.lazy
    return constraint.text


def check(output: Output, followed: tuple[Tool, ...] = (*TOOLS, TREE, OPEN)) -> None:
    """Nothing but calls; those of tools whose schema is `followed` have the arguments that it takes."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    assert (output.text, output.reasoning, output.reason) == ("", "", "tool_calls")
    for name, arguments in values(output):
        assert isinstance(arguments, dict) and name in [tool.name for tool in ALL]
        for tool in followed:
            if tool.name == name:
                validator(tool.parameters).validate(arguments)


@each_format
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_forced_call_may_be_is_read_as_calls(format: ToolFormat, parallel: bool) -> None:
    text = forced(format, parallel=parallel)
    counts = set()
    for seed in range(60):
        written = derived(text, Random(seed))
        output = run(spec(format.name, offered=ALL), [written])
        check(output)
        counts.add(len(output.calls))
    assert min(counts) == 1
    assert (max(counts) > 1) == (parallel and format.name != "harmony"), "gpt-oss makes one call at a time"


@each_format
def test_a_named_tool_is_the_only_one(format: ToolFormat) -> None:
    for tool in ALL:
        text = forced(format, name=tool.name)
        for seed in range(3):
            output = run(spec(format.name, offered=ALL), [derived(text, Random(seed))])
            assert {call.name for call in output.calls} == {tool.name}


@each_format
@pytest.mark.parametrize("parallel", [False, True])
def test_a_strict_call_is_woken_by_what_it_begins_with(format: ToolFormat, parallel: bool) -> None:
    strict = Tool("get_weather", "", TOOLS[0].parameters, strict=True)
    constraint = tool_grammar((strict, *ALL[1:]), ToolChoice(parallel=parallel), format)
    assert constraint is not None and constraint.lazy and constraint.triggers
    found = Matcher(parse(constraint.text), {})
    for seed in range(20):
        text = derived(constraint.text, Random(seed))
        watch = Watch.of([Trigger(trigger.kind, trigger.value) for trigger in constraint.triggers])
        before = b"I look.\n"
        watch, start = watch.feed(before)
        assert start is None
        watch, start = watch.feed(text.encode())
        assert start == len(before), text
        assert accepts(found, text)
        check(run(spec(format.name, offered=ALL), [text]), (strict,))


def test_what_is_a_call_at_the_beginning_of_a_line_only_wakes_nothing_elsewhere() -> None:
    strict = Tool("now", strict=True)
    for format in TOOL_FORMATS:
        for marker in format.naked_markers:
            constraint = tool_grammar((strict,), ToolChoice(), format)
            assert constraint is not None
            watch = Watch.of([Trigger(trigger.kind, trigger.value) for trigger in constraint.triggers])
            text = derived(constraint.text, Random(1))
            if text.startswith(marker):
                assert watch.feed(f"So {text}".encode())[1] is None
                assert watch.feed(text.encode())[1] == 0


def accepts(found: Matcher, text: str) -> bool:
    state = found.advance(found.start, 0, text.encode())
    return state is not None and found.complete(state)


WRITTEN: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <b>\n\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "pythonic": '[get_weather(city="Paris"), now()]',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Par<is<|"|>,days:2}<tool_call|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + '{"city": "Paris"}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write(name: str) -> None:
    format = next(format for format in TOOL_FORMATS if format.name == name)
    found = Matcher(parse(call_gbnf(format.grammar(TOOLS[:2]).several)), {})
    assert accepts(found, WRITTEN[name])
    assert not accepts(found, WRITTEN[name][:-1])
    assert not accepts(found, WRITTEN[name].replace("get_weather", "get_help"))


@given(st.text("ab<^", max_size=12), st.text("ab<^", min_size=1, max_size=4))
def test_until_admits_what_does_not_have_the_end(text: str, stop: str) -> None:
    found = Matcher(parse(call_gbnf(Until(stop))), {})
    assert accepts(found, text + stop) == (stop not in (text + stop)[:-1])


def test_an_argument_may_refer_to_the_rest_of_its_schema() -> None:
    """B71: a reference into a list, and one to all of the schema."""
    tree = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/properties/tree/anyOf/1"}}]}
    root = {"type": "object", "properties": {"tree": tree, "self": {"$ref": "#"}}}
    for schema, good, bad in (
        (tree, [None, [], [[], [[]]]], [[None], 1]),
        ({"$ref": "#"}, [{}, {"tree": [[]]}, {"self": {"self": {}}}], [[], {"tree": 1}, {"self": 1}]),
    ):
        found = Matcher(parse(call_gbnf(Json(schema, root))), {})
        for value in good:
            assert accepts(found, json.dumps(value)), value
        for value in bad:
            assert not accepts(found, json.dumps(value)), value
