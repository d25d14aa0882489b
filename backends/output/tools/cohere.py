"""Command R7B: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`.

Its ids count from 0 in every answer, so they are no names that hold for a conversation, and are not used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Json, Node, Text, listed, schema_of
from backends.output.tools.tagged_json import tagged_json
from protocols.request import Tool

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"


def _call(tool: Tool) -> Node:
    begin = f'{{"tool_call_id": "0", "tool_name": {json.dumps(tool.name, ensure_ascii=False)}, "parameters": '
    return All((Text(begin), Json(schema_of(tool)), Text("}")))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([_call(tool) for tool in tools], f"{_BEGIN}[\n    ", f"\n]{_END}", _BEGIN, separator=",\n    ")


COHERE = ToolFormat(
    name="cohere",
    read=tagged_json(_END),
    grammar=_grammar,
    shown_by=((_BEGIN,),),
    markers=(_BEGIN,),
    special_tokens=(_BEGIN, _END),
)
