"""How anything is answered over HTTP: bodies, errors in the words of a dialect, and clients that do not wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
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


class errors_answered:
    """What the block raises before its answer has begun is the answer.

    This and the next are no generators, because each stream holds both: a generator takes 1 KB.
    """

    __slots__ = ("_codec", "_request_id", "_send")

    def __init__(self, send: Send, codec: Codec[Any], request_id: str) -> None:
        self._send = send
        self._codec = codec
        self._request_id = request_id

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        match error:
            case ServingError():
                await send_error(self._send, error, self._codec, self._request_id)
                return True
            case ClientGone() | asyncio.CancelledError():
                return False
            case Exception():
                # The last boundary before the client: the detail goes to the log.
                logger.error("request %s failed", self._request_id, exc_info=error)
                internal = InternalError(InternalError.PUBLIC_MESSAGE)
                await send_error(self._send, internal, self._codec, self._request_id)
                return True
        return False


class cancelled_when_client_leaves:
    """Cancels the block when the client disconnects, and turns that into `ClientGone`."""

    __slots__ = ("_block", "_left", "_receive", "_watcher")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False

    async def __aenter__(self) -> None:
        block = asyncio.current_task()
        assert block is not None
        self._block = block
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watcher.cancel()
        if isinstance(error, asyncio.CancelledError) and self._left and self._block.uncancel() == 0:
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._block.cancel()
