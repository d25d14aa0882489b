"""How long a model thinks, and where a grammar begins behind it: the thinking at the beginning of an answer, token by
token.

The end of the thinking is forced once its budget is used up, as llama.cpp does: the tokens of the end mark come in
place of what was drawn, but not in the middle of a character, nor while the model itself may be writing the mark.
A grammar says nothing about the thinking. One that the whole answer must follow begins behind it, and up to two line
breaks there; until then the answer cannot end, and so the thinking ends where the model would end the answer.

Only thinking that the prompt has opened, or that the answer begins with, is told apart: behind text or a call, the same
marks may be part of what is said.
"""

from __future__ import annotations

import codecs
from enum import Enum, auto

import msgspec

from backends.llamacpp.bindings import Model
from backends.output.selection import ParserSpec
from backends.output.stops import StopTable
from protocols.request import ChatPrompt, GbnfConstraint, Request

_LINE_BREAKS = 2


class ThinkingSpec(msgspec.Struct, frozen=True):
    """`open`: the prompt has opened the thinking. `budget` is in tokens, None without limit; `close` ends it."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    open: bool
    budget: int | None
    close: tuple[int, ...]


def thinking_spec(model: Model, request: Request, parser: ParserSpec | None) -> ThinkingSpec | None:
    """None where nothing depends on whether the model thinks. `request` has the constraint of its tools."""
    reasoning = None if parser is None else parser.formats.reasoning
    if parser is None or reasoning is None or not isinstance(request.prompt, ChatPrompt):
        return None
    budget, constraint = request.prompt.reasoning.budget_tokens, request.constraint
    if constraint is None and budget is None:
        return None
    lazy = isinstance(constraint, GbnfConstraint) and constraint.lazy
    if constraint is not None and not (lazy or parser.thinking):
        return None  # the grammar governs the answer from its first token on
    close = tuple(model.tokenize(reasoning.ends[0], add_special=False, parse_special=True).tolist())
    if not close or model.end_tokens & set(close):
        return None
    return ThinkingSpec(reasoning.begins, reasoning.ends, parser.thinking, budget, close)


class _Stage(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()  # the end mark has just come
    OVER = auto()


class Thinking:
    """Told of every token of an answer (`accept`), says where it is."""

    def __init__(self, model: Model, spec: ThinkingSpec) -> None:
        self._model = model
        self._spec = spec
        self._stage = _Stage.INSIDE if spec.open else _Stage.BEFORE
        self._head = ""  # of an answer that may begin with thinking
        self._ends = StopTable(spec.ends)
        self._state = 0
        self._tokens = 0
        self._line_breaks = 0
        self._closing: list[int] | None = None  # what is left of the end that is forced
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def inside(self) -> bool:
        return self._stage is _Stage.INSIDE

    @property
    def forced(self) -> int | None:
        """The token that must come next, if one must."""
        if self._stage is not _Stage.INSIDE:
            return None
        if self._closing is None and self._is_used_up():
            self.close()
        return self._closing[0] if self._closing else None

    def close(self) -> None:
        """The thinking ends here."""
        if self._closing is None:
            self._closing = list(self._spec.close)

    def _is_used_up(self) -> bool:
        if self._spec.budget is None or self._tokens < self._spec.budget:
            return False
        return not self._decoder.getstate()[0] and not self._ends.depth[self._state]

    def goes_on(self, token: int) -> bool:
        """Whether `token` ends the thinking and has text behind the end, but for line breaks."""
        state, text = self._state, self._model.special_piece(token).decode("utf-8", "replace")
        for at, char in enumerate(text, 1):
            state = self._ends.step(state, char)
            if self._ends.match[state] is not None:
                return bool(text[at:].strip())
        return False

    def breaks_line(self, token: int) -> bool:
        """Whether `token` is a line break between the thinking and the rest."""
        piece = self._model.special_piece(token)
        few = self._line_breaks + len(piece) <= _LINE_BREAKS
        return self._stage is _Stage.BEHIND and few and not piece.strip(b"\n") and bool(piece)

    def accept(self, token: int) -> None:
        if self._stage is _Stage.OVER:
            return
        if self._stage is _Stage.BEHIND:
            if self.breaks_line(token):
                self._line_breaks += len(self._model.special_piece(token))
            else:
                self._stage = _Stage.OVER
            return
        was_inside = self.inside
        for char in self._decoder.decode(self._model.special_piece(token)):
            self._step(char)
        if was_inside and self.inside:
            self._tokens += 1
            if self._closing:
                del self._closing[0]

    def _step(self, char: str) -> None:
        match self._stage:
            case _Stage.BEFORE:
                self._head = (self._head + char).lstrip()
                if self._head in self._spec.begins:
                    self._stage = _Stage.INSIDE
                elif not any(begin.startswith(self._head) for begin in self._spec.begins):
                    self._stage = _Stage.OVER
            case _Stage.INSIDE:
                self._state = self._ends.step(self._state, char)
                if self._ends.match[self._state] is not None:
                    self._stage = _Stage.BEHIND
            case _Stage.BEHIND if char == "\n":
                self._line_breaks += 1
            case _:
                self._stage = _Stage.OVER
