"""Token pieces (bytes) in, text events out: the one place where raw output becomes what a client sees.

A piece may end inside a UTF-8 character and a stop string may span pieces; both are held back here, so that no event
ever carries half a character or part of a stop string. To continue another replica's answer, feed the pieces it already
delivered and drop the events: what is held back then is held back here too.
"""

from __future__ import annotations

import codecs

from backends.output.stops import StopMatcher
from protocols.events import Event, TextDelta


class Assembler:
    def __init__(self, stop: tuple[str, ...] = (), choice: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopMatcher(stop) if any(stop) else None
        self._choice = choice

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer. Once set, nothing may be fed any more."""
        return self._stops.matched if self._stops is not None else None

    def feed(self, piece: bytes) -> list[Event]:
        return self._events(self._through_stops(self._decoder.decode(piece)))

    def finish(self) -> list[Event]:
        """The answer ended by itself or by its budget: what was held back is text; half a character is U+FFFD."""
        if self.stop_sequence is not None:
            return []
        text = self._through_stops(self._decoder.decode(b"", final=True))
        if self._stops is not None and self._stops.matched is None:
            text += self._stops.finish()
        return self._events(text)

    def _through_stops(self, text: str) -> str:
        return self._stops.feed(text) if self._stops is not None else text

    def _events(self, text: str) -> list[Event]:
        return [TextDelta(text, choice=self._choice)] if text else []
