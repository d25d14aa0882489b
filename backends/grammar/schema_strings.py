r"""JSON strings that match a pattern, have a format or a length, or are none of some names, as GBNF.

What a pattern matches is written as JSON text: `"`, `\` and control characters by their shortest escape, all others as
themselves. A pattern that is not anchored is found anywhere, as JSON schema has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from backends.grammar import regex_syntax as regex
from backends.grammar.schema_rules import PLAIN_CHARS, RuleWriter, char_class, either, quoted

_DATE = r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d))"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"T(?:\d{1,9}H(?:\d{1,9}M)?(?:\d{1,9}S)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_DAYS = r"(?:\d{1,9}Y(?:\d{1,9}M)?(?:\d{1,9}D)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]\d|\d)"
_HEX4 = r"[0-9a-fA-F]{1,4}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,64}"

_IPV6 = "|".join(
    [
        rf"(?:{_HEX4}:){{7}}{_HEX4}",
        rf"(?:{_HEX4}:){{1,7}}:",
        *(rf"(?:{_HEX4}:){{1,{7 - n}}}(?::{_HEX4}){{{n}}}" for n in range(1, 7)),
        rf":(?::{_HEX4}){{1,7}}",
        "::",
    ]
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|\d{{1,9}}W)",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": _IPV6,
    "email": rf"{_ATEXT}(?:\.{_ATEXT}){{0,8}}@{_LABEL}(?:\.{_LABEL}){{1,8}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,8}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,31}:[A-Za-z0-9!#$%&'()*+,./:;=?@\[\]_~-]{1,2000}",
}
"""As regular expressions, which match all of the string. JSON schema takes other formats as a comment; so do we."""

MAX_OPTIONAL = 20
_COMPARED = 64
"""Characters of a name. Another name that is equal so far is not written at all."""

_ESCAPES = {ord(char): json.dumps(char)[1:-1] for char in '"\\\b\f\n\r\t'}
_ESCAPED = tuple((code, _ESCAPES.get(code, f"\\u{code:04x}")) for code in (*range(0x20), 0x22, 0x5C))


def json_text(value: object) -> str:
    """Compact, and characters as themselves, but for halves of surrogate pairs: they have no UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def with_length(rules: RuleWriter, low: int, high: int | None) -> str:
    if (low, high) == (0, None):
        return rules.json("string")
    return rf'"\"" {rules.repeat(rules.json("char"), low, high, "chars")} "\""'


def matching(rules: RuleWriter, pattern: str, low: int, high: int | None, whole: bool, *parts: str) -> str:
    """`RegexError` for a pattern that we do not take, or that leaves the length to be checked besides."""
    options = []
    for begins, node, ends in _unanchored(regex.parse(pattern), whole, whole):
        fewest, most = regex.length_bounds(node)
        longest = most if begins and ends else None
        if fewest < low or (high is not None and (longest is None or longest > high)):
            raise regex.RegexError(
                "together with minLength or maxLength it has to imply that length itself, such as ^[a-z]{1,8}$"
            )
        any_text = rules.json("char") + "*"
        body = _Pattern(rules, parts).text(node) or '""'
        options.append(" ".join(filter(None, ("" if begins else any_text, body, "" if ends else any_text))))
    return rf'"\"" {either(options)} "\""'


def _unanchored(node: regex.Node, begins: bool, ends: bool) -> list[tuple[bool, regex.Node, bool]]:
    """The alternatives of a pattern without its anchors; whether each is bound to the begin, and to the end."""
    match node:
        case regex.Alt(options):
            return [found for option in options for found in _unanchored(option, begins, ends)]
        case regex.Group(item):
            return _unanchored(item, begins, ends)
        case regex.Seq(items) if items:
            if begins_here := items[0] == regex.Anchor("^"):
                items = items[1:]
            if ends_here := bool(items) and items[-1] == regex.Anchor("$"):
                items = items[:-1]
            if len(items) == 1 and isinstance(items[0], (regex.Alt, regex.Group)):
                return _unanchored(items[0], begins or begins_here, ends or ends_here)
            return [(begins or begins_here, regex.Seq(items), ends or ends_here)]
        case regex.Anchor("^"):
            return [(True, regex.EMPTY, ends)]
        case regex.Anchor("$"):
            return [(begins, regex.EMPTY, True)]
    return [(begins, node, ends)]


class _Pattern:
    def __init__(self, rules: RuleWriter, parts: Sequence[str]) -> None:
        self._rules = rules
        self._parts = parts

    def text(self, node: regex.Node) -> str:
        """An empty text for a node that matches nothing but the empty one."""
        match node:
            case regex.Chars(ranges):
                return self._chars(ranges)
            case regex.Anchor(kind):
                sign = kind if kind in "^$" else f"\\{kind}"
                raise regex.RegexError(f"'{sign}' is supported at the begin or the end only")
            case regex.Group(item):
                return self.text(item)
            case regex.Seq(items):
                return " ".join(filter(None, map(self.text, items)))
            case regex.Alt(options):
                return either([self.text(option) or '""' for option in options])
            case regex.Repeat(item, low, high):
                if regex.length_bounds(item)[1] == 0 or high == 0:
                    return ""
                if regex.length_bounds(item)[0] == 0:  # GBNF has no repetition of what may be empty
                    item, low = _not_empty(item), 0
                return self._rules.repeat(self.text(item), low, high, *self._parts, "part")

    def _chars(self, ranges: regex.Ranges) -> str:
        plain = [
            (max(low, first), min(high, last))
            for low, high in ranges
            for first, last in PLAIN_CHARS
            if max(low, first) <= min(high, last)
        ]
        escaped = [text for code, text in _ESCAPED if any(low <= code <= high for low, high in ranges)]
        options = [char_class(plain)] if plain else []
        options += [quoted(text) for text in escaped]
        if not options:
            raise regex.RegexError("a class of characters that no text has")
        return self._rules.add(either(options), "chars") if len(options) > 2 else either(options)


def _not_empty(node: regex.Node) -> regex.Node:
    """Matches the same texts but the empty one."""
    match node:
        case regex.Group(item):
            return _not_empty(item)
        case regex.Repeat(item, low, high):
            if regex.length_bounds(item)[0] == 0:
                return regex.Repeat(_not_empty(item), 1, high)
            return regex.Repeat(item, max(low, 1), high)
        case regex.Alt(options):
            return regex.Alt(tuple(_not_empty(option) for option in options if regex.length_bounds(option)[1] != 0))
        case regex.Seq(items):
            if any(regex.length_bounds(item)[0] for item in items):
                return node
            items = tuple(item for item in items if regex.length_bounds(item)[1] != 0)
            if len(items) > MAX_OPTIONAL:
                raise regex.RegexError(f"a repetition of more than {MAX_OPTIONAL} optional parts")
            # The first that is not empty, and whatever follows.
            return regex.Alt(tuple(regex.Seq((_not_empty(item), *items[i + 1 :])) for i, item in enumerate(items)))
    return node


def none_of(rules: RuleWriter, names: Sequence[str]) -> str:
    """Any string but these: it leaves each of them at some character, is shorter, or goes on after it."""
    body = _other_text(rules, sorted({json_text(name)[1:-1] for name in names}), 0, _COMPARED)
    return rf'"\"" {body} "\""'


def _other_text(rules: RuleWriter, texts: list[str], start: int, left: int) -> str:
    """`texts` are equal up to `start`, where one of them may end. `left` characters are still compared."""
    groups: dict[str, list[str]] = {}
    ends = False
    for text in texts:
        if start == len(text):
            ends = True
        else:
            groups.setdefault(_character(text, start), []).append(text)
    codes = tuple((code, code) for code in (ord(json.loads(f'"{char}"')) for char in groups))
    free = regex.complement((*codes, (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)))
    rest = rules.json("char") + "*"
    options = [f"{char_class(free)} {rest}"] if free else []
    # Before the text has left all names, only the shortest escapes are written: the others are names in disguise.
    options += [f"{quoted(text)} {rest}" for code, text in _ESCAPED if len(text) == 2 and text not in groups]
    for char, members in groups.items() if left else ():
        options.append(f"{quoted(char)} {_other_text(rules, members, start + len(char), left - 1)}")
    if not ends:
        options.append('""')
    return rules.add(either(options), "other-key")


def _character(text: str, start: int) -> str:
    if text[start] != "\\":
        return text[start]
    return text[start : start + (6 if text[start + 1] == "u" else 2)]
