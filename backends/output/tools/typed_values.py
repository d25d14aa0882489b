"""Arguments that a format writes as bare text, turned into JSON by the types that the tool's schema gives them."""

from __future__ import annotations

from backends.output.json_text import JsonScanner, NotJson, escaped, normalised
from backends.output.reading import NotACall, Reading
from backends.output.stops import StopMatcher
from backends.output.tool_table import UNKNOWN
from backends.output.writer import Writer

MAX_UNDECIDED = 1024
"""Characters of a value that may be a string or something else: longer ones are what they look like so far."""

_STRING = frozenset({"string"})


def typed_value(out: Writer, types: frozenset[str], stops: tuple[str, ...], *, own_line: bool = False) -> Reading[None]:
    """Writes the value that ends before any of `stops`, which are read over.

    A string is written as it comes, and so is an object or a list where no string is allowed. Anything else must be
    complete to be told apart. With `own_line`, a line break before the value is not part of it.
    """
    matcher = StopMatcher(stops)
    value = _Value(out, types)
    char = yield
    if not (own_line and char == "\n"):
        value.feed(matcher.feed(char))
    while matcher.matched is None:
        value.feed(matcher.feed((yield)))
    value.finish()


class _Value:
    def __init__(self, out: Writer, types: frozenset[str]) -> None:
        self._out = out
        self._types = types
        self._held = ""
        self._json: JsonScanner | None = None
        self._is_string = types == _STRING
        if self._is_string:
            out.write('"')

    def feed(self, text: str) -> None:
        if self._is_string:
            if text:
                self._out.write(escaped(text))
        elif self._json is not None:
            self._scan(self._json, text)
        else:
            self._held += text
            begins = self._held.lstrip()[:1]
            if begins in ("{", "[") and self._types and "string" not in self._types:
                self._as_json()
            elif len(self._held) > MAX_UNDECIDED:
                self._decide()

    def finish(self) -> None:
        if self._is_string:
            self._out.write('"')
        elif self._json is None:
            self._out.write(as_json(self._held, self._types))
        elif not self._json.done:
            raise NotACall

    def _decide(self) -> None:
        """By the beginning alone: what could be an object or a list, or a string."""
        scanner = JsonScanner()
        text = self._held.lstrip()
        try:
            could_be = text[:1] in ("{", "[") and all(scanner.feed(char) for char in text) and not scanner.done
        except NotJson:
            could_be = False
        if could_be:
            self._as_json()
        else:
            held, self._held = self._held, ""
            self._is_string = True
            self._out.write('"' + escaped(held))

    def _as_json(self) -> None:
        held, self._held = self._held.lstrip(), ""
        self._json = JsonScanner()
        self._scan(self._json, held)

    def _scan(self, scanner: JsonScanner, text: str) -> None:
        try:
            for char in text:
                if not scanner.done:
                    scanner.feed(char)
                elif not char.isspace():
                    raise NotACall
        except NotJson:
            raise NotACall from None
        if json := scanner.take():
            self._out.write(json)


def as_json(text: str, types: frozenset[str] = UNKNOWN) -> str:
    """What it is if the types allow that, else a string."""
    found = normalised(text.strip())
    if found is not None and ("string" not in types or found[1] in types - _STRING):
        return found[0]
    return f'"{escaped(text)}"'
