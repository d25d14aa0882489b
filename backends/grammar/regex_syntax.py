r"""The regular expressions we take, in JSON schemas (`pattern`) and as triggers of grammars: a part of ECMAScript's.

Taken: literals; `.` (all but line ends); classes `[a-z]`, `[^…]`; `\d \D \w \W \s \S` (ASCII); `\t \n \r \f \v \0`,
`\cX`, `\xHH`, `\uHHHH`, a backslash before punctuation; `^ $ \b \B`; `|`; `(…)`, `(?:…)`; `* + ? {m} {m,} {m,n}` and
their lazy forms.

Refused: lookaround, backreferences, named groups, inline flags, `\p{…}`, POSIX classes such as `[:alpha:]`, a stray
`{`, `}` or `]`, a repetition of nothing or of another repetition. What is refused would either not be regular, or end
the process in C++'s std::regex, or mean different things to different engines.
"""

from __future__ import annotations

import string

import msgspec

MAX_LENGTH = 8_192
MAX_NESTING = 40
MAX_REPEATS = 2_000
MAX_UNFOLDED = 20_000

Ranges = tuple[tuple[int, int], ...]
"""Code points, both ends included, ascending and apart."""


class Chars(msgspec.Struct, frozen=True):
    """One character out of `ranges`."""

    ranges: Ranges


class Anchor(msgspec.Struct, frozen=True):
    """`^`, `$`, `b` (a word boundary) or `B`."""

    kind: str


class Seq(msgspec.Struct, frozen=True):
    items: tuple[Node, ...]


class Alt(msgspec.Struct, frozen=True):
    options: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True):
    item: Node
    low: int
    high: int | None
    greedy: bool = True


class Group(msgspec.Struct, frozen=True):
    """`index` counts the capturing groups from 1."""

    item: Node
    index: int


Node = Chars | Anchor | Seq | Alt | Repeat | Group

EMPTY = Seq(())
_LAST = 0x10FFFF
_DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROL = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class RegexError(ValueError):
    """The pattern is wrong, or not among those we take. The message says where and why."""


def union(ranges: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    gaps, start = [], 0
    for low, high in union(ranges):
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return (*gaps, (start, _LAST)) if start <= _LAST else tuple(gaps)


_CLASSES = {
    "d": _DIGIT,
    "D": complement(_DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": _SPACE,
    "S": complement(_SPACE),
}


def parse(pattern: str) -> Node:
    if len(pattern) > MAX_LENGTH:
        raise RegexError(f"it is longer than {MAX_LENGTH} characters")
    parser = _Parser(pattern)
    node = parser.alternatives(0)
    if parser.pos < len(pattern):
        raise parser.error("a ')' without a '('")
    if unfolded_size(node) > MAX_UNFOLDED:
        raise RegexError(f"it unfolds to more than {MAX_UNFOLDED} characters")
    return node


def literal(text: str) -> Node:
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def length_bounds(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters that it matches; None: no limit."""
    match node:
        case Chars():
            return 1, 1
        case Anchor():
            return 0, 0
        case Group(item):
            return length_bounds(item)
        case Repeat(item, low, high):
            fewest, most = length_bounds(item)
            if most == 0:
                return 0, 0
            return fewest * low, None if most is None or high is None else most * high
        case Seq(parts) | Alt(parts):
            pairs = [length_bounds(part) for part in parts]
            fewests, mosts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            limits = [most for most in mosts if most is not None]
            if isinstance(node, Seq):
                return sum(fewests), sum(limits) if len(limits) == len(mosts) else None
            return min(fewests), max(limits) if len(limits) == len(mosts) else None


def unfolded_size(node: Node) -> int:
    match node:
        case Group(item):
            return unfolded_size(item) + 2
        case Repeat(item, low, high):
            return (unfolded_size(item) + 1) * max(low + 1 if high is None else high, 1)
        case Seq(parts) | Alt(parts):
            return 1 + sum(map(unfolded_size, parts))
    return 1


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self._groups = 0

    def error(self, why: str) -> RegexError:
        return RegexError(f"at character {self.pos + 1}: {why}")

    def _peek(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def _take(self) -> str:
        if not (char := self._peek()):
            raise self.error("it ends too early")
        self.pos += 1
        return char

    def alternatives(self, nesting: int) -> Node:
        if nesting > MAX_NESTING:
            raise self.error(f"more than {MAX_NESTING} nested parentheses")
        options = [self._sequence(nesting)]
        while self._peek() == "|":
            self.pos += 1
            options.append(self._sequence(nesting))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, nesting: int) -> Node:
        items: list[Node] = []
        while (char := self._peek()) and char not in "|)":
            item = self._atom(nesting)
            if self._peek() and self._peek() in "*+?{":
                if isinstance(item, Anchor):
                    raise self.error("a repetition of an anchor")
                item = self._repeat(item)
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _atom(self, nesting: int) -> Node:
        char = self._take()
        match char:
            case "^" | "$":
                return Anchor(char)
            case ".":
                return Chars(complement(_LINE_ENDS))
            case "[":
                return self._class()
            case "(":
                return self._group(nesting)
            case "\\":
                if self._peek() and self._peek() in "bB":
                    return Anchor(self._take())
                return Chars(self._escape(in_class=False))
            case "*" | "+" | "?" | "{" | "}" | "]":
                self.pos -= 1
                raise self.error(f"a '{char}' that stands for itself is written '\\{char}'")
        return Chars(((ord(char), ord(char)),))

    def _group(self, nesting: int) -> Node:
        index = 0
        if self._peek() == "?":
            if self.text[self.pos : self.pos + 2] != "?:":
                raise self.error("of the groups that begin with '(?', only '(?:' is supported")
            self.pos += 2
        else:
            self._groups += 1
            index = self._groups
        item = self.alternatives(nesting + 1)
        if self._peek() != ")":
            raise self.error("a '(' is never closed")
        self.pos += 1
        return Group(item, index) if index else item

    def _repeat(self, item: Node) -> Node:
        mark = self._take()
        low, high = self._braces() if mark == "{" else _REPEATS[mark]
        greedy = self._peek() != "?"
        self.pos += not greedy
        if self._peek() and self._peek() in "*+?{":
            raise self.error("a repetition of a repetition: put the inner one into '(?:…)'")
        return Repeat(item, low, high, greedy)

    def _braces(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.pos)
        first, comma, last = self.text[self.pos : max(end, self.pos)].partition(",")
        numbers = [number for number in (first, last) if number]
        if not first or not all(set(number) <= set(string.digits) and len(number) <= 6 for number in numbers):
            raise self.error("expected {m}, {m,} or {m,n}; a '{' that stands for itself is written '\\{'")
        low = int(first)
        high = int(last) if last else None if comma else low
        if high is not None and high < low:
            raise self.error(f"{{{low},{high}}} asks for at least {low} and at most {high} repetitions")
        if max(low, high or 0) > MAX_REPEATS:
            raise self.error(f"more than {MAX_REPEATS} repetitions")
        self.pos = end + 1
        return low, high

    def _class(self) -> Node:
        negated = self._peek() == "^"
        self.pos += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            first = self._class_part()
            if self._peek() == "-" and self.text[self.pos + 1 : self.pos + 2] not in ("]", ""):
                self.pos += 1
                last = self._class_part()
                if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
                    raise self.error("a range between classes of characters")
                if last[0][0] < first[0][0]:
                    raise self.error("a range of characters runs backwards")
                ranges.append((first[0][0], last[0][0]))
            else:
                ranges += first
        self.pos += 1
        chosen = complement(tuple(ranges)) if negated else union(tuple(ranges))
        if not ranges or not chosen:
            raise self.error("a class of characters that matches nothing, or everything: write '[\\s\\S]' for any")
        return Chars(chosen)

    def _class_part(self) -> Ranges:
        char = self._take()
        if char == "\\":
            return self._escape(in_class=True)
        if char == "[" and self._peek() and self._peek() in ":.=":
            raise self.error("POSIX classes are not supported")
        return ((ord(char), ord(char)),)

    def _escape(self, in_class: bool) -> Ranges:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROL or (in_class and char == "b"):
            if char == "0" and self._peek() and self._peek() in string.digits:
                raise self.error("octal escapes are not supported")
            code = _CONTROL.get(char, 0x08)
        elif char in ("x", "u"):
            size = 2 if char == "x" else 4
            digits = self.text[self.pos : self.pos + size]
            if len(digits) < size or not set(digits) <= set(string.hexdigits):
                raise self.error(f"'\\{char}' takes {size} hexadecimal digits")
            self.pos += size
            code = int(digits, 16)
            if 0xD800 <= code <= 0xDFFF:
                raise self.error("half of a surrogate pair: write the character itself")
        elif char == "c":
            letter = self._take()
            if letter not in string.ascii_letters:
                raise self.error("'\\c' takes a letter")
            code = ord(letter) % 32
        elif char.isascii() and char.isalnum():
            why = "backreferences are not supported" if char in string.digits else f"unknown escape '\\{char}'"
            raise self.error(why)
        else:
            code = ord(char)
        return ((code, code),)
