"""GBNF, llama.cpp's grammar notation: read and checked here, before llama.cpp itself sees a grammar.

llama.cpp refuses a syntax error cleanly, but copies the whole grammar to stderr; and some grammars that it takes end
the process or never return. `parse` refuses all of these, with a message that says where:

| grammar                                                      | llama.cpp on its own                   |
|--------------------------------------------------------------|----------------------------------------|
| parentheses nested very deep, a long chain of rules          | stack overflow                         |
| `"a"{5,2}`                                                   | counts from 5 up to 2, until no memory |
| `r1 ::= r2 \\| r2`, `r2 ::= r3 \\| r3`, …                      | 2^n steps in its own check             |
| left recursion behind rules that may be empty                | an endless stack                       |
| a rule that can neither end nor begin, such as `a ::= e a`   | an assertion                           |

The result is the grammar with its repetitions and groups unfolded into plain rules, the way llama.cpp unfolds them.
"""

from __future__ import annotations

import string
from functools import lru_cache

from backends.grammar.gbnf_rules import (
    ANY_CHAR,
    MAX_ELEMENTS,
    Alternate,
    CharSet,
    Ref,
    Rules,
    TokenRef,
    check,
    flatten,
    invalid,
)
from protocols.errors import InvalidRequest

MAX_BYTES = 256 * 1024
MAX_NESTING = 100
MAX_REPEATS = 2_000
"""llama.cpp's own: above it, `{m,n}` loses its upper bound without a word, and a product of repetitions is refused."""

_NAME = frozenset(string.ascii_letters + string.digits + "-")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_END_OF_TEXT = "\0"


@lru_cache(maxsize=8)  # a large one takes some 20 MB
def parse(text: str) -> Rules:
    """`InvalidRequest` if the grammar is wrong, or larger or more tangled than llama.cpp can bear."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise invalid(f"it has more than {MAX_BYTES} bytes")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise invalid("it contains a character that cannot be part of text (NUL or a lone surrogate)")
    parser = _Parser(text)
    parser.run()
    names = list(parser.ids)
    rules: list[list[Alternate]] = []
    for name, rule in parser.ids.items():
        if rule not in parser.rules:
            raise invalid(f"the rule '{name}' is used but not defined")
        rules.append(parser.rules[rule])
    if "root" not in parser.ids:
        raise invalid("there is no rule 'root'")
    return flatten(names, rules, parser.ids["root"], check(names, rules))


class _Parser:
    """Recursive descent over the text; unfolds while it reads, and counts like llama.cpp counts."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._elements = 0
        self.ids: dict[str, int] = {}
        self.rules: dict[int, list[Alternate]] = {}

    def run(self) -> None:
        self._space(newlines=True)
        while self._pos < len(self._text):
            name = self._name()
            rule = self._id(name)
            self._space(newlines=False)
            if not self._text.startswith("::=", self._pos):
                raise self._error("expected '::=' (names of rules are letters, digits and '-')")
            self._pos += 3
            self._space(newlines=True)
            self._alternates(name, rule, nesting=0)
            if self._peek() not in "\r\n" and self._pos < len(self._text):
                raise self._error(f"unexpected {self._peek()!r}")
            self._space(newlines=True)

    def _error(self, why: str) -> InvalidRequest:
        before = self._text[: self._pos]
        column = self._pos - (before.rfind("\n") + 1) + 1
        return invalid(f"line {before.count(chr(10)) + 1}, column {column}: {why}")

    def _peek(self) -> str:
        return self._text[self._pos] if self._pos < len(self._text) else _END_OF_TEXT

    def _take(self) -> str:
        char = self._peek()
        if char == _END_OF_TEXT:
            raise self._error("unexpected end of the grammar")
        self._pos += 1
        return char

    def _space(self, newlines: bool) -> None:
        while (char := self._peek()) in (" \t#\r\n" if newlines else " \t#"):
            if char == "#":
                while self._peek() not in "\r\n" + _END_OF_TEXT:
                    self._pos += 1
            else:
                self._pos += 1

    def _id(self, name: str) -> int:
        return self.ids.setdefault(name, len(self.ids))

    def _generated(self, name: str) -> int:
        return self._id(f"{name}_{len(self.ids)}")

    def _name(self) -> str:
        start = self._pos
        while self._peek() in _NAME:
            self._pos += 1
        if start == self._pos:
            raise self._error(f"expected the name of a rule, got {self._peek()!r}")
        return self._text[start : self._pos]

    def _int(self) -> int:
        start = self._pos
        while self._peek() in string.digits:
            self._pos += 1
        if not 1 <= self._pos - start <= 9:
            raise self._error("expected a number of at most 9 digits")
        return int(self._text[start : self._pos])

    def _char(self) -> int:
        char = self._take()
        if char != "\\":
            return ord(char)
        escape = self._take()
        if escape in _ESCAPES:
            return ord(_ESCAPES[escape])
        if escape not in _HEX_DIGITS:
            raise self._error(f"unknown escape '\\{escape}'")
        digits = self._text[self._pos : self._pos + _HEX_DIGITS[escape]]
        if len(digits) < _HEX_DIGITS[escape] or not set(digits) <= set(string.hexdigits):
            raise self._error(f"'\\{escape}' takes {_HEX_DIGITS[escape]} hexadecimal digits")
        self._pos += len(digits)
        return int(digits, 16)

    def _class(self) -> CharSet:
        negated = self._peek() == "^"
        self._pos += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._char()
            if self._peek() == "-" and self._text[self._pos + 1 : self._pos + 2] != "]":
                self._pos += 1
                last = self._char()
            if last < first:
                raise self._error("a range of characters runs backwards")
            ranges.append((first, last))
        self._pos += 1
        if not ranges:
            raise self._error("a class of characters is empty")
        return CharSet(tuple(ranges), negated)

    def _token(self) -> TokenRef:
        negated = self._peek() == "!"
        self._pos += negated
        if self._take() != "<":
            raise self._error("expected '<'")
        if self._peek() == "[":
            self._pos += 1
            token = self._int()
            if self._take() + self._take() != "]>":
                raise self._error("expected ']>'")
            return TokenRef(token, negated)
        start = self._pos - 1
        while self._take() != ">":
            pass
        return TokenRef(self._text[start : self._pos], negated)

    def _alternates(self, name: str, rule: int, nesting: int) -> None:
        if nesting > MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} nested parentheses")
        alternates = [self._sequence(name, nesting)]
        while self._peek() == "|":
            self._pos += 1
            self._space(newlines=True)
            alternates.append(self._sequence(name, nesting))
        self.rules[rule] = alternates

    def _sequence(self, name: str, nesting: int) -> Alternate:
        sequence: Alternate = []
        last = 0  # where the item begins that a repetition applies to
        weight = 1  # what llama.cpp reckons that item to cost, in rules
        while True:
            match self._peek():
                case '"':
                    self._pos += 1
                    last, weight = len(sequence), 1
                    while self._peek() != '"':
                        char = self._char()
                        sequence.append(CharSet(((char, char),)))
                    self._pos += 1
                case "[":
                    self._pos += 1
                    last, weight = len(sequence), 1
                    sequence.append(self._class())
                case "<" | "!":
                    last, weight = len(sequence), 1
                    sequence.append(self._token())
                case ".":
                    self._pos += 1
                    last, weight = len(sequence), 1
                    sequence.append(ANY_CHAR)
                case "(":
                    self._pos += 1
                    self._space(newlines=True)
                    before = len(self.ids)
                    group = self._generated(name)
                    self._alternates(name, group, nesting + 1)
                    last, weight = len(sequence), max(1, len(self.ids) - before)
                    sequence.append(Ref(group))
                    if self._peek() != ")":
                        raise self._error("expected ')'")
                    self._pos += 1
                case "*" | "+" | "?" | "{":
                    low, high = self._bounds()
                    weight *= self._repeat(sequence, last, name, low, high, weight)
                case char if char in _NAME:
                    last, weight = len(sequence), 1
                    sequence.append(Ref(self._id(self._name())))
                case _:
                    return sequence
            self._count(sequence[last:])
            self._space(newlines=nesting > 0)

    def _bounds(self) -> tuple[int, int | None]:
        mark = self._take()
        if mark != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[mark]
        self._space(newlines=False)
        low = self._int()
        self._space(newlines=False)
        high: int | None = low
        if self._peek() == ",":
            self._pos += 1
            self._space(newlines=False)
            high = self._int() if self._peek() in string.digits else None
            self._space(newlines=False)
        if self._take() != "}":
            raise self._error("expected '}'")
        if max(low, high or 0) > MAX_REPEATS:
            raise self._error(f"more than {MAX_REPEATS} repetitions")
        if high is not None and high < low:
            raise self._error(f"{{{low},{high}}} asks for at least {low} and at most {high} repetitions")
        return low, high

    def _repeat(self, sequence: Alternate, last: int, name: str, low: int, high: int | None, weight: int) -> int:
        """Unfolds `item{low,high}`, where item is `sequence[last:]`. Returns the factor by which it costs more."""
        item = sequence[last:]
        if not item:
            raise self._error("nothing to repeat")
        factor = high or low or 1
        if weight * factor > MAX_REPEATS:
            raise self._error(f"nested repetitions multiply to more than {MAX_REPEATS}")
        self._count(item, (high or low) + 1)
        del sequence[last:]
        sequence += item * low
        if high is None:
            loop = self._generated(name)
            self.rules[loop] = [[*item, Ref(loop)], []]
            sequence.append(Ref(loop))
        elif high > low:
            rest: Alternate = []
            for _ in range(high - low):
                rule = self._generated(name)
                self.rules[rule] = [[*item, *rest], []]
                rest = [Ref(rule)]
            sequence += rest
        return factor

    def _count(self, item: Alternate, times: int = 1) -> None:
        size = sum(2 * len(symbol.ranges) if isinstance(symbol, CharSet) else 1 for symbol in item)
        self._elements += size * times
        if self._elements > MAX_ELEMENTS:
            raise self._error(f"the grammar unfolds to more than {MAX_ELEMENTS} elements")
