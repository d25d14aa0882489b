"""uvicorn's side of a connection, with a short way for the parts of a body that is being streamed.

An ASGI `send` is a coroutine, and behind Serve one around three others: for a token they take longer than its JSON. So
a request's scope offers a `ChunkWriter` beside it, for parts in the middle of a body. Where a server has none, as with
Serve's Python proxy, everything goes by `send`.
"""

from __future__ import annotations

import asyncio
from typing import cast

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deployments.middleware import Scope

CHUNKS = "tokenyard.chunks"
"""Key in the ASGI scope under which the `ChunkWriter` stands, where there is one."""


class ChunkWriter:
    """Of one response. Belongs to the event loop of its connection."""

    __slots__ = ("_cycle", "loop")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self.loop = loop

    def __call__(self, body: bytes) -> bool:
        """Does what `send` would with `body`, which is not empty and not the last part, or says that it has to wait."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        # RFC 9112, 7.1: "chunk = chunk-size [ chunk-ext ] CRLF chunk-data CRLF"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


class ChunkingProtocol(HttpToolsProtocol):
    """One connection."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope and self.scope["method"] != "HEAD":
            cast(Scope, self.scope)[CHUNKS] = ChunkWriter(self.cycle, self.loop)


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """The one of this request, if it is of the loop that runs."""
    writer: ChunkWriter | None = scope.get(CHUNKS)
    return writer if writer is not None and writer.loop is asyncio.get_running_loop() else None


def install() -> None:
    """In a gateway's process: Serve makes its server there, and lets uvicorn choose the protocol."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{ChunkingProtocol.__name__}"
