"""What a request is answered with, one engine step at a time: tokens made of its prompt, or a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from backends.adapters import AdapterSet
from backends.fake.settings import FakeFault, FakeSettings
from backends.fake.tokens import answer_key, prompt_length, shown_prompt, token_at
from backends.output.assembler import Assembler
from backends.output.selection import ParserSpec
from backends.output.stops import StopMatcher
from protocols.errors import ContextOverflow, InvalidRequest, ServingError
from protocols.events import (
    Echo,
    Event,
    Failed,
    Finished,
    FinishReason,
    Frame,
    Progress,
    Started,
    TextDelta,
    Timings,
    Usage,
)
from protocols.request import Request


def written(
    pieces: Sequence[str], parser: ParserSpec | None = None, *, reason: FinishReason = "stop", prompt_tokens: int = 1
) -> list[Event | Frame]:
    """A script for `FakeBackend.enqueue`: the answer of a model that writes `pieces`, each a token, and its parser."""
    assembler = Assembler(parser=None if parser is None else parser.make("fake", 0))
    script: list[Event | Frame] = [Started(prompt_tokens, cached_tokens=0)]
    for token, piece in enumerate(pieces):
        script.append(Frame(tuple(assembler.feed(piece.encode())), (token,)))
        if assembler.stop_now:
            break
    rest = assembler.finish(reason)
    usage = Usage(prompt_tokens, len(script) - 1, reasoning_tokens=assembler.reasoning_tokens)
    return [*script, Frame((*rest, Finished(assembler.finish_reason(reason), usage)))]


class Source(Protocol):
    """A request's answer, one engine step at a time. No frames from an answer that is not `done` means it hangs."""

    done: bool
    slot: int
    """Which one it has, once it runs."""

    def step(self) -> list[Frame]: ...


class _Choice:
    """One alternative of a generated answer. Tokens of `request.resume` pass through silently, then it continues."""

    def __init__(
        self, request: Request, settings: FakeSettings, index: int, prompt_tokens: int, adapters: AdapterSet
    ) -> None:
        room = settings.context_length - prompt_tokens
        ends_itself = request.max_tokens is None and not request.ignore_eos and settings.tokens <= room
        self.reason: FinishReason = "stop" if ends_itself else "length"
        self.index = index
        self.position = len(request.resume)
        self._limit = settings.tokens if ends_itself else room
        if request.max_tokens is not None:
            self._limit = min(request.max_tokens, room)
        self._fills_context = not ends_itself and self._limit == room
        self._key = answer_key(request, adapters)
        self._piece = settings.piece
        self._stops = StopMatcher(request.stop)
        for token in request.resume:
            self._text(token)

    @property
    def stop_sequence(self) -> str | None:
        return self._stops.matched

    @property
    def truncated(self) -> bool:
        return self.reason == "length" and self._fills_context

    @property
    def ended(self) -> bool:
        return self.stop_sequence is not None or self.position >= self._limit

    def _text(self, token: int) -> str:
        text = self._stops.feed(f"{self._piece}{token}")
        if self.stop_sequence is not None:
            self.reason = "stop"
        return text

    def advance(self) -> tuple[str, tuple[int, ...]]:
        """The next token and the text it sets free; no token, only held text, when the answer was complete before."""
        if self.ended:
            return self._stops.finish(), ()
        token = token_at(self._key, self.position, self.index)
        self.position += 1
        text = self._text(token)
        # "text held back for a possible stop word is lost in streams when the limit ends generation …. Flush it."
        return (text + self._stops.finish() if self.ended else text), (token,)


class Generated:
    def __init__(
        self,
        request: Request,
        settings: FakeSettings,
        fault: FakeFault | None,
        clock: Callable[[], float],
        adapters: AdapterSet,
    ) -> None:
        self.prompt_tokens = prompt_length(request.prompt)
        if self.prompt_tokens >= settings.context_length:
            raise ContextOverflow.of(self.prompt_tokens, settings.context_length)
        if request.n > 1 and request.resume:
            raise InvalidRequest("A request with several choices cannot be resumed", param="n")
        self.done = False
        self.slot = -1
        self._extras = request.extras
        self._echo = Echo(shown_prompt(request.prompt), request.sampling) if request.extras.echo else None
        self._fault = fault
        self._clock = clock
        self._choices = [_Choice(request, settings, index, self.prompt_tokens, adapters) for index in range(request.n)]
        self._steps = 0  # the first one holds no token
        self._admitted = self._first_token = 0.0

    def step(self) -> list[Frame]:
        if self._fault is not None and self._steps == (self._fault.after_tokens and self._fault.after_tokens + 1):
            if self._fault.action == "hang":
                return []
            raise self._fault.error
        self._steps += 1
        if self._steps == 1:
            self._admitted = self._clock()
            return [Frame((Started(self.prompt_tokens, cached_tokens=0, echo=self._echo),))]
        progress: list[Frame] = []
        if not self._first_token:
            self._first_token = self._clock()
            if self._extras.progress:
                ms = (self._first_token - self._admitted) * 1000
                progress = [Frame((Progress(self.prompt_tokens, 0, self.prompt_tokens, ms),))]
        return progress + [self._frame(choice) for choice in list(self._choices)]

    def _frame(self, choice: _Choice) -> Frame:
        text, tokens = choice.advance()
        timings = self._timings(choice) if self._extras.timings else None
        events: list[Event] = [TextDelta(text, choice=choice.index, timings=timings)] if text else []
        if choice.ended:
            events.append(self._finished(choice))
            self._choices.remove(choice)
            self.done = not self._choices
        return Frame(tuple(events), tokens, choice.index)

    def _finished(self, choice: _Choice) -> Finished:
        return Finished(
            choice.reason,
            # A resumed answer is one answer: its usage counts what the lost replica generated too.
            Usage(self.prompt_tokens, choice.position),
            choice.stop_sequence,
            self._timings(choice),
            choice.index,
            self.slot,
            self.prompt_tokens + choice.position,
            choice.truncated,
        )

    def _timings(self, choice: _Choice) -> Timings:
        return Timings(
            cache_n=0,
            prompt_n=self.prompt_tokens,
            prompt_ms=(self._first_token - self._admitted) * 1000,
            predicted_n=choice.position,
            predicted_ms=(self._clock() - self._first_token) * 1000,
        )


class Scripted:
    """Exactly the enqueued frames, one per step. A `Failed` is raised: "Backends raise; they never yield `Failed`"."""

    def __init__(self, script: Iterable[Event | Frame]) -> None:
        self._frames = deque(f if isinstance(f, Frame) else Frame((f,), choice=f.choice) for f in script)
        self.done = not self._frames
        self.slot = -1

    def step(self) -> list[Frame]:
        frame = self._frames.popleft()
        self.done = not self._frames
        for event in frame.events:
            if isinstance(event, Failed):
                raise ServingError.from_info(event.error)
        return [frame]
