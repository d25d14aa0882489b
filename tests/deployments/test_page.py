"""The page at `/`: who gets it, what it may do, and a person's visit in a real browser."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uvicorn

from backends.answers import answer
from backends.fake import FakeBackend, FakeSettings
from deployments.http import build_app
from deployments.middleware import ASGIApp, Receive, Scope, Send
from deployments.models import ModelEntry
from deployments.monitor_endpoints import PAGE
from deployments.settings import GatewaySettings
from protocols.calls import AnswerT, Question
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink
from tests.deployments import chromium
from tests.deployments.chromium import Chromium
from tests.deployments.http_support import app, client
from tests.deployments.local_server import free_port

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}

# --- without a browser ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
async def test_programs_get_what_they_always_got(accept: str) -> None:
    async with client(app()) as http:
        response = await http.get("/", headers={"accept": accept})
    assert (response.json(), response.headers["vary"]) == ({"status": "ok"}, "accept")


async def test_browsers_get_the_page_and_nothing_may_be_loaded_into_it() -> None:
    async with client(app()) as http:
        response = await http.get("/", headers=BROWSER)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.content == PAGE
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "*" not in policy


def test_the_page_names_no_other_place() -> None:
    assert re.findall(rb"(?:https?:)?//[a-z]", PAGE) == []
    assert re.findall(rb"""(?:src|href)=["'](?!data:)""", PAGE) == []
    assert b"innerHTML" not in PAGE


# --- a visit ----------------------------------------------------------------------------------------------------------


class Scaled:
    """A `ModelPool` of two models on fake engines, one of them with as many replicas as a test says."""

    def __init__(self) -> None:
        self.backends = {
            "first": FakeBackend(FakeSettings(slots=2)),
            "second": FakeBackend(FakeSettings(slots=4, ttft_s=0.05, inter_token_s=0.02, tokens=5000)),
        }
        self.replicas = 1

    def models(self) -> Sequence[ModelEntry]:
        return [ModelEntry("first", 7), ModelEntry("second", 7, replicas=self.replicas)]

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        async with aclosing(self.backends[request.model].generate(request)) as frames:
            async for frame in frames:
                yield frame

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        return await answer(self.backends[call.model], call)


def with_key(app: ASGIApp, key: str) -> ASGIApp:
    """As the server is where keys are needed: everything but the page itself."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization") if scope["type"] == "http" else None
        if scope["type"] != "http" or scope["path"] == "/" or given == f"Bearer {key}".encode():
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error":{"message":"The API key is not valid."}}'})

    return guarded


class Served(msgspec.Struct):
    url: str
    pool: Scaled


@asynccontextmanager
async def running(pool: Scaled) -> AsyncIterator[None]:
    for backend in pool.backends.values():
        await backend.start()
    try:
        yield
    finally:
        for backend in pool.backends.values():
            await backend.aclose()


@pytest.fixture
def served() -> Iterator[Served]:
    """A server in a thread of its own: the browser is driven by this one."""
    pool, port = Scaled(), free_port()
    app = with_key(build_app(pool, GatewaySettings(), echo_request_id=True), "secret")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="off"))

    async def serve() -> None:
        async with running(pool):
            await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield Served(f"http://127.0.0.1:{port}/", pool)
    server.should_exit = True
    thread.join()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    if chromium.PROGRAM is None:
        pytest.skip("needs Chromium")
    browser = Chromium(tmp_path / "profile")
    yield browser
    browser.close()


def cell(model: str, column: int) -> str:
    return f"document.querySelector('tr[data-model={model}]')?.cells[{column}].textContent"


def focus(id: str) -> str:
    return f"document.getElementById('{id}').focus()"


def test_a_visit(served: Served, browser: Chromium, tmp_path: Path) -> None:
    """Somebody opens the page, gives a key, picks a model, streams an answer, and sees the model grow."""
    browser.open(served.url)
    assert browser.wait("document.querySelector('#note.error')?.textContent") == "The API key is not valid."
    browser.run(focus("key"))
    browser.type("secret")
    assert browser.wait(cell("second", 2)) == "1"
    assert browser.run(cell("second", 1)) == "ready"
    assert browser.run("[...document.getElementById('model').options].map(o => o.value)") == ["first", "second"]
    shots = [browser.screenshot(tmp_path / "models.png")]

    browser.run("document.getElementById('model').value = 'second'; document.getElementById('limit').value = 60")
    browser.run(focus("prompt"))
    browser.type("tell me <b>something</b>")
    browser.press_enter()
    lengths = iter_until_done(browser, "document.querySelector('.turn.assistant')?.textContent.length ?? 0")
    assert len(set(lengths)) > 2, "it grows while it streams"
    assert browser.run("document.querySelector('.turn.user').textContent") == "tell me <b>something</b>"
    assert re.search(
        r"first token after .* s · \d+ prompt tokens", browser.wait("document.getElementById('speed').innerText")
    )
    assert browser.run("document.querySelectorAll('.turn.error').length") == 0
    shots.append(browser.screenshot(tmp_path / "answer.png"))

    served.pool.replicas = 3
    assert browser.wait(f"{cell('second', 2)} === '3'")
    shots.append(browser.screenshot(tmp_path / "replicas.png"))
    assert len(set(shots)) == 3 and all(shot.startswith(b"\x89PNG") for shot in shots)
    assert [error for error in browser.errors if "401" not in error] == []


def iter_until_done(browser: Chromium, script: str) -> list[int]:
    """The values of `script` while the page answers."""
    browser.wait(f"{script} > 0")
    seen = []
    while browser.run("!document.getElementById('stop').disabled"):
        seen.append(browser.run(script))
    return [*seen, browser.run(script)]


def test_an_answer_can_be_stopped(served: Served, browser: Chromium) -> None:
    browser.open(served.url)
    browser.wait("document.querySelector('#note.error') !== null")
    browser.run(focus("key"))
    browser.type("secret")
    browser.wait("document.getElementById('model').options.length === 2")
    browser.run("document.getElementById('model').value = 'second'; document.getElementById('limit').value = 5000")
    browser.run("document.getElementById('prompt').value = 'go on'; document.getElementById('ask').requestSubmit()")
    browser.wait("document.querySelector('.turn.assistant') !== null")
    browser.run("document.getElementById('stop').click()")
    browser.wait("!document.getElementById('send').disabled")
    assert browser.wait(f"{cell('second', 3)} === '0 of 4'"), "its slot is free"
