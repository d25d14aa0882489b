"""Which web pages may read the answers in a browser: cross-origin resource sharing, as the Fetch standard has it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable
from urllib.parse import urlsplit

from deployments.middleware import ASGIApp, Message, Receive, Scope, Send, header
from deployments.settings import CorsPolicy

_Headers = list[tuple[bytes, bytes]]

_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, request-id, retry-after"
"""What a page may read of an answer's headers, besides those that it may anyway."""

_MAX_AGE_S = 600
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_NAMES_BYTES = 4096


class Cors:
    """Answers preflights, which never need a key, and says with each answer whether its page may read it.

    A preflight is granted the headers it asks for: SDKs send a dozen of their own (`x-stainless-*`, `anthropic-beta`),
    and more with every version. Where keys come from a page they are in a header, so no cookie is ever allowed for.
    """

    def __init__(self, app: ASGIApp, policy: CorsPolicy) -> None:
        self._app = app
        self._policy = policy

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Not a coroutine itself: what only passes requests on is not to be kept by each of their streams."""
        origin = header(scope, b"origin") if scope["type"] == "http" else b""
        return self._granted(origin, scope, receive, send) if origin else self._app(scope, receive, send)

    async def _granted(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await send({"type": "http.response.start", "status": 204, "headers": self._preflight(scope, origin)})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        extra = self._grant(origin)
        if not extra:
            await self._app(scope, receive, send)
            return

        async def send_with_grant(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await self._app(scope, receive, send_with_grant)

    def _preflight(self, scope: Scope, origin: bytes) -> _Headers:
        headers = self._origin(origin)
        if not headers:
            return []  # the browser takes that for a no
        headers += [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", b"%d" % _MAX_AGE_S)]
        wanted = header(scope, b"access-control-request-headers")
        if len(wanted) <= _MAX_NAMES_BYTES and _HEADER_NAMES.fullmatch(wanted):
            headers.append((b"access-control-allow-headers", wanted))
        if header(scope, b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def _grant(self, origin: bytes) -> _Headers:
        headers = self._origin(origin)
        return [*headers, (b"access-control-expose-headers", _EXPOSED)] if headers else []

    def _origin(self, origin: bytes) -> _Headers:
        if not isinstance(self._policy, str) and "*" in self._policy:
            return [(b"access-control-allow-origin", b"*")]
        if not allows(self._policy, origin.decode("latin-1")):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


def allows(policy: CorsPolicy, origin: str) -> bool:
    match policy:
        case "off":
            return False
        case "loopback":
            return _is_loopback(origin)
        case _:
            return origin.lower() in policy or "*" in policy


def _is_loopback(origin: str) -> bool:
    """A page that came from this machine, whatever its port: `http://localhost:3000`."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):
        return False
    return is_loopback_host(host)


def is_loopback_host(host: str) -> bool:
    """Whether only this machine reaches it: `localhost`, and what is below it, and the addresses of RFC 1122 and 4291.

    What a name other than these stands for is not looked up: that may be another thing tomorrow.
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
