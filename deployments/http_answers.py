"""How anything is answered over HTTP: bodies, errors in the words of a dialect, and clients that do not wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

from deployments import content_encoding, request_log
from deployments.middleware import Message, Receive, Scope, Send, read_body
from deployments.settings import GatewaySettings
from protocols import anthropic_messages, llamacpp_native, openai_chat
from protocols.codec import Codec
from protocols.errors import InternalError, ServingError, UnsupportedMediaType

logger = logging.getLogger(__name__)

JSON = b"application/json"

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def request_body(scope: Scope, receive: Receive, settings: GatewaySettings) -> bytes:
    """Raises `ClientGone`, and what `read_body` raises."""
    body = await read_body(scope, receive, settings.max_body_bytes, settings.body_within_s)
    if body is None:
        raise ClientGone
    return body


def query_value(scope: Scope, name: str) -> str:
    """The last value of a query parameter; "" without it."""
    values: list[str] = parse_qs(scope["query_string"].decode("latin-1")).get(name, [""])
    return values[-1]


def dialect_of(scope: Scope) -> Codec[Any]:
    """The one that words what belongs to no dialect: by what the caller says of itself, and by the path."""
    path = scope["path"]
    if path.startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return anthropic_messages.CODEC
    return openai_chat.CODEC if path.startswith("/v1/") else llamacpp_native.COMPLETION


def json_endpoint(answer: Callable[[Scope], Awaitable[bytes]]) -> Endpoint:
    """An endpoint whose whole work is to say what its body is."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, await answer(scope))

    return endpoint


async def send_json(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await send_body(send, status, JSON, body, headers)


async def send_body(
    send: Send, status: int, content_type: bytes, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(
    send: Send, error: ServingError, codec: Codec[Any], request_id: str, extra: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    request_log.current().failed(error)
    headers = list(extra)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if isinstance(error, UnsupportedMediaType):
        # RFC 9110, 15.5.16: this header "ought to be used to indicate which … codings would have been accepted".
        headers.append((b"accept-encoding", content_encoding.ACCEPTED.encode()))
    status = anthropic_messages.status(error) if codec.name == anthropic_messages.CODEC.name else error.status
    await send_json(send, status, codec.error(error, request_id), headers)


@asynccontextmanager
async def errors_answered(send: Send, codec: Codec[Any], request_id: str) -> AsyncIterator[None]:
    """What the block raises before its answer has begun is the answer."""
    try:
        yield
    except ServingError as error:
        await send_error(send, error, codec, request_id)
    except (ClientGone, asyncio.CancelledError):
        raise
    except Exception:
        # The last boundary before the client: the detail goes to the log.
        logger.exception("request %s failed", request_id)
        await send_error(send, InternalError(InternalError.PUBLIC_MESSAGE), codec, request_id)


@asynccontextmanager
async def cancelled_when_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects, and turns that into `ClientGone`."""
    block = asyncio.current_task()
    assert block is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        block.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and block.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
