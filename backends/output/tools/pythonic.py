"""Calls as Python writes them: `[get_weather(city="Paris"), now()]`, as Llama 4 and LFM 2 do. Values become JSON."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.json_text import escaped
from backends.output.reading import NotACall, Reading, expect, skip_space
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Json, Node, Text, arguments_of, listed, schema_of
from backends.output.tools.json_calls import json_value
from backends.output.writer import Writer
from protocols.request import Tool

_LFM_BEGIN, _LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"


def python_call(out: Writer, char: str) -> Reading[None]:
    """One call with named arguments, whose first character is `char`."""
    name = ""
    while char.isalnum() or char in "_.-":  # names with hyphens are none in Python, but tools have them
        name += char
        char = yield
    if char != "(":
        raise NotACall
    name = out.tools.resolve(name.removesuffix(".call"), declared=out.naked)
    char = yield from skip_space()
    if char == ")":
        out.start(name)
        out.write("{}")
        out.end()
        return
    while True:
        argument = ""
        while char.isidentifier() or (argument and char.isdigit()):
            argument += char
            char = yield
        if not argument or (yield from skip_space(char)) != "=":
            raise NotACall
        if not out.open:
            out.start(name)
            out.write("{")
        else:
            out.write(", ")
        out.write(f'"{escaped(argument)}": ')
        char = yield from json_value(out, (yield from skip_space()))
        char = yield from skip_space(char)
        if char == ",":
            char = yield from skip_space()
        elif char != ")":
            raise NotACall
        if char == ")":
            out.write("}")
            out.end()
            return


def _read(out: Writer, marker: str) -> Reading[str]:
    if marker != "[" and (yield from skip_space()) != "[":
        raise NotACall
    while True:
        yield from python_call(out, (yield from skip_space()))
        char = yield from skip_space()
        if char == "]":
            break
        if char != ",":
            raise NotACall
    if marker == _LFM_BEGIN:
        yield from expect(_LFM_END, (yield from skip_space()))
    return ""


def python_call_text(tool: Tool) -> Node:
    """Arguments whose names are none in Python are left out."""
    arguments = arguments_of(tool, _argument, lambda name: name if name.isidentifier() else None)
    return All((Text(f"{tool.name}("), *arguments.listed(", "), Text(")")))


def _argument(tool: Tool, name: Node, key: str, schema: object) -> Node:
    return All((name, Text("="), Json(schema, schema_of(tool))))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    grammar = listed([python_call_text(tool) for tool in tools], "[", "]", "[", separator=", ")
    return CallGrammar(grammar.one, grammar.several, tuple(f"[{tool.name}(" for tool in tools))


def _lfm_grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed(
        [python_call_text(tool) for tool in tools], f"{_LFM_BEGIN}[", f"]{_LFM_END}", _LFM_BEGIN, separator=", "
    )


PYTHONIC = ToolFormat(
    name="pythonic",
    read=_read,
    grammar=_grammar,
    shown_by=(("[func_name1(params_name1=params_value1",),),
    naked_markers=("[",),
)

LFM2 = ToolFormat(
    name="lfm2",
    read=_read,
    grammar=_lfm_grammar,
    shown_by=((_LFM_BEGIN,), ("<|tool_list_start|>",), ("List of tools: [",)),
    markers=(_LFM_BEGIN,),
    special_tokens=(_LFM_BEGIN, _LFM_END),
)
