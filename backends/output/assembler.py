"""Token pieces (bytes) in, text events out: the one place where raw output becomes what a client sees.

A piece may end inside a UTF-8 character and a stop string may span pieces; both are held back here, so that no event
ever carries half a character or part of a stop string. To continue another replica's answer, feed the pieces it already
delivered and drop the events: what is held back then is held back here too.

A token's log-probability travels with the first of its text that is let go, or behind it if it has no text. Of tokens
whose text is cut off by a stop, it is dropped with it.
"""

from __future__ import annotations

import codecs
from collections import deque

from backends.output.indent import IndentLimit
from backends.output.stops import StopMatcher
from protocols.events import Event, TextDelta, TokenLogprob


class Assembler:
    def __init__(self, stop: tuple[str, ...] = (), choice: int = 0, indent: int = 0) -> None:
        """The answer ends before any of `stop`, and where a later line is indented by less than `indent` (if > 0)."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopMatcher(stop) if any(stop) else None
        self._indent = IndentLimit(indent) if indent > 0 else None
        self._choice = choice
        # Only where there are probabilities: how much text came in and went out, and who waits for which of it.
        self._decoded = self._emitted = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer. Once set, nothing may be fed any more."""
        return self._stops.matched if self._stops is not None and not self.outdented else None

    @property
    def outdented(self) -> bool:
        """Whether a line that is indented too little ended the answer. Once true, nothing may be fed any more."""
        return self._indent is not None and self._indent.reached

    def feed(self, piece: bytes, logprob: TokenLogprob | None = None) -> list[Event]:
        text = self._decoder.decode(piece)
        if logprob is not None:
            self._waiting.append((self._decoded, logprob))
        self._decoded += len(text)
        return self._events(self._through(text))

    def finish(self) -> list[Event]:
        """The answer ended by itself or by its budget: what was held back is text; half a character is U+FFFD."""
        if self.stop_sequence is not None or self.outdented:
            return self._events("")
        text = self._through(self._decoder.decode(b"", final=True))
        if self._stops is not None and self._stops.matched is None and not self.outdented:
            rest = self._stops.finish()
            text += self._indent.feed(rest) if self._indent is not None else rest
        if self.stop_sequence is None and not self.outdented:
            self._emitted = self._decoded + 1  # nothing is cut off: whoever still waits has no text
        return self._events(text)

    def _through(self, text: str) -> str:
        if self._stops is not None:
            text = self._stops.feed(text)
        if self._indent is not None:
            text = self._indent.feed(text)
        return text

    def _events(self, text: str) -> list[Event]:
        self._emitted += len(text)
        if not self._waiting:
            return [TextDelta(text, choice=self._choice)] if text else []
        ready = []
        while self._waiting and self._waiting[0][0] < self._emitted:
            ready.append(self._waiting.popleft()[1])
        return [TextDelta(text, tuple(ready), self._choice)] if text or ready else []
