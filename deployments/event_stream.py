"""One answer as server-sent events: when its headers go out, what fills its silences, and who is cut off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from deployments.eager import Begun, finish
from deployments.http_answers import ClientGone
from deployments.middleware import Send
from deployments.settings import GatewaySettings
from protocols import sse
from protocols.codec import Encoder, frame_feed
from protocols.errors import ServingError
from protocols.events import Failed, Finished, Frame, IllegalEvent


class EventStream:
    """One SSE answer: headers at the first frame or after `headers_after_s`, then keep-alives through every silence.

    `keepalive_s` is the client's own wish for how long a silence may be.

    The timer is one `call_later` per silence, not a task per frame; the lock keeps keep-alives from overtaking headers.
    It also cuts off a client that has not taken a write for `stalled_client_s`: the block is cancelled, and ends with
    `ClientGone`.
    """

    __slots__ = (
        "_beat", "_block", "_chunks", "_encoder", "_feed", "_keepalive_s", "_last", "_last_write", "_lock", "_loop",
        "_rest_of_write", "_send", "_settings", "_stalled", "_timer", "_writing_since", "started"
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        encoder: Encoder,
        settings: GatewaySettings,
        keepalive_s: float | None = None,
        chunks: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`chunks` writes what need not wait, if it can (`http_protocol.ChunkWriter`)."""
        self._send = send
        self._chunks = chunks
        self._encoder = encoder
        self._feed = frame_feed(encoder)
        self._settings = settings
        self._keepalive_s = settings.keepalive_s if keepalive_s is None else keepalive_s
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._last_write = self._loop.time()
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._rest_of_write: asyncio.Task[None] | None = None
        self._block: asyncio.Task[Any] | None = None
        self._stalled = False
        self._last = b""
        """Of a choice that is complete."""
        self.started = False

    async def __aenter__(self) -> EventStream:
        self._block = asyncio.current_task()
        self._arm(self._settings.headers_after_s)
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                await self._end()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in (self._beat, self._rest_of_write):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if self._stalled and self._block is not None and self._block.uncancel() == 0:
                raise ClientGone from None

    async def write(self, frame: Frame) -> None:
        data = self._feed(frame)
        if self.started and frame.events and type(frame.events[-1]) is Finished:
            self._last += data  # leaves with the end of the answer, or with what comes before that
        else:
            await self._put(data)

    def take(self, frame: Frame) -> bool:
        """Write it from where nobody can wait, which most writes need not. False where it has to be written by `write`.

        A task that is woken for every token costs more than the token's way from the channel to the socket.
        """
        if not self.started or self._last or self._lock.locked() or self._rest_of_write is not None:
            return False
        if not (data := self._feed(frame)):
            return True
        self._last_write = self._loop.time()
        if self._chunks is not None and self._chunks(data):
            return True
        writing = Begun(self._send({"type": "http.response.body", "body": data, "more_body": True}))
        if writing.done:
            return True
        self._writing_since = self._last_write
        self._rest_of_write = self._loop.create_task(finish(writing))
        self._rest_of_write.add_done_callback(self._written)
        return True

    def _written(self, rest: asyncio.Task[None]) -> None:
        if not rest.cancelled() and rest.exception() is None:
            self._rest_of_write = self._writing_since = None

    async def fail(self, error: ServingError) -> None:
        """Tells the client; not, if its answer was complete already and something failed behind it."""
        try:
            data = self._encoder.feed(Failed(error.info))
        except IllegalEvent:
            return
        await self._put(data)

    async def _end(self) -> None:
        async with self._lock:
            if self._rest_of_write is not None:
                await self._rest_of_write
            self._writing_since = self._loop.time()
            await self._send({"type": "http.response.body", "body": self._last, "more_body": False})
            self._writing_since = None

    async def _put(self, data: bytes) -> None:
        async with self._lock:
            if self._rest_of_write is not None:
                await self._rest_of_write
            self._writing_since = now = self._loop.time()
            if not self.started:
                self.started = True
                self._arm(self._rest)
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            data, self._last = self._last + data, b""
            if data:
                self._last_write = now
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._writing_since = None

    @property
    def _rest(self) -> float:
        """How long nobody need look: also where no keep-alives are wanted, a stalled client must be seen."""
        return min(self._keepalive_s, self._settings.keepalive_s)

    def _arm(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now, delay = self._loop.time(), self._rest
        if self._writing_since is not None:
            left = self._writing_since + self._settings.stalled_client_s - now
            if left <= 0:
                assert self._block is not None
                self._stalled = True
                self._block.cancel()
                return
            delay = min(delay, left)
        elif self.started and (left := self._last_write + self._keepalive_s - now) > 0:
            delay = min(delay, left)
        else:
            data = self._encoder.keepalive() if self._keepalive_s < math.inf else b""  # headers alone are no keep-alive
            self._beat = self._loop.create_task(self._put(data))
        self._arm(delay)


_STREAM_HEADERS = [
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    # nginx, as an ingress, would otherwise collect the stream: https://nginx.org/en/docs/http/ngx_http_proxy_module.html
    (b"x-accel-buffering", b"no"),
]
