"""Hermes, Qwen 2.5 and 3, Granite 4 and many others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import CallGrammar, json_object, wrapped
from backends.output.tools.tagged_json import tagged_json
from protocols.request import Tool


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    calls = [json_object(tool) for tool in tools]
    return wrapped(calls, "<tool_call>\n", "\n</tool_call>", "<tool_call>", separator="\n")


HERMES = ToolFormat(
    name="hermes",
    read=tagged_json("</tool_call>"),
    grammar=_grammar,
    shown_by=(("<tool_call>",),),
    markers=("<tool_call>",),
    special_tokens=("<tool_call>", "</tool_call>"),
)
