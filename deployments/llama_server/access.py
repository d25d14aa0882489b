"""Who may use a server, as llama-server has it: API keys on the command line, and web pages by their origin."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import msgspec

from deployments.http_answers import dialect_of, send_error
from deployments.middleware import ASGIApp, Message, Receive, Scope, Send, header
from protocols.errors import Unauthorized

_PUBLIC = frozenset({"/health", "/v1/health", "/"})


class ApiKeys:
    """Everything but a sign of life needs one of `keys`, as a bearer or in `X-Api-Key`. Without keys, nothing does."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in _PUBLIC and not self._known(scope):
            await send_error(send, Unauthorized("Invalid API Key"), dialect_of(scope), "")
        else:
            await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = header(scope, b"x-api-key") or header(scope, b"authorization").removeprefix(b"Bearer ")
        # All of them are compared, so that the time it takes says nothing.
        return any([hmac.compare_digest(given, key) for key in self._keys])


class CorsOptions(msgspec.Struct, frozen=True):
    """`origins`: `*` is all, `localhost` those of this machine, anything else is sent as it is."""

    origins: str
    methods: str
    headers: str
    credentials: bool


class Cors:
    """Answers preflights, which bring no key, and says with every answer which page may read it."""

    def __init__(self, app: ASGIApp, options: CorsOptions) -> None:
        self._app = app
        self._options = options
        self._preflight = [
            (b"Access-Control-Allow-Credentials", b"true" if options.credentials else b"false"),
            (b"Access-Control-Allow-Methods", options.methods.encode()),
            (b"Access-Control-Allow-Headers", options.headers.encode()),
            (b"content-length", b"0"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(header(scope, b"origin"))
        grant = [(b"Access-Control-Allow-Origin", allowed)] if allowed else []
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 200, "headers": [*grant, *self._preflight]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_with_grant(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *grant]
            await send(message)

        await self._app(scope, receive, send_with_grant)

    def _allowed(self, origin: bytes) -> bytes:
        if self._options.origins == "*" and self._options.credentials:
            return origin  # browsers take no "*" where credentials are allowed
        if self._options.origins == "localhost":
            return origin if _is_local(origin.decode("latin-1")) else b""
        return self._options.origins.encode()


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Cased(bytes):
    """A name of which uvicorn, which writes what `lower` says, writes what it is."""

    def lower(self) -> Self:
        return self


def keeping_case(app: ASGIApp) -> ASGIApp:
    """Headers go out in the case that they have here: some of llama-server's clients look for no other than its own."""

    async def kept(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_kept(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name if name.islower() else _Cased(name), value) for name, value in message["headers"]
                ]
            await send(message)

        await app(scope, receive, send_kept)

    return kept
