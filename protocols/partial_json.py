"""The JSON object a model writes, piece by piece: what is passed on never has to be taken back, and always completes.

Models cut their arguments short, leave a comma too many, put raw line breaks into strings. Clients that parse what has
come so far fail on that for good. So only text that can still become an object is passed on; a key waits for its
value, a comma for what follows it. What cannot be understood ends the object there.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_HEX = re.compile(r"\\u[0-9a-fA-F]{4}")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SPACE = " \t\n\r"
_REPLACEMENT = "\ufffd"

MAX_DEPTH = 100
"""Parsers give up on deeper nesting, at some depth of their own."""

MAX_NUMBER_CHARS = 300


class _At(Enum):
    START = auto()
    KEY = auto()  # or the end of the object
    COLON = auto()
    VALUE = auto()
    ITEM = auto()  # a value, or the end of the list
    NEXT = auto()  # a comma, or the end of what is open
    KEY_TEXT = auto()
    TEXT = auto()
    SCALAR = auto()
    END = auto()  # complete, or not to be understood


class JsonObject:
    """Feed the pieces, then `finish`. All that was returned, joined, is one JSON object."""

    def __init__(self) -> None:
        self._at = _At.START
        self._begun = False
        self._closers: list[str] = []
        self._filled: list[bool] = []  # for each of them: whether it has an element
        self._key = ""  # the JSON string of the key whose value has not begun
        self._scalar = ""
        self._escape = ""  # an escape sequence that is not complete
        self._high = ""  # the first half of a surrogate pair

    def feed(self, text: str) -> str:
        out: list[str] = []
        position = 0
        while position < len(text) and self._at is not _At.END:
            if self._at in (_At.TEXT, _At.KEY_TEXT):
                piece, position = self._string(text, position)
                if self._at in (_At.KEY_TEXT, _At.COLON):
                    self._key += piece
                else:
                    out.append(piece)
            elif self._at is _At.SCALAR:
                match = _SCALAR.match(text, position)
                if match is None:
                    out.append(self._end_scalar())
                else:
                    self._scalar += match[0]
                    position = match.end()
            else:
                piece, length = self._structure(text[position])
                out.append(piece)
                position += length
        return "".join(out)

    def finish(self) -> str:
        """What is still missing of the object."""
        out = "" if self._begun else "{}"
        if self._at is _At.TEXT:
            out = self._lone() + '"'
        elif self._at is _At.SCALAR:
            out = self._end_scalar()
        out += "".join(reversed(self._closers))
        self._closers.clear()
        self._at = _At.END
        return out

    # --- between strings and scalars ---

    def _structure(self, char: str) -> tuple[str, int]:
        """What `char` stands for, and how much of it is done with: 0 of the first of a scalar."""
        at = self._at
        if char in _SPACE:
            return "", 1
        if at in (_At.VALUE, _At.ITEM) and _SCALAR.match(char):
            self._at = _At.SCALAR
            return "", 0
        if at is _At.START and char == "{":
            self._begun = True
            return self._open("{", "}"), 1
        if self._closers and char == self._closers[-1] and at in (_At.KEY, _At.ITEM, _At.NEXT):
            return self._close(), 1
        if at in (_At.VALUE, _At.ITEM):
            return self._value(char), 1
        if at is _At.KEY and char == '"':
            self._at, self._key = _At.KEY_TEXT, '"'
        elif at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.NEXT and char == ",":
            self._at = _At.KEY if self._closers[-1] == "}" else _At.ITEM
        else:
            self._at = _At.END
        return "", 1

    def _value(self, char: str) -> str:
        if char == '"':
            self._at = _At.TEXT
            return self._lead() + '"'
        if char in "{[" and len(self._closers) < MAX_DEPTH:
            return self._lead() + self._open(char, "}" if char == "{" else "]")
        self._at = _At.END
        return ""

    def _lead(self) -> str:
        """What stands before an element: the comma and the key that waited for it."""
        lead = ("," if self._filled[-1] else "") + (self._key + ":" if self._key else "")
        self._filled[-1], self._key = True, ""
        return lead

    def _open(self, char: str, closer: str) -> str:
        self._closers.append(closer)
        self._filled.append(False)
        self._at = _At.KEY if char == "{" else _At.ITEM
        return char

    def _close(self) -> str:
        self._filled.pop()
        closer = self._closers.pop()
        self._at = _At.NEXT if self._closers else _At.END
        return closer

    def _end_scalar(self) -> str:
        scalar, self._scalar = self._scalar, ""
        number = _NUMBER.fullmatch(scalar) and len(scalar) <= MAX_NUMBER_CHARS
        value = scalar if number else _WORDS.get(scalar)
        self._at = _At.END if value is None else _At.NEXT
        return "" if value is None else self._lead() + value

    # --- inside a string ---

    def _string(self, text: str, position: int) -> tuple[str, int]:
        """What the next part of the string stands for, and where the part after it begins."""
        if self._escape:
            return self._escaped(text[position], position)
        plain = _PLAIN.match(text, position)
        if plain is not None:
            return self._lone() + plain[0], plain.end()
        char = text[position]
        if char == "\\":
            self._escape = char
            return "", position + 1
        if char == '"':
            self._at = _At.COLON if self._at is _At.KEY_TEXT else _At.NEXT
            return self._lone() + '"', position + 1
        return self._lone() + json.dumps(char)[1:-1], position + 1  # a raw line break, tab or the like

    def _escaped(self, char: str, position: int) -> tuple[str, int]:
        escape, self._escape = self._escape + char, ""
        if escape == "\\u" or (len(escape) < 6 and _HEX.match(escape + "0" * (6 - len(escape)))):
            self._escape = escape
            return "", position + 1
        if _HEX.fullmatch(escape):
            return self._unit(escape), position + 1
        if len(escape) == 2 and char in '"\\/bfnrt':
            return self._lone() + escape, position + 1
        # No escape that JSON has: the backslash stands for itself, and `char` for whatever it is.
        return self._lone() + "\\" + escape[:-1], position

    def _unit(self, escape: str) -> str:
        """A UTF-16 unit. Half of a pair is no character, and parsers refuse it."""
        unit = int(escape[2:], 16)
        if 0xDC00 <= unit < 0xE000:
            pair, self._high = (self._high + escape if self._high else _REPLACEMENT), ""
            return pair
        lone = self._lone()
        if 0xD800 <= unit < 0xDC00:
            self._high = escape
            return lone
        return lone + escape

    def _lone(self) -> str:
        """What the first half of a pair becomes when no second half follows."""
        lone, self._high = (_REPLACEMENT if self._high else ""), ""
        return lone


def json_object(text: str) -> str:
    """The same, of a whole text."""
    reader = JsonObject()
    return reader.feed(text) + reader.finish()
