"""For models without a form of their own: `{"tool_call": {"name": …, "arguments": {…}}}`, or a list as `tool_calls`."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.reading import NotACall, Reading, skip_space
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, Any, CallGrammar, Repeat, Text, json_object
from backends.output.tools.json_calls import json_calls, json_string
from backends.output.writer import Writer
from protocols.request import Tool


def _read(out: Writer, marker: str) -> Reading[str]:
    char = yield from skip_space()
    key = yield from json_string(char)
    if key not in ("tool_call", "tool_calls", "function_call"):
        raise NotACall
    if (yield from skip_space()) != ":":
        raise NotACall
    char = yield from skip_space()
    yield from json_calls(out, char)
    char = yield from skip_space()
    return "" if char == "}" else char


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    call = Any(tuple(json_object(tool) for tool in tools))
    one = All((Text('{"tool_call": '), call, Text("}")))
    several = All((Text('{"tool_calls": ['), Repeat(call, ", "), Text("]}")))
    return CallGrammar(one, Any((one, several)), ('{"tool_call',))


GENERIC = ToolFormat(name="generic", read=_read, grammar=_grammar, naked_markers=("{",))
