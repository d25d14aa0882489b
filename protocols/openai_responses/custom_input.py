"""The free text inside a custom tool's arguments, taken out while they still come: `{"input": "te…` -> `te…`."""

from __future__ import annotations

import json
import re

from protocols.openai_responses.tools import CUSTOM_ARGUMENT

_OPENING = re.compile(r'\s*\{\s*"' + CUSTOM_ARGUMENT + r'"\s*:\s*"')
_LONGEST_OPENING = 64
"""Models write a few blanks at most: an opening that is longer is none."""

_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPE_LENGTH = len(r"\ud83d\udc69")
_HEX = re.compile("[0-9a-fA-F]{4}")


class CustomInput:
    """Feed the pieces of the arguments, then `finish()`; what comes out, concatenated, is the tool's input.

    Arguments of another shape are handed out at the end, whole: what a model wrote is never lost.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside: bool | None = None  # None before the string, False behind it or where there is none
        self._found = False

    @property
    def closed(self) -> bool:
        """Whether the string came to its end."""
        return self._found and self._inside is False

    def feed(self, piece: str) -> str:
        if self._inside is False:
            self._held += "" if self._found else piece
            return ""
        self._held += piece
        if self._inside is None:
            opening = _OPENING.match(self._held)
            if opening is None:
                if len(self._held) > _LONGEST_OPENING:
                    self._inside = False
                return ""
            self._inside = self._found = True
            self._held = self._held[opening.end() :]
        return self._unescape(final=False)

    def finish(self) -> str:
        if self._inside:
            return self._unescape(final=True)
        cut = f'{{"{CUSTOM_ARGUMENT}":"'.startswith("".join(self._held.split()))
        return "" if self._found or cut else _other_shape(self._held)

    def _unescape(self, final: bool) -> str:
        out: list[str] = []
        text, at = self._held, 0
        while at < len(text):
            char = text[at]
            if char == '"':
                self._inside = False
                at = len(text)
            elif char != "\\":
                out.append(char)
                at += 1
            elif len(text) - at < _ESCAPE_LENGTH and not _complete(text[at:]):
                at = len(text) if final else at  # half an escape says nothing
                break
            else:
                decoded, length = _escape(text[at : at + _ESCAPE_LENGTH])
                out.append(decoded)
                at += length
        self._held = text[at:]
        return "".join(out)


def _complete(escape: str) -> bool:
    """Whether an escape at the beginning of `escape` can be read without what follows."""
    if len(escape) < 2:
        return False
    if escape[1] != "u":
        return True
    if len(escape) < 6:
        return _HEX.match(escape[2:].ljust(4, "0")) is None
    high = escape[2] in "dD" and escape[3] in "89abAB"
    if not high:
        return True
    # The second half may still come.
    return not r"\u".startswith(escape[6:8]) if len(escape) < 8 else escape[6:8] != r"\u"


def _escape(text: str) -> tuple[str, int]:
    """The character that an escape stands for, and the escape's length. A broken one stands for itself."""
    if len(text) < 2:
        return text, len(text)
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[1]), 2
    if _HEX.match(text, 2) is None:
        return text[:2], 2
    unit = int(text[2:6], 16)
    if 0xD800 <= unit < 0xDC00 and text[6:8] == r"\u" and _HEX.match(text, 8):
        low = int(text[8:12], 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)), 12
    return ("\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit)), 6


def _other_shape(arguments: str) -> str:
    """The only string in an object of one key, however it is called; else the arguments as they are."""
    try:
        match json.loads(arguments):
            case dict() as found if len(found) == 1 and isinstance(value := next(iter(found.values())), str):
                return value.encode(errors="replace").decode()
            case str(value):
                return value.encode(errors="replace").decode()
    except ValueError:
        pass
    return arguments
