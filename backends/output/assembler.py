"""Token pieces (bytes) in, events out: the one place where raw output becomes what a client sees.

A piece may end inside a UTF-8 character and a stop string may span pieces; both are held back here, so that no event
ever carries half a character or part of a stop string. To continue another replica's answer, feed the pieces it already
delivered and drop the events: what is held back then is held back here too.

With a `parser`, what is left is taken apart into thinking, text and tool calls. Stop strings end all three alike.

A token's log-probability travels with the first of its text that is let go, or behind it if it has no text. Of tokens
whose text is cut off by a stop, it is dropped with it; and so it is of tokens that become thinking, part of a call or
markup, for only text has a place for it. A token that is both goes with the text.
"""

from __future__ import annotations

import codecs
from itertools import pairwise

import msgspec

from backends.output.indent import IndentLimit
from backends.output.parser import OutputParser
from backends.output.stops import StopMatcher
from protocols.events import Event, FinishReason, ReasoningDelta, TextDelta, TokenLogprob


class Assembler:
    def __init__(
        self, stop: tuple[str, ...] = (), choice: int = 0, indent: int = 0, parser: OutputParser | None = None
    ) -> None:
        """The answer ends before any of `stop`, and where a later line is indented by less than `indent` (if > 0)."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopMatcher(stop) if any(stop) else None
        self._indent = IndentLimit(indent) if indent > 0 else None
        self._choice = choice
        self._parser = parser
        self._thought_tokens = 0
        self._has_thoughts = False
        self._in_text = True  # the last event was text, or there was none
        # Only where there are probabilities: how much text came in and went out, and who waits for which of it.
        self._decoded = self._emitted = 0
        self._waiting: list[tuple[int, TokenLogprob]] = []

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer. Once set, nothing may be fed any more."""
        return self._stops.matched if self._stops is not None and not self.outdented else None

    @property
    def outdented(self) -> bool:
        """Whether a line that is indented too little ended the answer. Once true, nothing may be fed any more."""
        return self._indent is not None and self._indent.reached

    @property
    def stop_now(self) -> bool:
        """Whether the answer has the one call that it may have. Once true, nothing may be fed any more."""
        return self._parser is not None and self._parser.stop_now

    @property
    def ended(self) -> FinishReason | None:
        """Why what was fed ends the answer; None if it does not."""
        if self.stop_sequence is not None or self.stop_now:
            return "stop"
        return "length" if self.outdented else None

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens were thinking. The markup around it counts too, unless there is none inside."""
        return self._thought_tokens if self._has_thoughts else 0

    def feed(self, piece: bytes, logprob: TokenLogprob | None = None) -> list[Event]:
        text = self._decoder.decode(piece)
        if logprob is not None:
            self._waiting.append((self._decoded, logprob))
        self._decoded += len(text)
        if self._parser is None:
            return self._events(self._through(text))
        events = self._parsed(self._parser, self._through(text))
        thoughts = any(isinstance(event, ReasoningDelta) for event in events)
        self._has_thoughts |= thoughts
        self._thought_tokens += thoughts or self._parser.thinking
        return events

    def finish(self, reason: FinishReason = "stop") -> list[Event]:
        """The answer ended for `reason`: what was held back is text; half a character is U+FFFD."""
        text = self._rest()
        if self._parser is None:
            if not self._was_cut_off:
                self._emitted = self._decoded + 1  # whoever still waits has no text
            return self._events(text)
        events = self._parsed(self._parser, text)
        decided = self._emitted if self._was_cut_off else self._decoded + 1
        events += self._placed(self._parser.finish(reason), decided, last=True)
        self._has_thoughts |= any(isinstance(event, ReasoningDelta) for event in events)
        return events

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """What the client is told, once the answer is finished."""
        return reason if self._parser is None else self._parser.finish_reason(reason)

    @property
    def _was_cut_off(self) -> bool:
        return self.stop_sequence is not None or self.outdented

    def _rest(self) -> str:
        if self._was_cut_off:
            return ""
        text = self._through(self._decoder.decode(b"", final=True))
        if self._stops is not None and self._stops.matched is None and not self.outdented:
            rest = self._stops.finish()
            text += self._indent.feed(rest) if self._indent is not None else rest
        return text

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
        ready = self._ready(self._emitted)
        return [TextDelta(text, tuple(ready), self._choice)] if text or ready else []

    def _parsed(self, parser: OutputParser, text: str) -> list[Event]:
        if not self._waiting:
            self._emitted += len(text)
            return self._noted(parser.feed(text)) if text else []
        # Token by token: what becomes of each shows where its probability belongs.
        begin, end = self._emitted, self._emitted + len(text)
        cuts = sorted({begin, end, *(at for at, _ in self._waiting if begin < at < end)})
        events: list[Event] = []
        for left, right in pairwise(cuts):
            self._emitted = right
            found = parser.feed(text[left - begin : right - begin])
            events += self._placed(found, right - parser.undecided)
        return events

    def _placed(self, events: list[Event], decided: int, *, last: bool = False) -> list[Event]:
        """`events` with the probabilities of the tokens whose text begins before `decided`, where it became text."""
        ready = tuple(self._ready(decided))
        for index, event in enumerate(events):
            if ready and isinstance(event, TextDelta):
                events[index] = msgspec.structs.replace(event, logprobs=ready)
                return self._noted(events)
        if ready and last and not events and self._in_text:
            return [TextDelta("", ready, self._choice)]  # the token that ended the text
        return self._noted(events)

    def _noted(self, events: list[Event]) -> list[Event]:
        if events:
            self._in_text = isinstance(events[-1], TextDelta)
        return events

    def _ready(self, end: int) -> list[TokenLogprob]:
        """Of the tokens whose text begins before `end`."""
        ready = []
        while self._waiting and self._waiting[0][0] < end:
            ready.append(self._waiting.pop(0)[1])
        return ready
