"""What llama-server shows to those who look on: its metrics, if it was started with `--metrics`, and its page."""

from __future__ import annotations

import time

from deployments.http_answers import dialect_of, send_body, send_error
from deployments.metrics import CONTENT_TYPE
from deployments.middleware import ASGIApp, Receive, Scope, Send
from deployments.models import ModelPool, the_only_model
from deployments.monitor import Monitor
from protocols.calls import GetAllStats
from protocols.errors import NotFound, NotSupported, ServingError
from protocols.llamacpp_native.metrics import text


class Looks:
    """`/metrics` in llama.cpp's names, and at `/` a page for everybody, not only for browsers."""

    def __init__(self, app: ASGIApp, pool: ModelPool, monitor: Monitor, *, metrics: bool, page: bool) -> None:
        self._app = app
        self._pool = pool
        self._monitor = monitor
        self._metrics = metrics
        self._page = page
        self._seen = monitor.llamacpp_totals()
        self._started = str(int(time.time())).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            try:
                match scope["path"]:
                    case "/metrics":
                        await self._show_metrics(send)
                        return
                    case "/":
                        scope = self._as_for_a_browser(scope)
            except ServingError as error:
                await send_error(send, error, dialect_of(scope), "")
                return
        await self._app(scope, receive, send)

    async def _show_metrics(self, send: Send) -> None:
        """Rates are over what was computed since somebody looked last."""
        if not self._metrics:
            raise NotSupported("This server does not support metrics endpoint. Start it with `--metrics`")
        stats = await self._pool.call(GetAllStats("metrics", the_only_model(self._pool)))
        totals, before = self._monitor.llamacpp_totals(), self._seen
        self._seen = totals
        body = text([replica.stats for replica in stats], totals, before)
        await send_body(send, 200, CONTENT_TYPE, body, [(b"Process-Start-Time-Unix", self._started)])

    def _as_for_a_browser(self, scope: Scope) -> Scope:
        if not self._page:
            raise NotFound("The page is off (--no-ui).")
        rest = [header for header in scope["headers"] if header[0] != b"accept"]
        return {**scope, "headers": [*rest, (b"accept", b"text/html")]}
