"""Stop strings, found in a stream of text without ever looking back.

The Aho-Corasick automaton of the stop strings: its state is the longest tail of the text that some stop string begins
with, so the state's depth is exactly how much text must be held back, and one character costs O(1) amortised.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopTable:
    """The automaton, immutable and shared by all requests with the same stop strings. State 0 is the empty tail."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]  # the longest stop string that the state ends with
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self.next[state][char]
        self.match[state] = stop

    def _link(self) -> None:
        pending = deque(self.next[0].values())
        while pending:  # breadth first: a state's fail link is shallower, so it is complete before it is used
            state = pending.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self.fail[state]]
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                pending.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)


@lru_cache(maxsize=256)
def _table(stops: tuple[str, ...]) -> StopTable:
    return StopTable(stops)


class StopMatcher:
    """Passes text through up to the first stop string, which it removes.

    The stop string that is complete first wins, and of those that end at the same character the longest: that is what
    feeding the text one character at a time would find, so the result does not depend on where tokens begin.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.matched: str | None = None
        self._table = _table(stops)
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain to come before any stop string. Nothing may be fed after a match."""
        table, state = self._table, self._state
        for count, char in enumerate(text, 1):
            state = table.step(state, char)
            if (stop := table.match[state]) is not None:
                self.matched = stop
                whole = self._held + text[:count]
                self._held = ""
                return whole[: len(whole) - len(stop)]
        self._state = state
        whole = self._held + text
        certain = len(whole) - table.depth[state]
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """What was held back for a stop string that never became complete."""
        held, self._held, self._state = self._held, "", 0
        return held
