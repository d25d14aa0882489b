"""What a request is answered with, one engine step at a time: tokens made of its prompt, or a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec.structs import replace

from backends.adapters import AdapterSet
from backends.fake.agent import writing
from backends.fake.settings import FakeFault, FakeSettings
from backends.fake.tokens import answer_key, shown_prompt, token_at
from backends.output.assembler import Assembler
from backends.output.selection import ParserSpec
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
    cached: int
    """Tokens of its prompt that were found there."""

    def step(self) -> list[Frame]: ...


class _Choice:
    """One alternative of a generated answer. Tokens of `request.resume` pass through silently, then it continues."""

    def __init__(
        self, request: Request, settings: FakeSettings, index: int, prompt_tokens: int, adapters: AdapterSet
    ) -> None:
        self.index = index
        self.position = len(request.resume)
        self._key = answer_key(request, adapters)
        self._piece = settings.piece
        self._writing = None if settings.agent is None else writing(request.prompt, settings.agent)
        self._is_plain = self._writing is None and not request.stop  # no text is ever held back
        room = settings.context_length - prompt_tokens
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        if self._writing is not None:
            length = len(self._writing.pieces)
            ends_itself = length <= limit
        else:
            length = settings.tokens
            ends_itself = request.max_tokens is None and not request.ignore_eos and length <= room
        self._reason: FinishReason = "stop" if ends_itself else "length"
        self._limit = length if ends_itself else limit
        self._fills_context = not ends_itself and limit == room
        spec = None if self._writing is None else self._writing.parser
        parser = None if spec is None else spec.make(request.id, index)
        self._assembler = Assembler(request.stop, index, parser=parser)
        for position, token in enumerate(request.resume):
            self._feed(position, token)
        self.ended = self._is_over()

    @property
    def reason(self) -> FinishReason:
        return self._assembler.finish_reason("stop" if self.stop_sequence is not None else self._reason)

    @property
    def stop_sequence(self) -> str | None:
        return self._assembler.stop_sequence

    @property
    def reasoning_tokens(self) -> int:
        return self._assembler.reasoning_tokens

    @property
    def truncated(self) -> bool:
        return self.reason == "length" and self._fills_context

    def _is_over(self) -> bool:
        return self.position >= self._limit or self.stop_sequence is not None or self._assembler.stop_now

    def _feed(self, position: int, token: int) -> list[Event]:
        text = f"{self._piece}{token}" if self._writing is None else self._writing.pieces[position]
        return self._assembler.feed(text.encode())

    def middle(self) -> Frame | None:
        """The next frame, where it is a token that neither ends the answer nor has to be looked at; else None.

        An engine that is not there is to take no time: what is measured with it is everything else.
        """
        position = self.position
        if not self._is_plain or position + 1 >= self._limit:
            return None
        self.position = position + 1
        token = token_at(self._key, position, self.index)
        return Frame((TextDelta(f"{self._piece}{token}", choice=self.index),), (token,), self.index)

    def advance(self) -> tuple[list[Event], tuple[int, ...]]:
        """The next token and what it sets free; no token, only what was held, when the answer was complete before."""
        if self.ended:
            return self._assembler.finish(self._reason), ()
        token = token_at(self._key, self.position, self.index)
        events = self._feed(self.position, token)
        self.position += 1
        self.ended = self._is_over()
        # "text held back for a possible stop word is lost in streams when the limit ends generation …. Flush it."
        return (events + self._assembler.finish(self._reason) if self.ended else events), (token,)


class Generated:
    def __init__(
        self,
        request: Request,
        prompt_tokens: int,
        settings: FakeSettings,
        fault: FakeFault | None,
        clock: Callable[[], float],
        adapters: AdapterSet,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        if self.prompt_tokens >= settings.context_length:
            raise ContextOverflow.of(self.prompt_tokens, settings.context_length)
        if request.n > 1 and request.resume:
            raise InvalidRequest("A request with several choices cannot be resumed", param="n")
        self.done = False
        self.slot = -1
        self.cached = 0
        self._extras = request.extras
        self._echo = Echo(shown_prompt(request.prompt), request.sampling) if request.extras.echo else None
        self._fault = fault
        self._clock = clock
        self._first_choice = request.choice
        self._choices = [
            _Choice(request, settings, index, self.prompt_tokens, adapters)
            for index in range(request.choice, request.choice + request.n)
        ]
        plain = request.n == 1 and fault is None and not request.extras.timings
        self._only = self._choices[0] if plain else None
        self._steps = 0  # the first one holds no token
        self._admitted = self._first_token = 0.0

    def step(self) -> list[Frame]:
        if self._only is not None and self._first_token and (frame := self._only.middle()) is not None:
            return [frame]
        if self._fault is not None and self._steps == (self._fault.after_tokens and self._fault.after_tokens + 1):
            if self._fault.action == "hang":
                return []
            raise self._fault.error
        self._steps += 1
        if self._steps == 1:
            self._admitted = self._clock()
            started = Started(self.prompt_tokens, self.cached, self._first_choice, self._echo)
            return [Frame((started,), choice=self._first_choice)]
        progress: list[Frame] = []
        if not self._first_token:
            self._first_token = self._clock()
            if self._extras.progress:
                ms = (self._first_token - self._admitted) * 1000
                event = Progress(self.prompt_tokens, self.cached, self.prompt_tokens, ms, self._first_choice)
                progress = [Frame((event,), choice=self._first_choice)]
        return progress + [self._frame(choice) for choice in list(self._choices)]

    def _frame(self, choice: _Choice) -> Frame:
        events, tokens = choice.advance()
        if self._extras.timings:
            timings = self._timings(choice)
            events = [replace(e, timings=timings) if isinstance(e, TextDelta) else e for e in events]
        if choice.ended:
            events.append(self._finished(choice))
            self._choices.remove(choice)
            self.done = not self._choices
        return Frame(tuple(events), tokens, choice.index)

    def _finished(self, choice: _Choice) -> Finished:
        return Finished(
            choice.reason,
            # A resumed answer is one answer: its usage counts what the lost replica generated too.
            Usage(
                self.prompt_tokens,
                choice.position,
                cached_tokens=self.cached,
                reasoning_tokens=choice.reasoning_tokens,
            ),
            choice.stop_sequence,
            self._timings(choice),
            choice.index,
            self.slot,
            self.prompt_tokens + choice.position,
            choice.truncated,
        )

    def _timings(self, choice: _Choice) -> Timings:
        return Timings(
            cache_n=self.cached,
            prompt_n=self.prompt_tokens - self.cached,
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
        self.cached = 0

    def step(self) -> list[Frame]:
        frame = self._frames.popleft()
        self.done = not self._frames
        for event in frame.events:
            if isinstance(event, Failed):
                raise ServingError.from_info(event.error)
        return [frame]
