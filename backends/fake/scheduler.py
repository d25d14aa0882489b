"""The engine's part: slots, and steps that advance every running request together."""

from __future__ import annotations

import asyncio
import os.path
from heapq import heapify, heappop, heappush

from backends.fake.answers import Source
from backends.fake.settings import FakeSettings
from backends.fake.tokens import shown_prompt
from backends.mailbox import Mailbox
from protocols.errors import ServingError, Unavailable
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink


class Stream:
    """One request inside the engine, and what its consumer reads: frames, then an error or None for the end."""

    def __init__(self, source: Source, request: Request, prompt_tokens: int, sink: Sink | None) -> None:
        self.source = source
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.slot = -1  # once it has one
        self.gone: asyncio.Event | None = None  # made by whoever waits for it to leave its slot
        self.generated = 0
        self.ready_at = 0.0
        self.made: Mailbox[Frame | ServingError | None] = Mailbox(sink)


class Scheduler:
    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead = "the backend has not been started"
        # Dicts as ordered sets. A running stream is prefilling, then decoding; one that hangs is neither.
        self.waiting: dict[Stream, None] = {}
        self.running: dict[Stream, None] = {}
        self.prefilling: dict[Stream, None] = {}
        self._decoding: dict[Stream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._next_step = 0.0
        self._free_slots = list(range(settings.slots))  # a heap: the first free one is taken
        self.held = [0] * settings.slots
        """Tokens of the last request in each slot."""
        self._last_words: list[list[str]] = [[] for _ in range(settings.slots)]
        self._used = [0] * settings.slots  # when it got its last prompt, in tokens
        self.prompt_tokens_total = self.cached_tokens_total = self.generated_tokens_total = self.steps_total = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dead = ""

    def alive(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._dead:
            raise Unavailable(f"The model is not available: {self._dead}")
        return self._loop

    def die(self, why: str) -> None:
        self._dead = why
        if self._timer is not None:
            self._timer.cancel()
        for stream in [*self.running, *self.waiting]:
            stream.made.put(Unavailable(f"The model is not available: {why}"))
        for stream in list(self.running):
            self._leave(stream)
        self.waiting.clear()

    def enter(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting[stream] = None
        self._admit(loop)

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives free slots to those who wait longest. The first frame (`Started`) comes with the slot."""
        while self.waiting and len(self.running) < self._settings.slots:
            stream = next(iter(self.waiting))
            del self.waiting[stream]
            self.running[stream] = self.prefilling[stream] = None
            self._place(stream)
            stream.ready_at = loop.time() + self._settings.ttft_s
            self.prompt_tokens_total += stream.prompt_tokens
            self.cached_tokens_total += stream.source.cached
            self._advance(stream)
        self._schedule(loop)

    def _place(self, stream: Stream) -> None:
        """In the first free slot, or in the one that shares most words with it; of equals, the one used longest ago."""
        if not self._settings.prefix_cache:
            stream.slot = stream.source.slot = heappop(self._free_slots)
            return
        words = shown_prompt(stream.request.prompt).split()
        shared = {slot: len(os.path.commonprefix([words, self._last_words[slot]])) for slot in self._free_slots}
        # Of less nobody's slot is taken away, as with real engines: prompts begin alike.
        enough = 0.1 * len(words)
        slot = max(shared, key=lambda slot: (shared[slot] if shared[slot] > enough else 0, -self._used[slot]))
        self._free_slots.remove(slot)
        heapify(self._free_slots)
        stream.slot = stream.source.slot = slot
        stream.source.cached = min(shared[slot], stream.prompt_tokens - 1)
        self._last_words[slot] = words
        self._used[slot] = self.prompt_tokens_total + stream.prompt_tokens

    def release(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> None:
        """The consumer is gone: at the end of the stream, which has left the engine by itself, or before."""
        self.waiting.pop(stream, None)
        if stream in self.running:
            self._leave(stream)
            self._admit(loop)

    def _leave(self, stream: Stream) -> None:
        for streams in (self.running, self.prefilling, self._decoding):
            streams.pop(stream, None)
        self.held[stream.slot] = stream.prompt_tokens + stream.generated
        heappush(self._free_slots, stream.slot)
        if stream.gone is not None:
            stream.gone.set()

    def _advance(self, stream: Stream) -> None:
        try:
            frames = [] if stream.source.done else stream.source.step()
        except ServingError as error:
            stream.made.put(error)
            self._leave(stream)
            return
        for frame in frames:
            stream.made.put(frame)
            stream.generated += len(frame.tokens)
            self.generated_tokens_total += len(frame.tokens)
        if stream.source.done:
            stream.made.put(None)
            self._leave(stream)
        elif not frames:
            self.prefilling.pop(stream, None)
            self._decoding.pop(stream, None)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all: at the next decode step, or where a prefill ends before it."""
        due = [self._next_step] if self._decoding else []
        if self.prefilling:
            due.append(next(iter(self.prefilling)).ready_at)  # all prefills take as long: the first in is first out
        if not due or (self._timer is not None and self._timer_due <= min(due)):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = min(due)
        self._timer = loop.call_at(self._timer_due, self._tick, loop, self._timer_due)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._timer = None
        try:
            self._step(max(loop.time(), due))  # a timer may fire early by the clock's resolution
            self._admit(loop)
        except Exception:
            self.die("the engine failed")  # what it was goes to the loop's exception handler
            raise

    def _step(self, now: float) -> None:
        self.steps_total += 1
        if self._decoding and now >= self._next_step:
            self._next_step += self._settings.inter_token_s
            if self._next_step <= now:  # steps that were missed are not made up for
                self._next_step = now + self._settings.inter_token_s
            for stream in list(self._decoding):
                self._advance(stream)
        for stream in list(self.prefilling):
            if stream.ready_at > now:
                break
            if not self._decoding:
                self._next_step = now + self._settings.inter_token_s
            del self.prefilling[stream]
            self._decoding[stream] = None
            self._advance(stream)
