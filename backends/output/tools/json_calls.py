"""Calls written as JSON: `{"name": …, "arguments": {…}}`, the part that many formats share."""

from __future__ import annotations

import json

from backends.output.json_text import JsonScanner, NotJson
from backends.output.reading import NotACall, Reading, skip_space
from backends.output.writer import Writer

_NAMES = ("name", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OTHERS = ("type", "id", "tool_call_id", "index")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class _Call:
    def __init__(self) -> None:
        self.name = ""
        self.held = ""  # arguments that came before the name
        self.has_arguments = False
        self.is_complete = False


def json_calls(out: Writer, char: str) -> Reading[None]:
    """One call, or a list of them."""
    if char != "[":
        yield from json_call(out, char)
        return
    char = yield from skip_space()
    while True:
        yield from json_call(out, char)
        char = yield from skip_space()
        if char == "]":
            return
        if char != ",":
            raise NotACall
        char = yield from skip_space()


def json_call(out: Writer, char: str) -> Reading[None]:
    """An object with a name and arguments in any order, also as OpenAI writes them: `{"function": {"name": …}}`."""
    call = _Call()
    yield from _members(out, call, char)
    if call.is_complete:
        return
    if not call.name:
        raise NotACall
    out.start(call.name)
    out.write(call.held or "{}")
    out.end()


def _members(out: Writer, call: _Call, char: str) -> Reading[None]:
    if char != "{":
        raise NotACall
    char = yield from skip_space()
    while True:
        key = yield from json_string(char)
        if (yield from skip_space()) != ":":
            raise NotACall
        char = yield from skip_space()
        if (key in _NAMES or key == "function") and not call.name and char == '"':
            call.name = yield from json_string(char)
            out.tools.resolve(call.name, declared=out.naked)
            char = ""
        elif key == "function" and not call.name and char == "{":
            yield from _members(out, call, char)
            char = ""
        elif key in _ARGUMENTS and not call.has_arguments:
            char = yield from _arguments(out, call, char)
        elif key in _OTHERS or call.is_complete:
            char = yield from json_value(None, char)
        else:
            raise NotACall
        char = yield from skip_space(char)
        if char == "}":
            return
        if char != ",":
            raise NotACall
        char = yield from skip_space()


def _arguments(out: Writer, call: _Call, char: str) -> Reading[str]:
    """Written as they come if the name is known. Returns the character behind them, if it had to be read."""
    call.has_arguments = True
    if char == '"':  # JSON inside a string, as OpenAI's API has it
        yield from _quoted_object(out, call)
        return ""
    if char == "n":
        return (yield from json_value(None, char))  # null: no arguments
    yield from _object(out, call, char)
    return ""


def _object(out: Writer, call: _Call, char: str) -> Reading[None]:
    arguments = _ObjectWriter(out, call.name)
    while not arguments.feed(char):
        char = yield
    call.held, call.is_complete = arguments.held, bool(call.name)


def _quoted_object(out: Writer, call: _Call) -> Reading[None]:
    arguments = _ObjectWriter(out, call.name)
    complete = False
    while (text := (yield from _string_char())) is not None:
        for char in text:
            if not complete:
                complete = arguments.feed(char)
            elif not char.isspace():
                raise NotACall
    if not complete:
        raise NotACall
    call.held, call.is_complete = arguments.held, bool(call.name)


def json_arguments(out: Writer, name: str, char: str, id: str = "") -> Reading[None]:
    """The arguments of a call whose name was read before, as an object. The call is complete behind it."""
    arguments = _ObjectWriter(out, name, id)
    while not arguments.feed(char):
        char = yield


class _ObjectWriter:
    """Starts the call once it is clear that an object comes, and ends it with the object.

    Without a name, the object is held and not written.
    """

    def __init__(self, out: Writer, name: str, id: str = "") -> None:
        self.held = ""
        self._out = out
        self._name = name
        self._id = id
        self._scanner = JsonScanner()
        self._has_begun = False

    def feed(self, char: str) -> bool:
        """Whether the object is complete."""
        try:
            if not self._has_begun and not self.held and char != "{":
                raise NotACall
            self._scanner.feed(char)
        except NotJson:
            raise NotACall from None
        self.held += self._scanner.take()
        if not self._has_begun and self._name and not char.isspace() and char != "{":
            self._out.start(self._name, self._id)
            self._has_begun = True
        if self._has_begun and self.held:
            self._out.write(self.held)
            self.held = ""
        if self._has_begun and self._scanner.done:
            self._out.end()
        return self._scanner.done


def json_value(out: Writer | None, char: str) -> Reading[str]:
    """Writes any value, or reads over it without `out`. Returns the character behind it if it had to be read."""
    scanner = JsonScanner()
    try:
        while True:
            belongs = scanner.feed(char)
            if (text := scanner.take()) and out is not None:
                out.write(text)
            if scanner.done:
                return "" if belongs else char
            char = yield
    except NotJson:
        raise NotACall from None


def json_string(char: str) -> Reading[str]:
    """What a string stands for, whose first character is `char`."""
    if char != '"':
        raise NotACall
    parts = []
    while (text := (yield from _string_char())) is not None:
        parts.append(text)
    return "".join(parts)


def _string_char() -> Reading[str | None]:
    """What the next character or escape stands for; None is the end. Halves of surrogate pairs stay escaped."""
    char = yield
    if char == '"':
        return None
    if char != "\\":
        return char
    char = yield
    if char != "u":
        return _ESCAPES.get(char, char)
    digits = ""
    while len(digits) < 4:
        digits += yield
    try:
        code = int(digits, 16)
    except ValueError:
        raise NotACall from None
    return f"\\u{digits}" if 0xD800 <= code < 0xE000 else str(json.loads(f'"\\u{digits}"'))
