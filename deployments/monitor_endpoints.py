"""The endpoints for those who look on: metrics for machines; for people a page, and the state of things behind it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deployments import granted
from deployments.http_answers import query_value, send_body, send_json
from deployments.metrics import CONTENT_TYPE
from deployments.middleware import Receive, Scope, Send, header
from deployments.models import ModelEntry, ModelPool
from deployments.monitor import Monitor
from deployments.settings import GatewaySettings

PAGE = Path(__file__).with_name("page.html").read_bytes()
"""One file, with nothing from elsewhere: it works without a network, and nobody else's code sees a key."""


def _hashes(element: bytes) -> str:
    inline = re.findall(rb"<%b>(.*?)</%b>" % (element, element), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inline)


_POLICY = (
    f"default-src 'none'; script-src {_hashes(b'script')}; style-src {_hashes(b'style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing runs but what is in the file, also if a model's answer found its way into the page as markup."""

_PAGE_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
)


class MonitorEndpoints:
    """Nobody is shown anything of a model that their key may not use."""

    def __init__(self, monitor: Monitor, pool: ModelPool, settings: GatewaySettings) -> None:
        self._monitor = monitor
        self._pool = pool
        self._settings = settings

    async def home(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The page for browsers; for all others whether somebody is here."""
        if b"text/html" in header(scope, b"accept"):
            await send_body(send, 200, b"text/html; charset=utf-8", PAGE, _PAGE_HEADERS)
        else:
            await send_json(send, 200, b'{"status":"ok"}', [(b"vary", b"accept")])

    async def status(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, msgspec.json.encode(await self._monitor.status(self._seen(scope))))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """With `?model=` those that llama.cpp has, of one model and without labels."""
        if model := query_value(scope, "model"):
            text = await self._monitor.llamacpp_metrics(model, self._seen(scope))
        else:
            text = await self._monitor.metrics(granted.models_of(self._pool, scope))
        await send_body(send, 200, CONTENT_TYPE, text)

    def _seen(self, scope: Scope) -> Sequence[ModelEntry]:
        return granted.pool_of(self._pool, self._settings, scope).models()
