"""How calls are written, as data: what a constraint is made of for a model that must call, or only in the right form.

A grammar is a tree of `Text`, `Json`, `Until`, `All` (one after the other), `Any` (one of them), `Maybe` and `Repeat`.
`gbnf` writes it down. The arguments stay JSON schemas: the engine has its own way to make rules of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any as AnyValue
from typing import assert_never

import msgspec

from backends.output.stops import StopTable
from backends.output.tool_table import ToolTable
from protocols.request import Tool


class Text(msgspec.Struct, frozen=True):
    """Exactly this."""

    text: str


class Json(msgspec.Struct, frozen=True):
    """JSON text that the schema accepts."""

    schema: AnyValue


class Until(msgspec.Struct, frozen=True):
    """Any text without `stop`, and `stop`."""

    stop: str


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


Node = Text | Json | Until | All | Any | Maybe | Repeat


class CallGrammar(msgspec.Struct, frozen=True):
    """`one` is an answer of exactly one call, `several` of at least one.

    `triggers` are the words with which a call begins: each is a beginning of every text that the grammar describes
    where it stands, so that a lazy grammar may be woken by it.
    """

    one: Node
    several: Node
    triggers: tuple[str, ...]


class Gbnf(msgspec.Struct, frozen=True):
    """`text` has a rule `root`. The rules named in `schemas` are missing in it: they are JSON text of a schema."""

    text: str
    schemas: dict[str, AnyValue]


def gbnf(node: Node) -> Gbnf:
    writer = _Writer()
    writer.rules["root"] = writer.expression(node)
    return Gbnf("".join(f"{name} ::= {body}\n" for name, body in writer.rules.items()), writer.schemas)


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
    """Always an object: that is what a call has, also where the tool does not say so."""
    return tool.parameters if "properties" in tool.parameters or "$ref" in tool.parameters else {"type": "object"}


def json_object(tool: Tool, arguments: str = "arguments") -> Node:
    """A call as `{"name": …, "arguments": …}`."""
    return All(
        (Text(f'{{"name": {json.dumps(tool.name)}, "{arguments}": '), Json(schema_of(tool)), Text("}")),
    )


def arguments_of(tool: Tool) -> list[tuple[str, AnyValue, bool]]:
    """Name, schema and whether it is required, for formats that write arguments one by one; the required ones first."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    if not isinstance(properties, dict):
        return []
    names = set(required) if isinstance(required, list) else set()
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    found = [
        (name, {**schema, **definitions} if isinstance(schema, dict) else schema, name in names)
        for name, schema in properties.items()
    ]
    return sorted(found, key=lambda argument: not argument[2])


def argument_list(tool: Tool, argument: Callable[[str, AnyValue], Node], separator: str) -> list[Node]:
    """The required arguments in their order, then any of the others in theirs, with `separator` between."""
    required = [argument(name, schema) for name, schema, needed in arguments_of(tool) if needed]
    optional = [argument(name, schema) for name, schema, needed in arguments_of(tool) if not needed]
    parts: list[Node] = []
    for index, node in enumerate(required):
        parts += [Text(separator), node] if index else [node]
    behind: list[Node] = [Maybe(All((Text(separator), node))) for node in optional]
    if required:
        return parts + behind
    firsts = [All((node, *behind[index + 1 :])) for index, node in enumerate(optional)]
    return [Maybe(Any(tuple(firsts)))] if firsts else []


def is_text(schema: AnyValue) -> bool:
    """Whether an argument is a string that may be any text."""
    if not isinstance(schema, dict) or schema.get("type") != "string":
        return False
    return not schema.keys() & {"enum", "const", "pattern", "format", "minLength", "maxLength"}


def bare_value(tool: Tool, name: str, schema: AnyValue, end: str) -> Node:
    """An argument that is written as it is, and `end`. What may be a string has no quotes, so it may be any text."""
    if "string" not in ToolTable((tool,)).types(tool.name, name):
        return All((Json(schema), Text(end)))
    options = schema.get("enum")
    if isinstance(options, list) and all(isinstance(option, str) for option in options):
        return All((Any(tuple(Text(option) for option in options)), Text(end)))
    return Until(end)


class _Writer:
    def __init__(self) -> None:
        self.rules: dict[str, str] = {"root": ""}
        self.schemas: dict[str, AnyValue] = {}
        self._names: dict[str, str] = {}
        self._untils: dict[str, str] = {}

    def expression(self, node: Node) -> str:
        match node:
            case Text(text=text):
                return quoted(text) if text else '""'
            case Json(schema=schema):
                return self._schema(schema)
            case Until(stop=stop):
                return self._until(stop)
            case All(parts=parts):
                return " ".join(self._grouped(part) for part in parts if part != Text("")) or '""'
            case Any(options=options):
                return " | ".join(self.expression(option) for option in options)
            case Maybe(node=inner):
                return f"({self.expression(inner)})?"
            case Repeat(node=inner, separator=separator):
                name = self._rule(self.expression(inner), "item")
                between = f"{quoted(separator)} {name}" if separator else name
                return f"{name} ({between})*"
            case _:
                assert_never(node)

    def _grouped(self, node: Node) -> str:
        text = self.expression(node)
        return f"({text})" if isinstance(node, Any) and len(node.options) > 1 else text

    def _rule(self, body: str, prefix: str) -> str:
        name = f"{prefix}-{len(self.rules)}"
        self.rules[name] = body
        return name

    def _schema(self, schema: AnyValue) -> str:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._names:
            self._names[key] = f"schema-{len(self.schemas)}"
            self.schemas[self._names[key]] = schema
        return self._names[key]

    def _until(self, stop: str) -> str:
        """One rule for each beginning of `stop` that the text may end with: an automaton that looks for it."""
        if stop not in self._untils:
            prefix = f"until-{len(self._untils)}"
            self._untils[stop] = f"{prefix}-0"
            for length in range(len(stop)):
                self.rules[f"{prefix}-{length}"] = self._step(stop, length, prefix)
        return self._untils[stop]

    def _step(self, stop: str, seen: int, prefix: str) -> str:
        table = StopTable((stop,))
        steps = {char: table.step(seen, char) for char in dict.fromkeys(stop)}
        options = [
            quoted(char) if after == len(stop) else f"{quoted(char)} {prefix}-{after}"
            for char, after in steps.items()
            if after
        ]
        others = "".join(_in_class(char) for char, after in steps.items() if after)
        return " | ".join([*options, f"[^{others}] {prefix}-0"])


def quoted(text: str) -> str:
    """A GBNF literal."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'


def _in_class(char: str) -> str:
    return f"\\x{ord(char):02X}" if char in "[]\\^-\n\r\t" else char
