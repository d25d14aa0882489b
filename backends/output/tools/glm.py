"""GLM 4.5 and later: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.json_text import escaped
from backends.output.reading import NotACall, Reading, choose, expect, skip_space, until
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Node, Text, arguments_of, bare_value, without, wrapped
from backends.output.tools.json_calls import json_call
from backends.output.tools.typed_values import typed_value
from backends.output.writer import Writer
from protocols.request import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _read(out: Writer, marker: str) -> Reading[str]:
    char = yield from skip_space()
    if char == "{":
        yield from json_call(out, char)
        yield from expect(_END, (yield from skip_space()))
        return ""
    name, stop = yield from until(("\n", "<"), char)
    if not name.strip():
        raise NotACall
    found = yield from choose((_KEY, _END), stop if stop == "<" else (yield from skip_space()))
    name = out.start(name)
    brace = "{"
    while found == _KEY:
        key, _ = yield from until((_KEY_END,))
        yield from expect(_VALUE, (yield from skip_space()))
        out.write(f'{brace}"{escaped(key)}": ')
        yield from typed_value(out, out.tools.types(name, key), (_VALUE_END,))
        found = yield from choose((_KEY, _END), (yield from skip_space()))
        brace = ", "
    out.write("}" if brace == ", " else "{}")
    out.end()
    return ""


def _call(tool: Tool) -> Node:
    return All((Text(f"{tool.name}\n"), *arguments_of(tool, _argument, without(_KEY_END)).each()))


def _argument(tool: Tool, name: Node, key: str, schema: object) -> Node:
    value = bare_value(tool, key, schema, _VALUE_END)
    return All((Text(_KEY), name, Text(f"{_KEY_END}\n{_VALUE}"), value, Text("\n")))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return wrapped([_call(tool) for tool in tools], _BEGIN, _END, _BEGIN, separator="\n")


GLM = ToolFormat(
    name="glm",
    read=_read,
    grammar=_grammar,
    shown_by=(("<arg_key>",),),
    markers=(_BEGIN,),
    special_tokens=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
)
