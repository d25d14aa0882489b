"""What a grammar lets a model write is read as the calls that it must make."""

from __future__ import annotations

import json
import re
from typing import Any as AnyValue
from typing import assert_never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.llamacpp import gbnf as llamacpp_gbnf
from backends.llamacpp import json_schema
from backends.llamacpp.gbnf_matcher import Matcher
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, Any, CallGrammar, Gbnf, Json, Maybe, Node, Repeat, Text, Until, gbnf
from backends.output.tools.table import TOOL_FORMATS
from tests.backends.output.support import TOOLS, run, spec, values

each_format = pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)

_EXAMPLES: dict[str, st.SearchStrategy[AnyValue]] = {
    "string": st.text(max_size=8),
    "integer": st.integers(-999, 999),
    "boolean": st.booleans(),
    "array": st.lists(st.integers(0, 9) | st.text(max_size=3), max_size=3),
    "object": st.dictionaries(st.text(max_size=3), st.none() | st.booleans(), max_size=3),
}


@st.composite
def document(draw: st.DrawFn, schema: dict[str, AnyValue]) -> AnyValue:
    if "properties" in schema:
        required = schema.get("required", [])
        return {
            name: draw(document(child))
            for name, child in schema["properties"].items()
            if name in required or draw(st.booleans())
        }
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    if isinstance(schema.get("type"), list):
        return draw(st.none() | st.text(max_size=8))
    return draw(_EXAMPLES[schema["type"]]) if "type" in schema else draw(st.integers(0, 9))


def conforms(value: object, schema: dict[str, AnyValue]) -> bool:
    types = schema.get("type", [])
    names = types if isinstance(types, list) else [types]
    kinds = tuple(_KINDS[name] for name in names)
    return (not kinds or isinstance(value, kinds)) and value in schema.get("enum", [value])


_KINDS = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "null": type(None)}


@st.composite
def written(draw: st.DrawFn, node: Node) -> str:
    """A text that `node` describes."""
    match node:
        case Text(text=text):
            return text
        case Json(schema=schema):
            return json.dumps(draw(document(schema)), ensure_ascii=False)
        case Until(stop=stop):
            return draw(st.text('ab<\n/日"\\ ', max_size=8).filter(lambda text: stop not in text + stop[:-1])) + stop
        case All(parts=parts):
            return "".join(draw(written(part)) for part in parts)
        case Any(options=options):
            return draw(written(draw(st.sampled_from(options))))
        case Maybe(node=inner):
            return draw(written(inner)) if draw(st.booleans()) else ""
        case Repeat(node=inner, separator=separator):
            return separator.join(draw(written(inner)) for _ in range(draw(st.integers(1, 3))))
        case _:
            assert_never(node)


def matcher(found: Gbnf) -> Matcher:
    """With the rules of the schemas put in, as an engine does."""
    text = found.text
    for name, schema in found.schemas.items():
        rules = json_schema.to_gbnf(schema)
        for rule in re.findall(r"^([\w-]+) ::=", rules, re.MULTILINE):
            rules = re.sub(rf'(?<![\w"-]){re.escape(rule)}(?![\w"-])', f"{name}-{rule}", rules)
        text += rules + f"{name} ::= {name}-root\n"
    return Matcher(llamacpp_gbnf.parse(text), {})


def accepts(found: Matcher, text: str) -> bool:
    state = found.advance(found.start, 0, text.encode())
    return state is not None and found.complete(state)


@each_format
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_the_grammar_admits_is_read(format: ToolFormat, data: st.DataObject) -> None:
    grammar = format.grammar(TOOLS)
    one = run(spec(format.name), [data.draw(written(grammar.one))])
    assert (len(one.calls), one.text, one.reason) == (1, "", "tool_calls")
    several = run(spec(format.name), [data.draw(written(grammar.several))])
    assert several.calls and not several.text
    for name, arguments in values(one) + values(several):
        tool = next(tool for tool in TOOLS if tool.name == name)
        assert set(tool.parameters.get("required", [])) <= arguments.keys()
        properties = tool.parameters.get("properties", {})
        assert all(conforms(value, properties.get(name, {})) for name, value in arguments.items())


@each_format
def test_a_named_tool_is_the_only_one(format: ToolFormat) -> None:
    assert "get_weather" not in gbnf(format.grammar(TOOLS[1:2]).several).text


@each_format
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_triggers_begin_every_call(format: ToolFormat, data: st.DataObject) -> None:
    grammar = format.grammar(TOOLS)
    text = data.draw(written(grammar.several))
    assert any(text.startswith(trigger) for trigger in grammar.triggers)


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
def test_gbnf(name: str) -> None:
    format = next(format for format in TOOL_FORMATS if format.name == name)
    found = matcher(gbnf(format.grammar(TOOLS[:2]).several))
    assert accepts(found, WRITTEN[name])
    assert not accepts(found, WRITTEN[name][:-1])
    assert not accepts(found, WRITTEN[name].replace("get_weather", "get_help"))


@each_format
def test_every_gbnf_is_one(format: ToolFormat) -> None:
    grammar: CallGrammar = format.grammar(TOOLS)
    for node in (grammar.one, grammar.several):
        matcher(gbnf(node))


@given(st.text("ab<", max_size=12), st.text("ab<", min_size=1, max_size=4))
def test_until_admits_what_does_not_have_the_end(text: str, stop: str) -> None:
    found = matcher(gbnf(Until(stop)))
    assert accepts(found, text + stop) == (stop not in (text + stop)[:-1])
