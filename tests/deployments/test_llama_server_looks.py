"""The metrics and the page of `tokenyard-llama-server`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.llama_server.looks import Looks
from deployments.local import LocalPool
from deployments.monitor import Monitor
from deployments.settings import GatewaySettings
from tests.deployments.http_support import CHAT, client
from tests.deployments.support import chat_body


@pytest.fixture
async def pool() -> AsyncIterator[LocalPool]:
    backend = FakeBackend(FakeSettings(tokens=5))
    await backend.start()
    yield LocalPool({"m": backend}, {"m": 4})
    await backend.aclose()


def looks(pool: LocalPool, *, metrics: bool = True, page: bool = True) -> httpx.AsyncClient:
    monitor = Monitor(pool)
    app = build_app(pool, GatewaySettings(), echo_request_id=True, monitor=monitor)
    return client(Looks(app, pool, monitor, metrics=metrics, page=page))


def value(response: httpx.Response, name: str) -> float:
    (line,) = (line for line in response.text.splitlines() if line.startswith(f"llamacpp:{name} "))
    return float(line.rpartition(" ")[2])


async def test_metrics_are_shown_where_they_were_asked_for(pool: LocalPool) -> None:
    async with looks(pool, metrics=False) as http:
        refused = await http.get("/metrics")
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")


async def test_rates_are_since_the_last_look_and_counts_since_the_start(pool: LocalPool) -> None:
    async with looks(pool) as http:
        await http.post(CHAT, content=chat_body())
        first, second = await http.get("/metrics"), await http.get("/metrics")
    assert int(first.headers["process-start-time-unix"]) > 1.7e9
    assert value(first, "predicted_tokens_seconds") > 0 == value(second, "predicted_tokens_seconds")
    assert value(first, "tokens_predicted_total") == value(second, "tokens_predicted_total") == 5


async def test_the_page_is_for_everybody_or_off(pool: LocalPool) -> None:
    async with looks(pool) as http:
        assert (await http.get("/")).text.startswith("<!doctype html>")
    async with looks(pool, page=False) as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.get("/health")).status_code == 200
