"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section.

`functions.name:0` is the call's id, which its template wants to see again; it counts through the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.reading import Reading, choose, expect, skip_space, until
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import NUMBER, All, CallGrammar, Json, Node, Text, listed, schema_of
from backends.output.tools.json_calls import json_arguments
from backends.output.writer import Writer
from protocols.request import Tool

_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


def _read(out: Writer, marker: str) -> Reading[str]:
    if marker == _ALL_BEGIN:
        yield from expect(_BEGIN, (yield from skip_space()))
    while True:
        id, _ = yield from until((_ARGUMENTS,))
        name, counted, _ = id.strip().rpartition(":")
        yield from json_arguments(
            out, name if counted else id, (yield from skip_space()), id.strip() if counted else ""
        )
        yield from expect(_END, (yield from skip_space()))
        if (yield from choose((_BEGIN, _ALL_END), (yield from skip_space()))) == _ALL_END:
            return ""


def _call(tool: Tool) -> Node:
    begin = Text(f"{_BEGIN}functions.{tool.name}:")
    return All((begin, NUMBER, Text(_ARGUMENTS), Json(schema_of(tool)), Text(_END)))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([_call(tool) for tool in tools], _ALL_BEGIN, _ALL_END, _ALL_BEGIN, separator="")


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    read=_read,
    grammar=_grammar,
    shown_by=((_BEGIN,),),
    markers=(_ALL_BEGIN, _BEGIN),
    special_tokens=(_ALL_BEGIN, _ALL_END, _BEGIN, _END, _ARGUMENTS),
)
