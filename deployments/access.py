"""Who is let in: a key with every request, and the limits that its key has."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from deployments import caller
from deployments.http_answers import dialect_of, send_error
from deployments.keys import ApiKey, KeyFile, KeyRing
from deployments.limits import Accounts
from deployments.middleware import ACCOUNT, KEY, REQUEST_ID, ASGIApp, Receive, Scope, Send, header
from deployments.settings import GatewaySettings
from protocols import anthropic_messages
from protocols.errors import HeadersTooLarge, ServingError, Unauthorized

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/api/hello"})
"""What may be read without a key: whether somebody is here, and nothing else."""

LOOKING_PATHS = frozenset({"/metrics", "/api/status"})
"""What is read again and again by those who look on: it needs a key, and uses nothing of what the key may do."""


class Access:
    """Without a file of keys everybody may do everything, and only the size of headers is looked at."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `ConfigError` if the file of keys cannot be used."""
        self._app = app
        self._max_header_bytes = settings.max_header_bytes
        self._keys = None if settings.keys is None else KeyFile(Path(settings.keys), clock)
        self._accounts = Accounts(clock)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Not a coroutine itself, as `Cors`."""
        if scope["type"] == "http":
            try:
                self._check_headers(scope)
            except ServingError as error:
                return _refuse(scope, send, error)
            reads = scope["method"] in ("GET", "HEAD")
            if self._keys is not None and not (reads and scope["path"] in OPEN_PATHS):
                return self._with_key(self._keys, not (reads and scope["path"] in LOOKING_PATHS), scope, receive, send)
        return self._app(scope, receive, send)

    async def _with_key(self, keys: KeyFile, counts: bool, scope: Scope, receive: Receive, send: Send) -> None:
        entered = None
        try:
            account = self._accounts.of(authenticated(scope, await keys.ring()))
            scope[KEY], scope[ACCOUNT] = account.key.id, account
            if counts:
                account.enter()
                entered = account
        except ServingError as error:
            await _refuse(scope, send, error)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if entered is not None:
                entered.leave()

    def _check_headers(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise HeadersTooLarge(f"The headers are larger than {self._max_header_bytes} bytes.")


def authenticated(scope: Scope, ring: KeyRing) -> ApiKey:
    """Whose request it is, by either of the headers that clients put a key into. Raises `Unauthorized`.

    Some send both; one that is right is enough.
    """
    presented = _presented(scope)
    if not presented:
        raise Unauthorized("There is no API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")
    found = [key for value in presented if (key := ring.find(value)) is not None]
    if not found:
        raise Unauthorized("The API key is not valid.")
    if len(presented) > 1 and (len(found) < len(presented) or len({key.id for key in found}) > 1):
        logger.warning("request %s: its headers have different API keys; it is %s's", scope[REQUEST_ID], found[0].id)
    return found[0]


def _presented(scope: Scope) -> list[bytes]:
    """Each key once."""
    values: dict[bytes, None] = {}
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                values[key.strip()] = None
        elif name == b"x-api-key" and value.strip():
            values[value.strip()] = None
    return list(values)


async def _refuse(scope: Scope, send: Send, error: ServingError) -> None:
    codec, extra = dialect_of(scope), []
    if codec is anthropic_messages.CODEC:
        send = caller.with_request_id(send, scope[REQUEST_ID])
    if isinstance(error, Unauthorized):
        # RFC 9110, 15.5.2: a 401 "MUST send a WWW-Authenticate header field"; RFC 6750, 3.1: with the error only where
        # there was a key at all.
        given = bool(header(scope, b"authorization") or header(scope, b"x-api-key"))
        extra = [(b"www-authenticate", b'Bearer realm="tokenyard"' + (b', error="invalid_token"' if given else b""))]
    await send_error(send, error, codec, scope[REQUEST_ID], extra)
