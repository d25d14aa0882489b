"""A backend without a model: deterministic tokens at a set speed, set failures, or exactly the events a test enqueues.

It behaves like a batching engine: one step produces a token for every running request, whatever their number.
A token's id is a function of prompt and position, and its text of its id, so any replica continues what another began.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Literal, Protocol, Self
from zlib import crc32

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.adapters import NO_ADAPTERS, AdapterSet, adapter_set
from backends.base import BackendStats, ModelCard, Unsupported
from backends.output.assembler import Assembler
from backends.output.selection import ParserSpec
from backends.output.stops import StopMatcher
from protocols.calls import Adapter, Embedding, EmbeddingRequest, Relevance, RerankRequest, SlotFile, SlotState
from protocols.errors import ContextOverflow, ErrorInfo, InvalidRequest, NotSupported, ServingError, Unavailable
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
from protocols.request import (
    ChatPrompt,
    ImagePart,
    InfillPrompt,
    LoraScale,
    Message,
    MixedPrompt,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
)

VOCAB_SIZE = 32_000


class FakeFault(BaseModel):
    """One failure, injected into every request (or the first `times` of them) after `after_tokens` tokens of its own.

    0 tokens is before the first frame. `fail` raises the error of `kind`; `hang` keeps the slot and says nothing more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    after_tokens: int = Field(0, ge=0)
    action: Literal["fail", "hang"] = "fail"
    kind: str = "internal"
    times: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _known_kind(self) -> Self:
        if self.error.kind != self.kind:
            raise ValueError(f"there is no error of kind {self.kind!r}")
        return self

    @property
    def error(self) -> ServingError:
        return ServingError.from_info(ErrorInfo(self.kind, f"Injected error of kind {self.kind}"))


class FakeSettings(BaseModel):
    """`tokens` is the length of an answer whose request does not set `max_tokens`; a request that does gets that many.

    The text of a token is `piece` and its id. `inter_token_s` 0 means as fast as the event loop turns. `adapters` are
    paths of which only the names matter: an answer with other scales has other tokens.

    An input's vector has `embedding_length` numbers and the Euclidean norm 1, whatever norm was asked for. A document's
    score is the share of the query's words that it has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fake"] = "fake"
    slots: int = Field(512, ge=1)
    context_length: int = Field(32_768, ge=2)
    ttft_s: float = Field(0.0, ge=0)
    inter_token_s: float = Field(0.0, ge=0)
    tokens: int = Field(16, ge=0)
    piece: str = " token"
    adapters: tuple[str, ...] = ()
    tasks: tuple[Literal["generate", "embed", "rerank"], ...] = ("generate", "embed", "rerank")
    embedding_length: int = Field(8, ge=1)
    fail_at: FakeFault | None = None


def prompt_length(prompt: Prompt) -> int:
    """Words, and one token per message and image. Never 0, as with a real tokenizer that starts every prompt alike."""
    match prompt:
        case ChatPrompt(messages=messages):
            return sum(_message_length(message) for message in messages) or 1
        case TextPrompt(text=text):
            return len(text.split()) or 1
        case InfillPrompt(prefix=prefix, suffix=suffix, start=start, files=files):
            return sum(len(text.split()) for text in (prefix, suffix, start, *(f.text for f in files))) or 1
        case TokenPrompt(tokens=tokens):
            return len(tokens) or 1
        case MixedPrompt(parts=parts):
            return sum(len(part.split()) if isinstance(part, str) else 1 for part in parts) or 1


def _shown_prompt(prompt: Prompt) -> str:
    """Of tokens, their numbers: there is no vocabulary."""
    match prompt:
        case ChatPrompt(messages=messages):
            return "\n".join(f"{message.role}: {message.text}" for message in messages)
        case TextPrompt(text=text):
            return text
        case InfillPrompt(prefix=prefix, suffix=suffix, start=start):
            return f"{prefix}{start}{suffix}"
        case TokenPrompt(tokens=tokens):
            return " ".join(map(str, tokens))
        case MixedPrompt(parts=parts):
            return " ".join(map(str, parts))


def _message_length(message: Message) -> int:
    texts = [message.text, message.reasoning or "", *(f"{c.name} {c.arguments}" for c in message.tool_calls)]
    images = sum(isinstance(part, ImagePart) for part in message.content)
    return 1 + images + sum(len(text.split()) for text in texts)


def answer_key(request: Request, adapters: AdapterSet = NO_ADAPTERS) -> int:
    """What the ids of an answer depend on besides the position. A seed matters only where something is drawn."""
    key = crc32(msgspec.json.encode((request.prompt, adapters) if adapters else request.prompt))
    sampling = request.sampling
    return key if sampling.seed is None or sampling.temperature == 0 else crc32(b"%d" % sampling.seed, key)


def token_at(key: int, position: int, choice: int = 0) -> int:
    return crc32(b"%d:%d" % (choice, position), key) % VOCAB_SIZE


def vector(prompt: TextPrompt | TokenPrompt | MixedPrompt, length: int) -> list[float]:
    """Of the Euclidean norm 1, and a function of `prompt` alone."""
    key = crc32(msgspec.json.encode(prompt))
    values = [token_at(key, position) - VOCAB_SIZE / 2 + 0.25 for position in range(length)]  # never 0
    norm = math.hypot(*values)
    return [value / norm for value in values]


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


class _Source(Protocol):
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


class _Generated:
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
        self._echo = Echo(_shown_prompt(request.prompt), request.sampling) if request.extras.echo else None
        self._fault = fault
        self._clock = clock
        self._first_choice = request.choice
        self._choices = [
            _Choice(request, settings, index, self.prompt_tokens, adapters)
            for index in range(request.choice, request.choice + request.n)
        ]
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
            started = Started(self.prompt_tokens, 0, self._first_choice, self._echo)
            return [Frame((started,), choice=self._first_choice)]
        progress: list[Frame] = []
        if not self._first_token:
            self._first_token = self._clock()
            if self._extras.progress:
                ms = (self._first_token - self._admitted) * 1000
                event = Progress(self.prompt_tokens, 0, self.prompt_tokens, ms, self._first_choice)
                progress = [Frame((event,), choice=self._first_choice)]
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


class _Scripted:
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


# --- the engine ------------------------------------------------------------


class _Stream:
    """One request inside the engine, and the queue its consumer reads: frames, then an error or None for the end."""

    def __init__(self, source: _Source, request: Request) -> None:
        self.source = source
        self.request = request
        self.prompt_tokens = prompt_length(request.prompt)
        self.slot = -1  # once it has one
        self.gone = asyncio.Event()
        self.generated = 0
        self.ready_at = 0.0
        self.queue: asyncio.Queue[Frame | ServingError | None] = asyncio.Queue()


class FakeBackend(Unsupported):
    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self._scripts: deque[list[Event | Frame]] = deque()
        self._faults_left = settings.fail_at.times if settings.fail_at else 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead = "the backend has not been started"
        # Dicts as ordered sets. A running stream is prefilling, then decoding; one that hangs is neither.
        self._waiting: dict[_Stream, None] = {}
        self._running: dict[_Stream, None] = {}
        self._prefilling: dict[_Stream, None] = {}
        self._decoding: dict[_Stream, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._next_step = 0.0
        self._prompt_tokens_total = self._generated_tokens_total = self._steps_total = 0
        self._scales: tuple[LoraScale, ...] = ()
        self._free_slots = list(range(settings.slots))  # a heap: the first free one is taken
        self._held = [0] * settings.slots  # tokens of the last request in each slot
        self._saved: dict[str, int] = {}  # filename -> tokens

    def enqueue(self, script: Iterable[Event | Frame]) -> None:
        """The next call of `generate` that finds no earlier script answers exactly this, one frame per step."""
        self._scripts.append(list(script))

    async def start(self) -> ModelCard:
        self._loop = asyncio.get_running_loop()
        self._dead = ""
        return self.card()

    def card(self) -> ModelCard:
        return ModelCard(
            self._settings.context_length,
            self._settings.slots,
            engine="fake",
            vocab_size=VOCAB_SIZE,
            tasks=self._settings.tasks,
            embedding_length=self._settings.embedding_length,
            pooling="mean",
        )

    def generate(self, request: Request) -> AsyncGenerator[Frame, None]:
        # Taken at the call, not at the first frame: tests count on the order of their calls.
        script = self._scripts.popleft() if self._scripts else None
        return self._generate(request, script, self._take_fault() if script is None else None)

    async def _generate(
        self, request: Request, script: list[Event | Frame] | None, fault: FakeFault | None
    ) -> AsyncGenerator[Frame, None]:
        loop = self._alive()
        if "generate" not in self._settings.tasks:
            raise NotSupported("This model does not generate text")
        source: _Source
        if script is None:
            scales = self._scales if request.lora is None else request.lora
            adapters = adapter_set(scales, len(self._settings.adapters))
            source = _Generated(request, self._settings, fault, loop.time, adapters)
        else:
            source = _Scripted(script)
        stream = _Stream(source, request)
        try:
            self._waiting[stream] = None
            self._admit(loop)
            while (item := await stream.queue.get()) is not None:
                if isinstance(item, ServingError):
                    raise item
                yield item
        finally:
            self._release(stream, loop)

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        self._alive()
        if "embed" not in self._settings.tasks:
            return await super().embed(request)
        counts = [prompt_length(prompt) for prompt in request.inputs]
        self._count_inputs(counts, "input")
        vectors = [vector(prompt, self._settings.embedding_length) for prompt in request.inputs]
        return [
            Embedding(struct.pack(f"<{len(values)}f", *values), len(values), count)
            for values, count in zip(vectors, counts, strict=True)
        ]

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        self._alive()
        if "rerank" not in self._settings.tasks:
            return await super().rerank(request)
        query = request.query.lower().split()
        words = [document.lower().split() for document in request.documents]
        counts = [len(query) + len(document) or 1 for document in words]
        self._count_inputs(counts, "documents")
        return [
            Relevance(sum(word in document for word in query) / (len(query) or 1), count)
            for document, count in zip(words, counts, strict=True)
        ]

    def _count_inputs(self, counts: Sequence[int], param: str) -> None:
        if not counts:
            raise InvalidRequest("There is nothing to compute: the list is empty", param=param)
        for index, count in enumerate(counts):
            if count > self._settings.context_length:
                raise ContextOverflow.of_item(index, count, self._settings.context_length, param)
        self._prompt_tokens_total += sum(counts)

    async def count_tokens(self, request: Request) -> int:
        return prompt_length(request.prompt)

    def adapters(self) -> list[Adapter]:
        scales = {item.id: item.scale for item in self._scales}
        return [Adapter(id, path, scales.get(id, 0.0)) for id, path in enumerate(self._settings.adapters)]

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        self._scales = tuple(LoraScale(id, scale) for id, scale in adapter_set(scales, len(self._settings.adapters)))

    async def slots(self) -> list[SlotState]:
        states = [SlotState(id, self._settings.context_length, held) for id, held in enumerate(self._held)]
        for stream in self._running:
            states[stream.slot] = SlotState(
                stream.slot,
                self._settings.context_length,
                cached_tokens=stream.prompt_tokens + stream.generated,
                request=stream.request.id,
                prompt_tokens=stream.prompt_tokens,
                processed_tokens=stream.prompt_tokens,
                generated_tokens=stream.generated,
                max_tokens=stream.request.max_tokens,
                sampling=stream.request.sampling,
            )
        return states

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        """There are no files; names are remembered as long as the backend lives."""
        await self._idle_slot(slot)
        self._saved[filename] = self._held[slot]
        return SlotFile(slot, filename, self._held[slot], 4 * self._held[slot], 0.0)

    async def restore_slot(self, slot: int, filename: str) -> SlotFile:
        await self._idle_slot(slot)
        self._held[slot] = self._saved.get(filename, 0)
        if filename not in self._saved:
            raise InvalidRequest(f"There is no readable file {filename!r}", param="filename")
        return SlotFile(slot, filename, self._held[slot], 4 * self._held[slot], 0.0)

    async def erase_slot(self, slot: int) -> int:
        await self._idle_slot(slot)
        held, self._held[slot] = self._held[slot], 0
        return held

    async def _idle_slot(self, slot: int) -> None:
        if not 0 <= slot < self._settings.slots:
            raise InvalidRequest(f"There is no slot {slot}: this model has {self._settings.slots}", param="id_slot")
        while self._alive() and (busy := next((s for s in self._running if s.slot == slot), None)) is not None:
            await busy.gone.wait()

    def stats(self) -> BackendStats:
        return BackendStats(
            slots=self._settings.slots,
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prompt_tokens=sum(stream.prompt_tokens for stream in self._waiting),
            uncached_tokens_queued=sum(
                s.prompt_tokens for streams in (self._waiting, self._prefilling) for s in streams
            ),
            kv_tokens_used=sum(stream.prompt_tokens + stream.generated for stream in self._running),
            kv_tokens_capacity=self._settings.slots * self._settings.context_length,
            prompt_tokens_total=self._prompt_tokens_total,
            generated_tokens_total=self._generated_tokens_total,
            steps_total=self._steps_total,
        )

    async def check_health(self) -> None:
        self._alive()

    async def aclose(self) -> None:
        self._die("the backend is closed")

    def _alive(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._dead:
            raise Unavailable(f"The model is not available: {self._dead}")
        return self._loop

    def _die(self, why: str) -> None:
        self._dead = why
        if self._timer is not None:
            self._timer.cancel()
        for stream in [*self._running, *self._waiting]:
            stream.queue.put_nowait(Unavailable(f"The model is not available: {why}"))
        for stream in list(self._running):
            self._leave(stream)
        self._waiting.clear()

    def _take_fault(self) -> FakeFault | None:
        if self._faults_left == 0:
            return None
        if self._faults_left is not None:
            self._faults_left -= 1
        return self._settings.fail_at

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        """Gives free slots to those who wait longest. The first frame (`Started`) comes with the slot."""
        while self._waiting and len(self._running) < self._settings.slots:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            self._running[stream] = self._prefilling[stream] = None
            stream.slot = stream.source.slot = heappop(self._free_slots)
            stream.ready_at = loop.time() + self._settings.ttft_s
            self._prompt_tokens_total += stream.prompt_tokens
            self._advance(stream)
        self._schedule(loop)

    def _release(self, stream: _Stream, loop: asyncio.AbstractEventLoop) -> None:
        """The consumer is gone: at the end of the stream, which has left the engine by itself, or before."""
        self._waiting.pop(stream, None)
        if stream in self._running:
            self._leave(stream)
            self._admit(loop)

    def _leave(self, stream: _Stream) -> None:
        for streams in (self._running, self._prefilling, self._decoding):
            streams.pop(stream, None)
        self._held[stream.slot] = stream.prompt_tokens + stream.generated
        heappush(self._free_slots, stream.slot)
        stream.gone.set()

    def _advance(self, stream: _Stream) -> None:
        try:
            frames = [] if stream.source.done else stream.source.step()
        except ServingError as error:
            stream.queue.put_nowait(error)
            self._leave(stream)
            return
        for frame in frames:
            stream.queue.put_nowait(frame)
            stream.generated += len(frame.tokens)
            self._generated_tokens_total += len(frame.tokens)
        if stream.source.done:
            stream.queue.put_nowait(None)
            self._leave(stream)
        elif not frames:
            self._prefilling.pop(stream, None)
            self._decoding.pop(stream, None)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all: at the next decode step, or where a prefill ends before it."""
        due = [self._next_step] if self._decoding else []
        if self._prefilling:
            due.append(next(iter(self._prefilling)).ready_at)  # all prefills take as long: the first in is first out
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
            self._die("the engine failed")  # what it was goes to the loop's exception handler
            raise

    def _step(self, now: float) -> None:
        self._steps_total += 1
        if self._decoding and now >= self._next_step:
            self._next_step += self._settings.inter_token_s
            if self._next_step <= now:  # steps that were missed are not made up for
                self._next_step = now + self._settings.inter_token_s
            for stream in list(self._decoding):
                self._advance(stream)
        for stream in list(self._prefilling):
            if stream.ready_at > now:
                break
            if not self._decoding:
                self._next_step = now + self._settings.inter_token_s
            del self._prefilling[stream]
            self._decoding[stream] = None
            self._advance(stream)
