"""Llama 3.1 to 3.3: `{"name": …, "parameters": {…}}`, alone on its line or behind `<|python_tag|>`.

Behind the tag Llama also calls its built-in tools, `brave_search.call(query="…")`.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.reading import Reading, skip_space
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, Any, CallGrammar, Maybe, Repeat, Text, json_object
from backends.output.tools.json_calls import json_call
from backends.output.tools.pythonic import python_call
from backends.output.writer import Writer
from protocols.request import Tool

_TAG = "<|python_tag|>"


def _read(out: Writer, marker: str) -> Reading[str]:
    char = "{" if marker == "{" else (yield from skip_space())
    if char != "{":
        yield from python_call(out, char)
        return ""
    while True:
        if char == "{":
            yield from json_call(out, char)
        elif char not in ";,":
            return char
        char = yield from skip_space()


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    tag = Maybe(Text(_TAG))
    one = Any(tuple(json_object(tool, "parameters") for tool in tools))
    return CallGrammar(All((tag, one)), All((tag, Repeat(one, "; "))), (_TAG, '{"name": "'))


LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    read=_read,
    grammar=_grammar,
    shown_by=((_TAG,), ('{"name": function name, "parameters"',)),
    markers=(_TAG,),
    naked_markers=("{",),
    special_tokens=(_TAG,),
)
