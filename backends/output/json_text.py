"""JSON as models write it, followed one character at a time and passed on as strict JSON.

What models write in its place is understood too: strings in single quotes, `True`, `False` and `None`, a comma behind
the last item, line breaks inside strings. Nothing is held back but a number or a word, until it is complete, and a
comma, until something follows it.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD_CHARS = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-._")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 400
_ESCAPED = {'"': '\\"', "\\": "\\\\", **{chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}}
_TO_ESCAPE = re.compile(r'["\\\x00-\x1f]')


class NotJson(Exception):
    """The text cannot go on like this."""


def escaped(text: str) -> str:
    """`text` as it stands inside a JSON string. Piecewise is the same as at once."""
    return _TO_ESCAPE.sub(lambda found: _ESCAPED[found[0]], text)


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonScanner:
    """Follows one value. `done` is true behind its last character, and `kind` is `JSON.typeof`'s word for it."""

    def __init__(self) -> None:
        self.done = False
        self.kind = ""
        self._expect = _Expect.VALUE
        self._stack: list[str] = []  # the brackets that are open, as what closes them
        self._pending = ""  # a comma and the white space behind it
        self._word = ""
        self._quote = ""
        self._escape = ""
        self._is_key = False
        self._out: list[str] = []

    def take(self) -> str:
        """The JSON text since the last call."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, char: str) -> bool:
        """Whether `char` belongs to the value. What follows a number does not, and tells that it is complete.

        Raises `NotJson`. Nothing may be fed after that, nor once `done`.
        """
        if self._quote:
            self._in_string(char)
            return True
        if char in _WORD_CHARS:
            self._in_word(char)
            return True
        if self._word:
            self._end_word()
            if self.done:
                return False
        self._structure(char)
        return True

    def finish(self) -> None:
        """The text ends here. Raises `NotJson` if the value is incomplete."""
        if self._word and not self._quote:
            self._end_word()
        if not self.done:
            raise NotJson

    def _in_string(self, char: str) -> None:
        if self._escape:
            self._in_escape(self._escape + char)
        elif char == self._quote:
            self._quote = ""
            self._out.append('"')
            if self._is_key:
                self._expect = _Expect.COLON
            else:
                self._value_ends("string")
        elif char == "\\":
            self._escape = char
        else:
            self._out.append(_ESCAPED.get(char, char))

    def _in_escape(self, escape: str) -> None:
        if escape[1] == "u" and len(escape) < 6 and (len(escape) == 2 or escape[-1] in _HEX):
            self._escape = escape
            return
        self._escape = ""
        if escape[1] in _SIMPLE_ESCAPES or (escape[1] == "u" and escape[-1] in _HEX):
            self._out.append(escape)
        elif escape == "\\'":
            self._out.append("'")
        elif escape[-1] == self._quote and len(escape) > 2:
            self._out.append("\\" + escape[:-1])
            self._in_string(escape[-1])
        else:  # no escape of JSON's: the backslash was meant as one
            self._out.append(escaped(escape))

    def _in_word(self, char: str) -> None:
        if not self._word and self._expect not in (_Expect.VALUE, _Expect.VALUE_OR_END):
            raise NotJson
        self._word += char
        if len(self._word) > _MAX_WORD:
            raise NotJson

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        self._begin_item()
        if word in _WORDS:
            self._out.append(_WORDS[word])
            self._value_ends("null" if _WORDS[word] == "null" else "boolean")
            return
        self._out.append(word if _NUMBER.fullmatch(word) else _number(word))
        self._value_ends("number")

    def _structure(self, char: str) -> None:
        expect = self._expect
        if char in " \t\r\n":
            if self._pending:
                self._pending += char
            else:
                self._out.append(char)
        elif expect in (_Expect.VALUE, _Expect.VALUE_OR_END) and char in "{[\"'":
            self._begin_value(char)
        elif expect is _Expect.KEY_OR_END and char in "\"'":
            self._begin_string(char, is_key=True)
        elif expect is _Expect.COLON and char == ":":
            self._out.append(char)
            self._expect = _Expect.VALUE
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._pending = char
            self._expect = _Expect.KEY_OR_END if self._stack[-1] == "}" else _Expect.VALUE_OR_END
        elif expect not in (_Expect.VALUE, _Expect.COLON) and self._stack and char == self._stack[-1]:
            self._pending = ""
            self._out.append(self._stack.pop())
            self._value_ends("object" if char == "}" else "array")
        else:
            raise NotJson

    def _begin_value(self, char: str) -> None:
        if char in "\"'":
            self._begin_string(char, is_key=False)
            return
        self._begin_item()
        self._out.append(char)
        self._stack.append("}" if char == "{" else "]")
        self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END

    def _begin_string(self, quote: str, is_key: bool) -> None:
        self._begin_item()
        self._quote, self._is_key = quote, is_key
        self._out.append('"')

    def _begin_item(self) -> None:
        self._out.append(self._pending)
        self._pending = ""

    def _value_ends(self, kind: str) -> None:
        self._expect = _Expect.COMMA_OR_END
        if not self._stack:
            self.done, self.kind = True, kind


def _number(word: str) -> str:
    """A number in Python's spelling, such as `.5` or `1_000`, in JSON's."""
    try:
        value = float(word)
    except ValueError:
        raise NotJson from None
    if not math.isfinite(value):
        raise NotJson
    return repr(int(word)) if word.lstrip("+-").replace("_", "").isdigit() and len(word) < _MAX_WORD else repr(value)


def normalised(text: str) -> tuple[str, str] | None:
    """All of `text` as one JSON value, and its kind; None if it is none."""
    scanner = JsonScanner()
    try:
        for char in text:
            if scanner.done or not scanner.feed(char):
                return None
        scanner.finish()
    except NotJson:
        return None
    return scanner.take(), scanner.kind
