"""Writes GBNF: quoting, repetition of any size, rules with names that do not clash, and the rules of JSON itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_DIGITS = 16
"""Digits of a number that no bound limits: as many as a double can tell apart."""

_PLAIN_REPEATS = 200  # llama.cpp takes 2,000, with a rule for each
_CHUNK = 100
_BRANCHINGS = 40
_ATOM = re.compile(r"[a-zA-Z0-9-]+|\[(?:[^\]\\]|\\.)*\]|\"(?:[^\"\\]|\\.)\"")

HEX = "[0-9a-fA-F]"
PLAIN_CHARS = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
"""What stands for itself in a JSON string."""

# White space is optional, and bounded everywhere: a model that cannot end a document would write it forever.
# Two escapes that make one character count as one; half a pair is not text.
JSON_RULES = {
    "space": r'(" " | "\n" [ \t]{0,20})?',
    "char": r'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" char-code)',
    "char-code": rf"([0-9a-cefA-CEF] {HEX} | [dD] [0-7]) {HEX}{{2}} | char-pair",
    "char-pair": rf'[dD] [89abAB] {HEX}{{2}} "\\u" [dD] [c-fC-F] {HEX}{{2}}',
    "string": r'"\"" char* "\""',
    "integer": '"0" | "-"? positive',
    "number": rf'"-"? ("0" | positive) ("." [0-9]{{1,{MAX_DIGITS}}})? ([eE] [-+]? [0-9]{{1,3}})?',
    "positive": rf"[1-9] [0-9]{{0,{MAX_DIGITS - 1}}}",
    "boolean": '"true" | "false"',
    "null": '"null"',
    "object": r'"{" space (member ("," space member)* space)? "}"',
    "member": r'string ":" space value',
    "array": r'"[" space (value ("," space value)* space)? "]"',
    "value": "object | array | string | number | boolean | null",
}
_USES = {
    "string": ("char",),
    "char": ("char-code",),
    "char-code": ("char-pair",),
    "integer": ("positive",),
    "number": ("positive",),
    "object": ("space", "member"),
    "member": ("string", "space", "value"),
    "array": ("space", "value"),
    "value": ("object", "array", "string", "number", "boolean", "null"),
}


class RuleWriter:
    """The rules of one grammar, in the order in which they were named."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._chunks: dict[str, str] = {}

    def reserve(self, *parts: str) -> str:
        """A new name made of `parts`."""
        wanted = "-".join(filter(None, (re.sub("[^a-zA-Z0-9]+", "-", part).strip("-")[:40] for part in parts)))[-80:]
        wanted = wanted.strip("-") or "rule"
        name, number = wanted, 1
        while name in self._rules or name in JSON_RULES:
            number += 1
            name = f"{wanted}-{number}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def drop(self, name: str) -> None:
        del self._rules[name]

    def add(self, body: str, *parts: str) -> str:
        return self.define(self.reserve(*parts), body)

    def json(self, name: str) -> str:
        """One of `JSON_RULES`, with those that it uses."""
        todo = [name]
        while todo:
            rule = todo.pop()
            if rule not in self._rules:
                self._rules[rule] = JSON_RULES[rule]
                todo += reversed(_USES.get(rule, ()))
        return name

    def repeat(self, item: str, low: int, high: int | None, *parts: str) -> str:
        """`item` from `low` to `high` times; `item` is not optional itself. `parts` name the rules that this takes."""
        if high == 0:
            return '""'
        if (low, high) == (1, 1):
            return item
        if not _ATOM.fullmatch(item):
            item = self.add(item, *parts)
        if max(low, high or 0) <= _PLAIN_REPEATS:
            return item + _bounds(low, high)
        if item not in self._chunks:
            self._chunks[item] = self.add(f"{item}{{{_CHUNK}}}", *parts, "chunk")
        chunk = self._chunks[item]
        many, few = divmod(low, _CHUNK)
        written = [f"{chunk}{{{many}}}"] * bool(many) + [f"{item}{{{few}}}"] * bool(few)
        if high is None:
            written.append(f"{item}*")
        elif high > low:
            chunks = max((high - low) // _CHUNK - 1, 0)
            written += [f"{chunk}{{0,{chunks}}}"] * bool(chunks) + [f"{item}{{0,{high - low - chunks * _CHUNK}}}"]
        return " ".join(written)

    def text(self) -> str:
        return "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())


def _bounds(low: int, high: int | None) -> str:
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return plain.get((low, high)) or (f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}")


def either(options: Sequence[str]) -> str:
    """In parentheses, unless there is one option only."""
    distinct = list(dict.fromkeys(options))
    return distinct[0] if len(distinct) == 1 else "(" + " | ".join(distinct) + ")"


def quoted(text: str) -> str:
    return '"' + "".join(_escaped(ord(char), '"\\') for char in text) + '"'


def char_class(ranges: Iterable[tuple[int, int]]) -> str:
    parts = []
    for low, high in ranges:
        first, last = _escaped(low, "\\[]-^"), _escaped(high, "\\[]-^")
        parts.append(first if low == high else f"{first}-{last}")
    return "[" + "".join(parts) + "]"


def _escaped(code: int, special: str) -> str:
    char = chr(code)
    if char in special and char != "^":
        return "\\" + char
    if 0x20 <= code < 0x7F and char != "^":
        return char
    if code < 0x100:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def one_of(texts: Sequence[str]) -> str:
    """Any of these texts. Common beginnings are shared: the grammar then has few ways to read what has come so far."""
    return _branch(sorted(set(texts)), 0, _BRANCHINGS)


def _branch(texts: Sequence[str], start: int, left: int) -> str:
    """`texts` are sorted, distinct, and equal up to `start`."""
    if len(texts) == 1 or not left:
        return either([quoted(text[start:]) for text in texts])
    end = start
    while end < len(texts[0]) and texts[0][end] == texts[-1][end : end + 1]:
        end += 1
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[end : end + 1], []).append(text)
    options = [_branch(group, end, left - 1) if first else '""' for first, group in groups.items()]
    shared = quoted(texts[0][start:end]) + " " if end > start else ""
    return shared + either(options)
