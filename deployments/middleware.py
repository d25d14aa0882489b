"""Pure ASGI middleware around the route table, and the one place a request body is read."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from deployments import content_encoding
from deployments.eager import Begun
from protocols.errors import PayloadTooLarge, RequestTimeout

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = "tokenyard.request_id"
"""Key in the ASGI scope under which the request's id stands."""

KEY = "tokenyard.key"
"""Key in the ASGI scope under which the id of the caller's API key stands. Without keys, everything is everybody's."""

ACCOUNT = "tokenyard.account"
"""Key in the ASGI scope under which stands what the caller's API key may do, and has done: a `limits.Account`."""

_INLINE_SIZE = 64 * 2**10
"""Compressed bodies up to this are decompressed on the event loop: it takes a millisecond or two."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestId:
    """Gives every request an id: the caller's `x-request-id` if it is sane, else a new one.

    `echo` puts it on the answer; behind Serve it is off, since Serve gives out the ids and echoes them itself.
    """

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _SANE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope[REQUEST_ID] = request_id.decode()
        if not self._echo:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def header(scope: Scope, name: bytes) -> bytes:
    """All values of a header, as one; b"" without it."""
    return b", ".join(value for key, value in scope["headers"] if key == name)


async def read_body(scope: Scope, receive: Receive, limit: int, within_s: float) -> bytes | None:
    """The whole request body, decompressed, or None if the client left while sending it.

    `PayloadTooLarge` past `limit` bytes, on the wire or out of it; `RequestTimeout` if it is not all there in time.
    """
    names = content_encoding.codings(header(scope, b"content-encoding"))
    receiving = Begun(_received(receive, limit))
    if not receiving.done:  # of a small one the server has mostly everything when it has the headers
        try:
            async with asyncio.timeout(within_s):
                await receiving
        except TimeoutError:
            raise RequestTimeout(f"The request body did not arrive within {within_s:g} seconds.") from None
    body = receiving.value
    if not names or body is None:
        return body
    if len(body) <= _INLINE_SIZE:
        return content_encoding.decoded(body, names, limit)
    return await asyncio.to_thread(content_encoding.decoded, body, names, limit)


async def _received(receive: Receive, limit: int) -> bytes | None:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise PayloadTooLarge(f"The request body is larger than {limit} bytes.")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
