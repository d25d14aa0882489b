"""Follows text through a grammar, exactly like llama.cpp does, but never fails on what the grammar forbids.

llama.cpp ends the process when it accepts what its own check let pass but its rules do not (a token that reaches into
a `<token>` from the text before it), and when the rest of a token that triggered a lazy grammar does not fit. It keeps
one stack per way to read the text, and an ambiguous grammar doubles them with each character. This matcher says before
each token what would happen.

Stacks and sets of stacks are interned, and a step from a set by a character is computed once: most text walks known
steps. States are values; they stay good for the matcher that made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from backends.grammar.gbnf_rules import CharSet, Ref, Rules, TokenRef
from protocols.errors import InvalidRequest

MAX_STACKS = 512
_MAX_VISITED = 20_000
_MAX_INTERNED = 200_000
_EMPTY = 0  # the stack with nothing left to match, and the set of no stacks


class State(NamedTuple):
    """Where text stands: a set of stacks, and the bits of a character of which only the first bytes have come."""

    stacks: int
    partial: int = 0
    missing: int = 0


class Matcher:
    """`token_ids` says which token each `<text>` of the grammar is."""

    def __init__(self, rules: Rules, token_ids: Mapping[str, int]) -> None:
        self._rules = rules
        self._symbols = rules.symbols
        self._token_ids = dict(token_ids)
        self._uses_tokens = any(True for _ in rules.tokens)
        self._stack_ids: dict[tuple[int, int], int] = {(-1, -1): _EMPTY}
        self._stacks: list[tuple[int, int]] = [(-1, -1)]  # (position of the top, the stack below)
        self._set_ids: dict[frozenset[int], int] = {frozenset(): _EMPTY}
        self._sets: list[frozenset[int]] = [frozenset()]
        self._steps: dict[tuple[int, int], int] = {}
        self.start = State(self._closure([self._push(start, _EMPTY) for start in rules.starts[rules.root]]))

    def complete(self, state: State) -> bool:
        """Whether the text may end here."""
        return state.missing == 0 and _EMPTY in self._sets[state.stacks]

    def advance(self, state: State, token: int, piece: bytes) -> State | None:
        """The state after `token`, of which `piece` is the text that counts. None: the grammar forbids it here."""
        decoded = _decode(piece, state.partial, state.missing)
        if decoded is None or not piece:
            return None
        chars, partial, missing = decoded
        stacks, by_token = state.stacks, _EMPTY
        if self._uses_tokens:
            stacks, by_token = self._split(state.stacks, token if chars or not missing else -1)
        for char in chars:
            stacks = self._step(stacks, char)
        if missing and not by_token and not self._may_complete(stacks, partial, missing):
            return None
        if by_token:
            stacks = self._intern(self._sets[stacks] | self._sets[by_token])
        return State(stacks, partial, missing) if stacks != _EMPTY else None

    def accepts(self, text: str) -> bool:
        """Whether `text` may be how it begins, whatever the tokens."""
        return self.advance(self.start, -1, text.encode("utf-8", "replace")) is not None

    def renewed(self, state: State) -> tuple[Matcher, State]:
        """`self`, or once it has grown large, another one that knows no more than `state`."""
        if len(self._stacks) + len(self._steps) < _MAX_INTERNED:
            return self, state
        fresh = Matcher(self._rules, self._token_ids)
        stacks = set()
        for stack in self._sets[state.stacks]:
            positions = []
            while stack != _EMPTY:
                position, stack = self._stacks[stack]
                positions.append(position)
            copy = _EMPTY
            for position in reversed(positions):
                copy = fresh._push(position, copy)
            stacks.add(copy)
        return fresh, state._replace(stacks=fresh._intern(frozenset(stacks)))

    def _may_complete(self, stacks: int, partial: int, missing: int) -> bool:
        low = max(partial << 6 * missing, (0, 0x80, 0x800, 0x10000)[missing])
        high = (partial + 1 << 6 * missing) - 1
        tops = (self._top(stack) for stack in self._sets[stacks])
        return low <= high and any(isinstance(top, CharSet) and top.may_match(low, high) for top in tops)

    def _split(self, stacks: int, token: int) -> tuple[int, int]:
        """The stacks that go on by characters, and those that follow because `token` is what they wait for."""
        waiting = {s for s in self._sets[stacks] if isinstance(self._top(s), TokenRef)}
        following = []
        for stack in waiting:
            top = self._top(stack)
            assert isinstance(top, TokenRef)
            wanted = top.token if isinstance(top.token, int) else self._token_ids[top.token]
            if token >= 0 and (wanted == token) is not top.negated:
                position, below = self._stacks[stack]
                following.append(self._push(position + 1, below))
        return self._intern(self._sets[stacks] - waiting), self._closure(following)

    def _step(self, stacks: int, char: int) -> int:
        known = self._steps.get((stacks, char))
        if known is None:
            following = []
            for stack in self._sets[stacks]:
                top = self._top(stack)
                if isinstance(top, CharSet) and top.matches(char):
                    position, below = self._stacks[stack]
                    following.append(self._push(position + 1, below))
            known = self._steps[stacks, char] = self._closure(following)
        return known

    def _top(self, stack: int) -> object:
        return self._symbols[self._stacks[stack][0]] if stack != _EMPTY else None

    def _push(self, position: int, below: int) -> int:
        """A position at the end of its alternate has nothing left to match, and leaves the stack as it is."""
        symbol = self._symbols[position]
        if not isinstance(symbol, (CharSet, Ref, TokenRef)):
            return below
        stack = self._stack_ids.setdefault((position, below), len(self._stacks))
        if stack == len(self._stacks):
            self._stacks.append((position, below))
        return stack

    def _closure(self, stacks: Iterable[int]) -> int:
        """Replaces rules on top of stacks by what they begin with, until characters or tokens are on top."""
        todo = list(stacks)
        seen = set(todo)
        ready = set()
        while todo:
            stack = todo.pop()
            top = self._top(stack)
            if not isinstance(top, Ref):
                ready.add(stack)
                continue
            position, below = self._stacks[stack]
            rest = self._push(position + 1, below)
            for start in self._rules.starts[top.rule]:
                following = self._push(start, rest)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
            if len(seen) > _MAX_VISITED or len(ready) > MAX_STACKS:
                raise InvalidRequest(
                    f"The grammar is too ambiguous: there are more than {MAX_STACKS} ways to read the text so far.",
                    param="grammar",
                )
        return self._intern(frozenset(ready))

    def _intern(self, stacks: frozenset[int]) -> int:
        known = self._set_ids.setdefault(stacks, len(self._sets))
        if known == len(self._sets):
            self._sets.append(stacks)
        return known


def _decode(piece: bytes, partial: int, missing: int) -> tuple[list[int], int, int] | None:
    """The characters that `piece` completes, and what of one is left over. None: it is not UTF-8, or has a NUL."""
    chars = []
    for byte in piece:
        if missing:
            if byte >> 6 != 0b10:
                return None
            partial, missing = partial << 6 | byte & 0x3F, missing - 1
        elif 0 < byte < 0x80:
            partial = byte
        elif 0xC0 <= byte < 0xF8:
            missing = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
            partial = byte & 0x3F >> missing
        else:
            return None
        if not missing:
            chars.append(partial)
    return chars, partial if missing else 0, missing
