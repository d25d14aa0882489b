"""How calls are written (`backends.output.tools.grammar`) as rules of GBNF."""

from __future__ import annotations

import json
import logging
from typing import Any as AnyValue
from typing import assert_never

from backends.grammar import json_schema
from backends.grammar.schema_rules import RuleWriter, char_class, either, quoted
from backends.output.stops import StopTable
from backends.output.tools.grammar import All, Any, Chars, Json, Maybe, Node, Repeat, Text, Until
from protocols.errors import InvalidRequest

log = logging.getLogger(__name__)


def call_gbnf(node: Node) -> str:
    """A grammar whose texts are those of `node`. A schema that cannot be compiled admits any object, or any value."""
    writer = _Writer()
    root = writer.rules.reserve("root")
    body = writer.expression(node)
    writer.rules.define(root, body)
    return writer.rules.text()


class _Writer:
    def __init__(self) -> None:
        self.rules = RuleWriter()
        self._schemas: dict[str, str] = {}
        self._untils: dict[str, str] = {}

    def expression(self, node: Node) -> str:
        match node:
            case Text(text=text):
                return quoted(text)
            case Json(schema=schema, root=root):
                return self._schema(schema, root)
            case Until(stop=stop):
                return self._until(stop)
            case Chars(ranges=ranges, least=least, most=most):
                item = char_class((ord(low), ord(high)) for low, high in ranges)
                return self.rules.repeat(item, least, most, "chars")
            case All(parts=parts):
                return " ".join(self.expression(part) for part in parts if part != Text("")) or '""'
            case Any(options=options):
                return either([self.expression(option) for option in options])
            case Maybe(node=inner):
                return f"({self.expression(inner)})?"
            case Repeat(node=inner, separator=separator):
                item = self.rules.add(self.expression(inner), "item")
                return f"{item} ({quoted(separator)} {item})*" if separator else f"{item}+"
            case _:
                assert_never(node)

    def _schema(self, schema: AnyValue, root: dict[str, AnyValue] | None) -> str:
        key = json.dumps((schema, root))
        if key not in self._schemas:
            self._schemas[key] = self._compiled(schema, root)
        return self._schemas[key]

    def _compiled(self, schema: AnyValue, root: dict[str, AnyValue] | None) -> str:
        try:
            json_schema.to_gbnf(schema, "parameters", root=root)
        except InvalidRequest as error:
            log.info("the arguments of a tool are not constrained: %s", error.message)
            self.rules.json("space")
            return self.rules.json("object" if root is None else "value")
        return json_schema.write_rule(self.rules, schema, "parameters", "arguments", root=root)

    def _until(self, stop: str) -> str:
        """One rule for each beginning of `stop` that the text may end with: an automaton that looks for it."""
        if stop not in self._untils:
            table = StopTable((stop,))
            names = [self.rules.reserve("until") for _ in stop]
            self._untils[stop] = names[0]
            for length, name in enumerate(names):
                steps = {char: table.step(length, char) for char in dict.fromkeys(stop)}
                ahead = {char: after for char, after in steps.items() if after}
                options = [f"{quoted(c)} {names[n]}" if n < len(stop) else quoted(c) for c, n in ahead.items()]
                others = "[^" + char_class((ord(char), ord(char)) for char in ahead)[1:]
                self.rules.define(name, " | ".join([*options, f"{others} {names[0]}"]))
        return self._untils[stop]
