"""Finds in generated text what makes a lazy grammar active.

llama.cpp has this too, on C++'s std::regex: it searches all of the text again for each token, overflows the stack after
some ten thousand characters, and ends the process on a pattern that it cannot read. Here every pattern runs as a
simulated automaton that takes each character once, in time that does not depend on the text before it.

Where the text of the grammar begins is decided as llama.cpp does: at the first capture group that is not empty, else
at the match; the leftmost match, and of those the one that backtracking would find first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from backends.grammar import regex_syntax as regex
from protocols.errors import InvalidRequest

MAX_TRIGGERS = 64

TriggerKind = Literal["token", "word", "pattern", "pattern_full"]
_NATIVE_KINDS: dict[int, TriggerKind] = {1: "word", 2: "pattern", 3: "pattern_full"}


class Trigger(msgspec.Struct, frozen=True, omit_defaults=True):
    """`word` and `pattern` are found anywhere, `pattern_full` matches all of the text. `token` is an id."""

    kind: TriggerKind
    value: str = ""
    token: int = -1

    @classmethod
    def of_native(cls, type_: int, value: str) -> Trigger:
        """The element `{"type": …, "value": …}` of `grammar_triggers`. Token triggers are made from words only."""
        if type_ not in _NATIVE_KINDS:
            raise InvalidRequest("Unknown grammar trigger type", param="grammar_triggers")
        return cls(_NATIVE_KINDS[type_], value)

    def compiled(self) -> Program:
        try:
            if self.kind == "word":
                return Program(regex.literal(self.value))
            node = regex.parse(self.value)
        except regex.RegexError as error:
            raise InvalidRequest(
                f"Invalid grammar trigger pattern {self.value[:80]!r}: {error}", param="grammar_triggers"
            ) from error
        if self.kind == "pattern_full":
            node = regex.Seq((regex.Anchor("^"), node, regex.Anchor("$")))
        return Program(node)


class _Save(msgspec.Struct, frozen=True):
    slot: int


class _Split(msgspec.Struct, frozen=True):
    """Goes on at both, and prefers `first`."""

    first: int
    second: int


class _Match(msgspec.Struct, frozen=True):
    pass


Instruction = regex.Chars | regex.Anchor | _Save | _Split | _Match
Thread = tuple[int, tuple[int, ...]]
"""An instruction, and where the match and the groups begin and end: two offsets each, -1 if unknown."""


class Progress(NamedTuple):
    """How far a program is: threads in order of preference, the character before, its end, and a match seen."""

    threads: tuple[Thread, ...] = ()
    previous: int = -1
    offset: int = 0
    found: tuple[int, ...] | None = None


class Program:
    """A pattern as instructions. Immutable; `Progress` is the state of a search."""

    def __init__(self, node: regex.Node) -> None:
        self._code: list[Instruction] = []
        self._slots = 2
        self._emit(node)
        self._code.append(_Match())

    def feed(self, progress: Progress, chars: Sequence[tuple[int, int]]) -> tuple[Progress, int | None]:
        """Takes characters, each with its length in bytes. The offset is where the match starts, if there is one."""
        for char, size in chars:
            progress = self._step(progress, char, size)
        _, at_end = self._run(progress, None)
        found = at_end or progress.found
        if found is None:
            return progress, None
        groups = ((found[slot], found[slot + 1]) for slot in range(2, len(found), 2))
        return progress, next((start for start, end in groups if end > start >= 0), found[0])

    def _step(self, progress: Progress, char: int, size: int) -> Progress:
        running, found = self._run(progress, char)
        threads = []
        for at, offsets in running:
            instruction = self._code[at]
            assert isinstance(instruction, regex.Chars)
            if any(low <= char <= high for low, high in instruction.ranges):
                threads.append((at + 1, offsets))
        return Progress(tuple(threads), char, progress.offset + size, found or progress.found)

    def _run(self, progress: Progress, following: int | None) -> tuple[list[Thread], tuple[int, ...] | None]:
        """Runs all threads up to their next character. Threads that come after a match in preference are dropped."""
        offset = progress.offset
        ready: list[Thread] = []
        seen: set[int] = set()
        todo = list(reversed(progress.threads))
        if progress.found is None:
            todo.insert(0, (0, (offset, *(-1,) * (self._slots - 1))))
        while todo:
            at, offsets = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            match self._code[at]:
                case regex.Chars():
                    ready.append((at, offsets))
                case regex.Anchor(kind):
                    if _holds(kind, progress, following):
                        todo.append((at + 1, offsets))
                case _Save(slot):
                    todo.append((at + 1, (*offsets[:slot], offset, *offsets[slot + 1 :])))
                case _Split(first, second):
                    todo += [(second, offsets), (first, offsets)]
                case _Match():
                    return ready, offsets
        return ready, None

    def _emit(self, node: regex.Node) -> None:
        match node:
            case regex.Seq(items):
                for item in items:
                    self._emit(item)
            case regex.Alt(options):
                ends = []
                for option in options[:-1]:
                    split = self._reserve()
                    self._emit(option)
                    ends.append(self._reserve())
                    self._code[split] = _Split(split + 1, len(self._code))
                self._emit(options[-1])
                for end in ends:
                    self._code[end] = _Split(len(self._code), len(self._code))
            case regex.Repeat(item, low, high, greedy):
                for _ in range(low):
                    self._emit(item)
                if high is None:
                    split = self._reserve()
                    self._emit(item)
                    self._code.append(_Split(split, split))
                    self._code[split] = self._choice(split + 1, len(self._code), greedy)
                else:
                    splits = []
                    for _ in range(high - low):
                        splits.append(self._reserve())
                        self._emit(item)
                    for split in splits:
                        self._code[split] = self._choice(split + 1, len(self._code), greedy)
            case regex.Group(item, index):
                self._slots = max(self._slots, 2 * index + 2)
                self._code.append(_Save(2 * index))
                self._emit(item)
                self._code.append(_Save(2 * index + 1))
            case _:
                self._code.append(node)

    def _reserve(self) -> int:
        self._code.append(_Match())
        return len(self._code) - 1

    @staticmethod
    def _choice(inside: int, after: int, greedy: bool) -> _Split:
        return _Split(inside, after) if greedy else _Split(after, inside)


def _holds(kind: str, progress: Progress, following: int | None) -> bool:
    if kind == "^":
        return progress.offset == 0
    if kind == "$":
        return following is None
    return (_is_word(progress.previous) is not _is_word(following)) is (kind == "b")


def _is_word(char: int | None) -> bool:
    return char is not None and any(low <= char <= high for low, high in regex.WORD)


class Watch(NamedTuple):
    """The search for several triggers in one text. A value: `feed` returns the next one."""

    programs: tuple[Program, ...]
    progress: tuple[Progress, ...]
    pending: bytes = b""

    @classmethod
    def of(cls, triggers: Sequence[Trigger]) -> Watch:
        if len(triggers) > MAX_TRIGGERS:
            raise InvalidRequest(f"More than {MAX_TRIGGERS} grammar triggers.", param="grammar_triggers")
        programs = tuple(trigger.compiled() for trigger in triggers)
        return cls(programs, (Progress(),) * len(programs))

    def feed(self, piece: bytes) -> tuple[Watch, int | None]:
        """Takes the text of one token. The offset, in bytes of all the text, is where the grammar's text begins."""
        chars, pending = _characters(self.pending + piece)
        if not self.programs:
            return self, None
        results = [p.feed(state, chars) for p, state in zip(self.programs, self.progress, strict=True)]
        starts = [start for _, start in results if start is not None]
        return self._replace(progress=tuple(r[0] for r in results), pending=pending), starts[0] if starts else None


def _characters(data: bytes) -> tuple[list[tuple[int, int]], bytes]:
    """Characters with their lengths, and the first bytes of one that is not complete. Wrong bytes count as U+FFFD."""
    chars = []
    start = 0
    while start < len(data):
        lead = data[start]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        part = data[start : start + size]
        try:
            chars.append((ord(part.decode()), size))
        except UnicodeDecodeError:
            tail = part[1:]
            if len(part) < size and all(byte >> 6 == 0b10 for byte in tail) and lead < 0xF8:
                return chars, part
            chars.append((0xFFFD, 1))
            size = 1
        start += size
    return chars, b""
