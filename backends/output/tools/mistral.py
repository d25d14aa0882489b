"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{…}` for each call.

Ids have nine letters and digits; templates refuse others. Those that a model writes come too late for a stream, behind
the arguments or, in between, not at all; so ours are used, except where one comes in time (`[CALL_ID]`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from backends.output.reading import NotACall, Reading, skip_space, until
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Json, Node, Text, json_object, listed, schema_of, wrapped
from backends.output.tools.json_calls import json_arguments, json_calls
from backends.output.writer import Writer
from protocols.request import Tool

_MARKER, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def mistral_id(id: str) -> str:
    """Nine letters and digits that stand for `id`."""
    number = int.from_bytes(blake2b(id.encode(), digest_size=8).digest(), "big")
    return "".join(_ALPHABET[number // 62**place % 62] for place in range(9))


def _read(out: Writer, marker: str) -> Reading[str]:
    char = yield from skip_space()
    if char in "[{":
        yield from json_calls(out, char)
        return ""
    name, stop = yield from until((_ARGS, _CALL_ID, "{"), char)
    id = ""
    if stop == _CALL_ID:
        id, stop = yield from until((_ARGS, "{"))
    char = "{" if stop == "{" else (yield from skip_space())
    if char != "{":
        raise NotACall
    yield from json_arguments(out, name, char, id if _ID.fullmatch(id) else "")
    return ""


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    return wrapped([_call(tool) for tool in tools], _MARKER, "", _MARKER)


def _call(tool: Tool) -> Node:
    return All((Text(f"{tool.name}{_ARGS}"), Json(schema_of(tool))))


def _list_grammar(tools: Sequence[Tool]) -> CallGrammar:
    return listed([json_object(tool) for tool in tools], f"{_MARKER}[", "]", _MARKER, separator=", ")


MISTRAL = ToolFormat(
    name="mistral",
    read=_read,
    grammar=_grammar,
    shown_by=((_MARKER, _ARGS),),
    markers=(_MARKER,),
    special_tokens=(_MARKER, _CALL_ID, _ARGS),
    own_ids=mistral_id,
)

MISTRAL_LIST = ToolFormat(
    name="mistral_list",
    read=_read,
    grammar=_list_grammar,
    shown_by=((_MARKER,),),
    markers=(_MARKER,),
    special_tokens=(_MARKER,),
    own_ids=mistral_id,
)
