"""How calls are written, as data: what a constraint is made of for a model that must call, or only in the right form.

A grammar is a tree of `Text`, `Json`, `Until`, `Chars`, `All` (one after the other), `Any` (one of them), `Maybe` and
`Repeat`. An engine writes it in its own notation, and has its own way to make rules of the JSON schemas in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any as AnyValue

import msgspec

from backends.output.tool_table import ToolTable
from protocols.request import Tool


class Text(msgspec.Struct, frozen=True):
    """Exactly this."""

    text: str


class Json(msgspec.Struct, frozen=True):
    """JSON text that `schema` accepts; without `root`, of all arguments of a call, else of one of them.

    References in `schema` point into `root`. An engine that cannot follow the schema takes any object, or any value.
    """

    schema: AnyValue
    root: dict[str, AnyValue] | None = None


class Until(msgspec.Struct, frozen=True):
    """Any text without `stop`, and `stop`."""

    stop: str


class Chars(msgspec.Struct, frozen=True):
    """`least` to `most` characters of the ranges."""

    ranges: tuple[tuple[str, str], ...]
    least: int = 1
    most: int = 1


class All(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Any(msgspec.Struct, frozen=True):
    options: tuple[Node, ...]


class Maybe(msgspec.Struct, frozen=True):
    node: Node


class Repeat(msgspec.Struct, frozen=True):
    """Once or more, with `separator` between."""

    node: Node
    separator: str = ""


Node = Text | Json | Until | Chars | All | Any | Maybe | Repeat


class CallGrammar(msgspec.Struct, frozen=True):
    """`one` is an answer of exactly one call, `several` of at least one.

    `triggers` are the words with which a call begins: each is a beginning of every text that the grammar describes
    where it stands, so that a lazy grammar may be woken by it.
    """

    one: Node
    several: Node
    triggers: tuple[str, ...]


NUMBER = Chars((("0", "9"),), 1, 4)
_LETTERS = (("a", "z"), ("A", "Z"), ("_", "_"))
_NAME = All((Chars(_LETTERS), Chars((*_LETTERS, ("0", "9")), 0, 63)))
"""Of an argument that nothing is known of."""


def wrapped(calls: Sequence[Node], begin: str, end: str, trigger: str, *, separator: str = "") -> CallGrammar:
    """Calls that each have `begin` before them and `end` behind."""
    one = All((Text(begin), Any(tuple(calls)), Text(end)))
    return CallGrammar(one, Repeat(one, separator), (trigger,))


def listed(calls: Sequence[Node], begin: str, end: str, trigger: str, *, separator: str) -> CallGrammar:
    """Calls of which all together have `begin` before them and `end` behind."""
    call = Any(tuple(calls))
    return CallGrammar(
        All((Text(begin), call, Text(end))),
        All((Text(begin), Repeat(call, separator), Text(end))),
        (trigger,),
    )


def schema_of(tool: Tool) -> dict[str, AnyValue]:
    """Always an object: that is what a call has, also where the tool does not say so, or says otherwise."""
    if tool.parameters.get("type", "object") != "object":
        return {"type": "object"}
    if tool.parameters.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"}:
        return tool.parameters
    return {"type": "object", **tool.parameters}


def json_object(tool: Tool, arguments: str = "arguments") -> Node:
    """A call as `{"name": …, "arguments": …}`."""
    name = json.dumps(tool.name, ensure_ascii=False)
    return All((Text(f'{{"name": {name}, "{arguments}": '), Json(schema_of(tool)), Text("}")))


Argument = Callable[[Tool, Node, str, AnyValue], Node]
"""How an argument of a tool is written: from how its name is, its name (empty: any) and its schema."""


class Arguments(msgspec.Struct, frozen=True):
    """The arguments of a tool, for formats that write them one by one, each in its order. `any`: any number of others.

    Such formats have no way to say which of several groups of arguments belong together (`anyOf` and the like at the
    top of a schema), and write no others beside those that are declared.
    """

    required: tuple[Node, ...] = ()
    optional: tuple[Node, ...] = ()
    any: Node | None = None

    def listed(self, separator: str) -> list[Node]:
        """With `separator` between them."""
        if self.any is not None:
            return [Maybe(Repeat(self.any, separator))]
        parts: list[Node] = []
        for index, node in enumerate(self.required):
            parts += [Text(separator), node] if index else [node]
        behind: list[Node] = [Maybe(All((Text(separator), node))) for node in self.optional]
        if self.required:
            return parts + behind
        firsts = [All((node, *behind[index + 1 :])) for index, node in enumerate(self.optional)]
        return [Maybe(Any(tuple(firsts)))] if firsts else []

    def each(self) -> list[Node]:
        """One behind the other."""
        others = () if self.any is None else (Maybe(Repeat(self.any)),)
        return [*self.required, *map(Maybe, self.optional), *others]


def arguments_of(tool: Tool, argument: Argument, name: Callable[[str], str | None]) -> Arguments:
    """`name` is how the format writes one, or None if it cannot: then there is no way to give that argument."""
    schema = schema_of(tool)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        closed = schema.get("additionalProperties") is False
        return Arguments() if closed else Arguments(any=argument(tool, _NAME, "", {}))
    listed = schema.get("required")
    names = listed if isinstance(listed, list) else []
    written: dict[bool, list[Node]] = {True: [], False: []}
    for key, value in properties.items():
        if (text := name(key)) is not None:
            written[key in names].append(argument(tool, Text(text), key, value))
    return Arguments(tuple(written[True]), tuple(written[False]))


def without(*marks: str) -> Callable[[str], str | None]:
    """Names as they are, but for those that have one of `marks` in them, which would end them."""
    return lambda name: None if not name or name != name.strip() or any(mark in name for mark in marks) else name


def is_text(schema: AnyValue) -> bool:
    """Whether an argument is a string that may be any text."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return False
    return not schema.keys() & {"enum", "const", "pattern", "format", "minLength", "maxLength"}


def bare_value(tool: Tool, name: str, schema: AnyValue, end: str) -> Node:
    """An argument that is written as it is, and `end`. What may be a string has no quotes, so it may be any text."""
    types = ToolTable((tool,)).types(tool.name, name) if name else frozenset({"string"})
    if "string" not in types:
        return All((Json(schema, schema_of(tool)), Text(end)))
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and all(isinstance(option, str) for option in options):
        return All((Any(tuple(Text(option) for option in options)), Text(end)))
    return Until(end)
