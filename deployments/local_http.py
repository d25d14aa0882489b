"""What `serve --local` adds to its HTTP server: bounds on how long, and how large, the head of a request may be.

uvicorn has neither: it waits for a head as long as its client likes, and keeps all that comes of it. Once the head is
there the application knows of the request, and its own bounds hold.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from deployments.http_protocol import ChunkingProtocol

HEAD_WITHIN_S = 10.0
"""From the connection, or the first byte of a later request on it, to the end of the headers."""

MAX_HEAD_BYTES = 64 * 2**10
"""Of what is not over yet: a larger one that comes at once is left to `max_header_bytes`, which says so better."""


class GuardedProtocol(ChunkingProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        """In no dialect: a head that is not over says too little of which."""
        self._head_is_there()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # nobody's answer is in between
            self.transport.write(
                f"HTTP/1.1 {status} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
            )
        self.transport.close()
