"""DeepSeek V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`, between tags around all calls.

V3 and R1 write `function<｜tool▁sep｜>name` there, and the arguments on the next lines, fenced as a block of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.reading import NotACall, Reading, choose, expect, skip_space, until
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Json, Node, Text, listed, schema_of
from backends.output.tools.json_calls import json_arguments
from backends.output.writer import Writer
from protocols.request import Tool

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"


def _read(out: Writer, marker: str) -> Reading[str]:
    if marker == _ALL_BEGIN:
        yield from expect(_BEGIN, (yield from skip_space()))
    while True:
        yield from _call(out)
        if (yield from choose((_BEGIN, _ALL_END), (yield from skip_space()))) == _ALL_END:
            return ""


def _call(out: Writer) -> Reading[None]:
    name, _ = yield from until((_SEPARATOR,))
    char = yield from skip_space()
    fenced = False
    if char != "{":  # what came before was the kind of tool
        name, stop = yield from until(("\n", _FENCE, "{"), char)
        char = "{" if stop == "{" else ""
        if stop == "\n":
            char = yield from skip_space()
            if char == "`":
                yield from expect(_FENCE, char)
                stop = _FENCE
        if stop == _FENCE:
            fenced = True
            language, char = yield from until(("{",))
            if language.strip() not in ("", "json"):
                raise NotACall
    yield from json_arguments(out, name, char)
    char = yield from skip_space()
    if fenced and char == "`":
        yield from expect(_FENCE, char)
        char = yield from skip_space()
    yield from expect(_END, char)


def _plain(tool: Tool) -> Node:
    return All((Text(f"{_BEGIN}{tool.name}{_SEPARATOR}"), Json(schema_of(tool)), Text(_END)))


def _fenced(tool: Tool) -> Node:
    begin = f"{_BEGIN}function{_SEPARATOR}{tool.name}\n```json\n"
    return All((Text(begin), Json(schema_of(tool)), Text(f"\n```{_END}")))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([_plain(tool) for tool in tools], _ALL_BEGIN, _ALL_END, _ALL_BEGIN, separator="")


def _fenced_grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([_fenced(tool) for tool in tools], _ALL_BEGIN, _ALL_END, _ALL_BEGIN, separator="\n")


_TOKENS = (_ALL_BEGIN, _ALL_END, _BEGIN, _END, _SEPARATOR)

DEEPSEEK = ToolFormat(
    name="deepseek",
    read=_read,
    grammar=_grammar,
    shown_by=((_BEGIN,),),
    markers=(_ALL_BEGIN, _BEGIN),
    special_tokens=_TOKENS,
)

DEEPSEEK_R1 = ToolFormat(
    name="deepseek_r1",
    read=_read,
    grammar=_fenced_grammar,
    shown_by=((_BEGIN, "```json"),),
    markers=(_ALL_BEGIN, _BEGIN),
    special_tokens=_TOKENS,
)
