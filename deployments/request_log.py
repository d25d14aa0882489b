"""One record per request, filled along its way. From it come, once at its end, a line of the log and the metrics.

A record has numbers, ids and words of closed sets. It has no room for what a client or a model wrote, so that prompts,
answers and keys stay out of the log by construction and not by care. Of a client's own text there is its `x-request-id`
only, in the bounds that the middleware sets.

Layers below the HTTP side reach the record of the request that they work for by `current()`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

import msgspec

from deployments.middleware import KEY, REQUEST_ID, ASGIApp, Message, Receive, Scope, Send
from protocols.errors import ServingError
from protocols.events import Finished, Frame, Started

logger = logging.getLogger("tokenyard.request")
"""Each line is one JSON object: a `Line`."""

GENERATE = "generate"
"""The `operation` of a generation. That of a question is the question's tag."""

OK, CLIENT_GONE, ABORTED = "ok", "client_gone", "aborted"
"""How a request ends that does not end with an error, whose outcome is the error's kind."""

Clock = Callable[[], float]


class Record:
    """What is known of one request. Times are seconds since its arrival; tokens are sums over its choices."""

    __slots__ = (
        "_arrived", "_clock", "cached_tokens", "decode_s", "dialect", "first_token_s", "gaps_s", "longest", "model",
        "moves", "operation", "outcome", "output_tokens", "prefill_s", "prefill_tokens", "prompt_tokens",
        "queue_wait_s", "rejected", "replica", "status", "stream"
    )  # fmt: skip

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._arrived = clock()
        self.model = ""  # as the client calls it
        self.dialect = ""
        self.operation = ""
        self.stream = False
        self.replica = ""
        self.outcome = OK
        self.rejected = False
        self.status = 0
        self.moves = 0
        self.queue_wait_s: float | None = None
        self.first_token_s: float | None = None
        self.gaps_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.longest = 0
        self.prefill_tokens = 0
        self.prefill_s = self.decode_s = 0.0

    @property
    def age_s(self) -> float:
        return self._clock() - self._arrived

    def asks(self, model: str, dialect: str, operation: str, stream: bool = False) -> None:
        self.model, self.dialect, self.operation, self.stream = model, dialect, operation, stream

    def failed(self, error: ServingError) -> None:
        self.outcome = error.kind
        self.rejected = error.status == 429

    def observe(self, frame: Frame) -> None:
        """Of each frame of the answer, before it is sent. Of one in the middle it takes the number of tokens only."""
        if frame.tokens:
            self.output_tokens += len(frame.tokens)
            if self.first_token_s is None:
                self.first_token_s = self.age_s
        if frame.events:
            first, last = frame.events[0], frame.events[-1]
            if type(first) is Started:  # `isinstance` takes five times as long with these classes
                self._start(first)
            if type(last) is Finished:
                self._finish(last)

    def _start(self, start: Started) -> None:
        if self.queue_wait_s is None:
            self.queue_wait_s = self.age_s
        self.prompt_tokens += start.prompt_tokens
        self.cached_tokens += start.cached_tokens

    def _finish(self, end: Finished) -> None:
        tokens, timings = end.usage.completion_tokens, end.timings
        self.longest = max(self.longest, end.usage.prompt_tokens + tokens)
        if self.first_token_s is not None and tokens > 1:
            self.gaps_s.append((self.age_s - self.first_token_s) / (tokens - 1))
        if timings is not None:
            self.prefill_tokens += timings.prompt_n
            self.prefill_s += timings.prompt_ms / 1000
            self.decode_s += timings.predicted_ms / 1000


_current: ContextVar[Record] = ContextVar("record")


def current() -> Record:
    """The record of the request that is being worked on. Outside of one, a record that nobody reads."""
    record = _current.get(None)
    return Record() if record is None else record


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the log. Times are in seconds from the request's arrival; what does not apply is left out.

    `model` is the id of the model that the client's name means, "unknown" where it means none; `inter_token_s` the mean
    time between two tokens; `replica` the one that answered, as Serve names it.
    """

    id: str
    status: int
    outcome: str
    total_s: float
    key: str = ""
    model: str = ""
    dialect: str = ""
    operation: str = ""
    stream: bool = False
    replica: str = ""
    moves: int = 0
    queue_wait_s: float | None = None
    first_token_s: float | None = None
    inter_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def line(record: Record, scope: Scope, model: str) -> Line:
    gaps = record.gaps_s
    return Line(
        id=scope[REQUEST_ID],
        status=record.status,
        outcome=record.outcome,
        total_s=round(record.age_s, 4),
        key=scope.get(KEY, ""),
        model=model,
        dialect=record.dialect,
        operation=record.operation,
        stream=record.stream,
        replica=record.replica,
        moves=record.moves,
        queue_wait_s=_rounded(record.queue_wait_s),
        first_token_s=_rounded(record.first_token_s),
        inter_token_s=_rounded(sum(gaps) / len(gaps) if gaps else None),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


class Books(Protocol):
    """Who counts requests; `monitor.Monitor`."""

    def opened(self, record: Record) -> None: ...

    def closed(self, record: Record) -> str:
        """The label of the record's model."""


class Traces(Protocol):
    """Who makes spans of requests; `tracing.Spans`."""

    def ended(self, scope: Scope, line: Line, ended_ns: int) -> None: ...

    def close(self) -> None: ...


class RequestLog:
    """Middleware: makes the record, and writes its line when the answer is over."""

    def __init__(self, app: ASGIApp, books: Books, clock: Clock = time.monotonic, traces: Traces | None = None) -> None:
        self._app = app
        self._books = books
        self._clock = clock
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            if self._traces is not None:  # the server ends
                await asyncio.to_thread(self._traces.close)
            return
        record = Record(self._clock)
        self._books.opened(record)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        token = _current.set(record)
        try:
            await self._app(scope, receive, noted)
        except BaseException:
            record.outcome = ABORTED
            raise
        finally:
            _current.reset(token)
            model = self._books.closed(record)
            # A look at the health, the metrics or the page is no request of a model's.
            of_model = bool(record.operation) or record.outcome != OK
            level = logging.INFO if of_model else logging.DEBUG
            if logger.isEnabledFor(level):
                logger.log(level, "%s", msgspec.json.encode(line(record, scope, model)).decode())
            if self._traces is not None and of_model:
                self._traces.ended(scope, line(record, scope, model), time.time_ns())
