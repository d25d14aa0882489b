"""What llama-server lets a request leave out, and its paths for it. All else is as it is at every server of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.http_answers import dialect_of, send_error
from deployments.middleware import ASGIApp, Message, Receive, Scope, Send, read_body
from protocols.errors import ServingError

_PATHS = {
    "/v1/chat/completions": "/chat/completions",  # one and the same at llama-server
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
}
_NEED_A_MODEL = frozenset({"/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"})
_NEED_A_LIMIT = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_LIMIT = 4096

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

BODY_WITHIN_S = 600.0
"""How long a client may take to send its body; llama-server's own limit for reading."""


class LooseBodies:
    """A model need not be named below `/v1`, and a message's `max_tokens` is 4096 where none is given."""

    def __init__(self, app: ASGIApp, model: str, max_body_bytes: int) -> None:
        self._app = app
        self._model = model
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATHS.get(scope.get("path", ""), scope.get("path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in _NEED_A_MODEL | _NEED_A_LIMIT:
            await self._app(scope, receive, send)
            return
        defaults: dict[str, Any] = {"model": self._model}
        if path in _NEED_A_LIMIT:
            defaults["max_tokens"] = _LIMIT
        try:
            body = await read_body(scope, receive, self._max_body_bytes, BODY_WITHIN_S)
        except ServingError as error:
            await send_error(send, error, dialect_of(scope), "")
            return
        if body is not None:
            plain = [header for header in scope["headers"] if header[0] not in (b"content-encoding", b"content-length")]
            changed = {**scope, "path": path, "headers": plain}
            await self._app(changed, _again(completed(body, defaults), receive), send)


def completed(body: bytes, defaults: Mapping[str, Any]) -> bytes:
    """With those of the `defaults` that the JSON object in `body` lacks; what is no such object stays as it is."""
    try:
        fields = _decoder.decode(body)
    except msgspec.MsgspecError:
        return body  # the endpoint says what is wrong with it
    missing = {name: value for name, value in defaults.items() if bytes(fields.get(name, b"null")).strip() == b"null"}
    return msgspec.json.encode({**fields, **missing}) if missing else body


def _again(body: bytes, receive: Receive) -> Receive:
    """`body` first, and then what comes after it."""
    unread = [body]

    async def next_message() -> Message:
        return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

    return next_message
