"""Calls whose arguments stand in elements of their own, as bare text: `<function=f><parameter=a>…</parameter>…`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.output.json_text import escaped
from backends.output.reading import Reading, choose, expect, skip_space, until
from backends.output.tools.grammar import All, CallGrammar, Node, Text, arguments_of, bare_value, without, wrapped
from backends.output.tools.json_calls import json_call
from backends.output.tools.typed_values import typed_value
from backends.output.writer import Writer
from protocols.request import Tool


class Elements(msgspec.Struct, frozen=True):
    """The texts around everything. `lines`: a value stands on lines of its own."""

    begin: str
    end: str
    call_begin: str
    call_end: str
    argument_begin: str
    argument_end: str
    name_end: str
    lines: bool

    def read(self, out: Writer, marker: str) -> Reading[str]:
        if marker == self.call_begin:
            yield from self._call(out)
        else:
            char = yield from skip_space()
            if char == "{":  # some were trained on both forms
                yield from json_call(out, char)
            else:
                yield from expect(self.call_begin, char)
                yield from self._call(out)
        while True:
            following = yield from choose((self.end, self.call_begin), (yield from skip_space()))
            if following == self.end:
                return ""
            yield from self._call(out)

    def _call(self, out: Writer) -> Reading[None]:
        name, _ = yield from until((self.name_end,))
        name = out.start(name)
        brace = "{"
        stops = (f"\n{self.argument_end}", self.argument_end) if self.lines else (self.argument_end,)
        while (yield from self._another()):
            argument, _ = yield from until((self.name_end,))
            out.write(f'{brace}"{escaped(argument)}": ')
            yield from typed_value(out, out.tools.types(name, argument), stops, own_line=self.lines)
            brace = ", "
        out.write("}" if brace == ", " else "{}")
        out.end()

    def _another(self) -> Reading[bool]:
        found = yield from choose((self.argument_begin, self.call_end), (yield from skip_space()))
        return found == self.argument_begin

    def grammar(self, tools: Sequence[Tool]) -> CallGrammar:
        calls = [self._written(tool) for tool in tools]
        return wrapped(calls, f"{self.begin}\n", f"\n{self.end}", self.begin, separator="\n")

    def _written(self, tool: Tool) -> Node:
        begin = Text(f"{self.call_begin}{tool.name}{self.name_end}\n")
        return All((begin, *arguments_of(tool, self._argument, without(self.name_end)).each(), Text(self.call_end)))

    def _argument(self, tool: Tool, name: Node, key: str, schema: object) -> Node:
        line = "\n" if self.lines else ""
        value = bare_value(tool, key, schema, f"{line}{self.argument_end}")
        return All((Text(self.argument_begin), name, Text(f"{self.name_end}{line}"), value, Text("\n")))
