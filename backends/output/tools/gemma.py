"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`; FunctionGemma has other tags and quotes.

Gemma 3 was trained on calls in Python, in a block of code named `tool_code`. Its template says nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.output.json_text import escaped
from backends.output.reading import NotACall, Reading, expect, skip_space, until
from backends.output.stops import StopMatcher
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import (
    All,
    CallGrammar,
    Json,
    Node,
    Text,
    Until,
    arguments_of,
    is_text,
    listed,
    schema_of,
    without,
    wrapped,
)
from backends.output.tools.json_calls import json_string, json_value
from backends.output.tools.pythonic import python_call, python_call_text
from backends.output.tools.typed_values import as_json
from backends.output.writer import Writer
from protocols.request import Tool

_MAX_DEPTH = 32
_CODE, _FENCE = "```tool_code\n", "```"


class _Notation(msgspec.Struct, frozen=True):
    begin: str
    end: str
    quote: str

    def read(self, out: Writer, marker: str) -> Reading[str]:
        yield from expect("call:", (yield from skip_space()))
        name, _ = yield from until(("{",))
        out.start(name)
        yield from self._object(out, _MAX_DEPTH)
        out.end()
        yield from expect(self.end, (yield from skip_space()))
        return ""

    def _value(self, out: Writer, char: str, depth: int) -> Reading[str]:
        """Writes a value whose first character is `char`. Returns the one behind it, if it had to be read."""
        if char == self.quote[0]:
            yield from expect(self.quote, char)
            out.write('"')
            yield from self._string(out)
            out.write('"')
            return ""
        if char in "{[":
            if not depth:
                raise NotACall
            yield from self._object(out, depth - 1) if char == "{" else self._list(out, depth - 1)
            return ""
        if char in "\"'":
            return (yield from json_value(out, char))
        text, stop = yield from until((",", "}", "]"), char)
        out.write(as_json(text))
        return stop

    def _string(self, out: Writer) -> Reading[None]:
        matcher = StopMatcher((self.quote,))
        while matcher.matched is None:
            if text := matcher.feed((yield)):
                out.write(escaped(text))

    def _object(self, out: Writer, depth: int) -> Reading[None]:
        out.write("{")
        comma = ""
        char = yield from skip_space()
        while char != "}":
            if char == self.quote[0]:
                yield from expect(self.quote, char)
                key, _ = yield from until((self.quote,))
                yield from expect(":", (yield from skip_space()))
            elif char == '"':
                key = yield from json_string(char)
                yield from expect(":", (yield from skip_space()))
            else:
                key, _ = yield from until((":",), char)
            out.write(f'{comma}"{escaped(key.strip())}":')
            char = yield from self._value(out, (yield from skip_space()), depth)
            char = yield from self._behind(char, "}")
            comma = ","
        out.write("}")

    def _list(self, out: Writer, depth: int) -> Reading[None]:
        out.write("[")
        comma = ""
        char = yield from skip_space()
        while char != "]":
            if comma:
                out.write(comma)
            char = yield from self._value(out, char, depth)
            char = yield from self._behind(char, "]")
            comma = ","
        out.write("]")

    def _behind(self, char: str, end: str) -> Reading[str]:
        """What begins the next item, or `end`."""
        char = yield from skip_space(char)
        if char == ",":
            return (yield from skip_space())
        if char != end:
            raise NotACall
        return char

    def grammar(self, tools: Sequence[Tool]) -> CallGrammar:
        calls = [self._written(tool) for tool in tools]
        return wrapped(calls, f"{self.begin}call:", self.end, self.begin)

    def _written(self, tool: Tool) -> Node:
        """Strings in the quotes of the notation. Objects and lists in JSON, which is read as well as its own form."""
        arguments = arguments_of(tool, self._argument, without(":", "{", "}", '"', self.quote[0]))
        return All((Text(tool.name + "{"), *arguments.listed(","), Text("}")))

    def _argument(self, tool: Tool, name: Node, key: str, schema: object) -> Node:
        if is_text(schema):
            return All((name, Text(f":{self.quote}"), Until(self.quote)))
        return All((name, Text(":"), Json(schema, schema_of(tool))))


def _read_code(out: Writer, marker: str) -> Reading[str]:
    char = yield from skip_space()
    while True:
        if char == "[" or char == ",":
            char = yield from skip_space()
        yield from python_call(out, char)
        char = yield from skip_space()
        if char == "]":
            char = yield from skip_space()
        if char == "`":
            yield from expect(_FENCE, char)
            return ""


def _code_grammar(tools: Sequence[Tool]) -> CallGrammar:
    calls = [python_call_text(tool) for tool in tools]
    return listed(calls, _CODE, f"\n{_FENCE}", _CODE, separator="\n")


_GEMMA4 = _Notation("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _Notation("<start_function_call>", "<end_function_call>", "<escape>")


def _format(name: str, notation: _Notation) -> ToolFormat:
    return ToolFormat(
        name=name,
        read=notation.read,
        grammar=notation.grammar,
        shown_by=((notation.begin,),),
        markers=(notation.begin,),
        special_tokens=(notation.begin, notation.end, notation.quote),
    )


GEMMA4 = _format("gemma4", _GEMMA4)
FUNCTION_GEMMA = _format("function_gemma", _FUNCTION_GEMMA)
GEMMA3 = ToolFormat(name="gemma3", read=_read_code, grammar=_code_grammar, markers=(_CODE,))
