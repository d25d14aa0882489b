"""Nemotron Nano 2: `<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`."""

from __future__ import annotations

from collections.abc import Sequence

from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import CallGrammar, json_object, listed
from backends.output.tools.tagged_json import tagged_json
from protocols.request import Tool


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([json_object(tool) for tool in tools], "<TOOLCALL>[", "]</TOOLCALL>", "<TOOLCALL>", separator=", ")


NEMOTRON = ToolFormat(
    name="nemotron",
    read=tagged_json("</TOOLCALL>"),
    grammar=_grammar,
    shown_by=(("<TOOLCALL>",),),
    markers=("<TOOLCALL>",),
    special_tokens=("<TOOLCALL>", "</TOOLCALL>"),
)
