"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}]`. Granite 4 writes what Hermes does."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import CallGrammar, json_object, listed
from backends.output.tools.tagged_json import tagged_json
from protocols.request import Tool


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([json_object(tool) for tool in tools], "<|tool_call|>[", "]", "<|tool_call|>", separator=", ")


GRANITE = ToolFormat(
    name="granite",
    read=tagged_json(""),
    grammar=_grammar,
    shown_by=(("<|tool_call|>",),),
    markers=("<|tool_call|>",),
    special_tokens=("<|tool_call|>",),
)
