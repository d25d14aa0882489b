"""The tools of a request as the parsers of their calls need them: names, and which types their arguments have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from backends.output.reading import NotACall
from protocols.request import Tool

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_MAX_DEPTH = 8

UNKNOWN: frozenset[str] = frozenset()


class ToolTable:
    """Types are `object array string number boolean null`; an integer is a number."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def resolve(self, name: str, *, declared: bool) -> str:
        """The name of the tool that is called; `NotACall` if there is none.

        A model that calls what it does not have has still made a call, and the client can tell it so. Where nothing but
        the name shows that text is a call, the name must be one that was `declared`.
        """
        name = name.strip()
        if name in self._tools:
            return name
        bare = name.removeprefix("functions.")
        if bare in self._tools or (not declared and _NAME.fullmatch(bare)):
            return bare
        raise NotACall

    def types(self, name: str, argument: str) -> frozenset[str]:
        """`UNKNOWN` if the schema does not say."""
        schema = self._tools[name].parameters if name in self._tools else {}
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return UNKNOWN
        return _types(properties.get(argument), schema, _MAX_DEPTH)


def _types(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or not depth:
        return UNKNOWN
    match schema:
        case {"type": str(name)}:
            return frozenset({_kind(name)})
        case {"type": list(names)}:
            return frozenset(_kind(name) for name in names if isinstance(name, str))
        case {"enum": list(values)}:
            return frozenset(_KINDS[type(value)] for value in values if type(value) in _KINDS)
        case {"const": value} if type(value) in _KINDS:
            return frozenset({_KINDS[type(value)]})
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            kinds = [_types(option, root, depth - 1) for option in options]
            return frozenset().union(*kinds) if all(kinds) else UNKNOWN
        case {"$ref": str(reference)} if reference.startswith("#/"):
            target: Any = root
            for key in reference[2:].split("/"):
                target = target.get(key) if isinstance(target, dict) else None
            return _types(target, root, depth - 1)
    return UNKNOWN


def _kind(name: str) -> str:
    return "number" if name == "integer" else name
