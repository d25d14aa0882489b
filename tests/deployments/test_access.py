"""Requests with and without keys, in every dialect: who is let in, what a key sees, and what it may use."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.fake import FakeBackend, FakeSettings
from deployments import access
from deployments.http import HttpApp, build_app
from deployments.local import LocalPool
from deployments.middleware import KEY, ASGIApp, Receive, Scope, Send
from deployments.models import ModelEntry
from deployments.settings import GatewaySettings
from protocols.errors import ModelNotFound
from protocols.events import Frame
from protocols.request import Request
from protocols.sink import Sink
from tests.deployments.http_support import CHAT, MODELS, USER, app, client
from tests.deployments.key_support import ALICE, BOB, ROOT, bearer, entry, write_keys
from tests.deployments.support import HELLO, Exchange, ScriptedPool, Step, chat_body, eventually

ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER]}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/v1/responses", {"input": "Hi"}),
    ("/completion", {"prompt": "Hi"}),
    ("/chat/completions", {"messages": [USER]}),
]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(
        tmp_path / "keys",
        [entry("alice", ALICE, models=["m", "a", "gone"]), entry("bob", BOB), entry("root", ROOT, admin=True)],
    )


def locked(keys: Path, script: Sequence[Step] = HELLO, models: Sequence[ModelEntry] = (ModelEntry("m", 7),)) -> ASGIApp:
    return app(ScriptedPool(script, models), keys=str(keys))


def the_error(response: httpx.Response) -> dict[str, Any]:
    """The error of any dialect, once its envelope is what that dialect has."""
    body = response.json()
    path = response.request.url.path
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"]
        assert {"type", "message"} <= set(body["error"])
    elif path.startswith("/v1/"):
        assert set(body) == {"error"}
        assert {"message", "type", "param", "code"} <= set(body["error"])
    else:
        assert body["error"]["code"] == response.status_code
    return dict(body["error"])


# --- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize(
    "headers",
    [
        bearer(ALICE),
        {"Authorization": "bearer  ty-alice "},
        {"x-api-key": "ty-alice"},
        {"x-api-key": "ty-alice", **bearer(ALICE)},
        {"x-api-key": "ty-alice", **bearer(b"wrong")},
        {"x-api-key": "none", **bearer(ALICE)},
    ],
)
async def test_B80_B81_a_key_counts_in_either_header(
    keys: Path, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    async with client(locked(keys)) as http:
        assert (await http.post(path, json={"model": "m", **body}, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "told", "challenge"),
    [
        ({}, "There is no API key", 'Bearer realm="tokenyard"'),
        ({"authorization": "Bearer ty-wrong"}, "is not valid", 'Bearer realm="tokenyard", error="invalid_token"'),
        ({"x-api-key": "ty-wrong"}, "is not valid", 'Bearer realm="tokenyard", error="invalid_token"'),
        ({"authorization": "Basic ty-alice"}, "There is no", 'Bearer realm="tokenyard", error="invalid_token"'),
        ({"authorization": "Bearer "}, "There is no", 'Bearer realm="tokenyard", error="invalid_token"'),
    ],
)
@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_without_a_right_key_every_dialect_says_so(
    keys: Path, path: str, body: dict[str, Any], headers: dict[str, str], told: str, challenge: str
) -> None:
    pool = ScriptedPool(HELLO)
    async with client(app(pool, keys=str(keys))) as http:
        response = await http.post(path, json={"model": "m", **body}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == challenge
    assert the_error(response)["type"] == "authentication_error"
    assert told in the_error(response)["message"]
    assert "ty-wrong" not in response.text
    assert pool.requests == []
    assert pool.calls == []


def routes() -> list[tuple[str, str]]:
    table = HttpApp(ScriptedPool(), GatewaySettings())._routes
    return [(method, path) for path, methods in table.items() for method in methods]


async def test_every_route_but_the_open_ones_asks_for_a_key(keys: Path) -> None:
    async with client(locked(keys)) as http:
        for method, path in [*routes(), ("GET", "/v1/models/m"), ("GET", "/v1/responses/resp_1"), ("GET", "/none")]:
            status = (await http.request(method, path)).status_code
            assert (status == 401) is (path not in access.OPEN_PATHS), path
        for path in access.OPEN_PATHS:
            assert (await http.head(path)).status_code == 200
        assert (await http.post("/")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/v1/messages"])
async def test_B82_a_preflight_needs_no_key_and_its_page_may_read_a_401(keys: Path, path: str) -> None:
    page = {"origin": "http://localhost:3000"}
    asked = {"access-control-request-method": "GET", "access-control-request-headers": "authorization"}
    for cors in ("off", "loopback"):
        async with client(app(keys=str(keys), cors=cors)) as http:
            assert (await http.options(path, headers=page | asked)).status_code == 204
            refused = await http.get(path, headers=page)
            assert refused.status_code == 401
            assert refused.headers.get("access-control-allow-origin") == (page["origin"] if cors != "off" else None)


async def test_two_keys_in_one_request_are_the_first_ones_and_are_logged_without_either(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with client(locked(keys, models=[ModelEntry("m", 1), ModelEntry("z", 1)])) as http:
            listed = await http.get("/v1/models", headers={**bearer(ALICE), "x-api-key": BOB.decode()})
    assert [model["id"] for model in listed.json()["data"]] == ["m"]
    assert "different API keys; it is alice's" in caplog.text
    assert "ty-" not in caplog.text


async def test_the_keys_id_is_in_the_scope(keys: Path) -> None:
    seen: list[object] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope.get(KEY))

    settings = GatewaySettings(keys=str(keys))
    for path, headers in (("/v1/models", [(b"x-api-key", BOB)]), ("/health", [])):
        await Exchange(access.Access(inner, settings), "GET", path, headers=headers).done()
    assert seen == ["bob", None]


async def test_a_file_of_keys_that_changes_counts_without_a_restart(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.keys._LOOK_EVERY_S", 0.0)
    async with client(locked(keys)) as http:
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        write_keys(keys, [entry("bob", BOB)])
        assert (await http.get("/v1/models", headers=bearer(ALICE))).status_code == 401
        keys.write_text("- broken: [")
        assert (await http.get("/v1/models", headers=bearer(BOB))).status_code == 200


# --- what a key sees --------------------------------------------------------------------------------------------------


async def test_a_key_sees_its_models_and_no_others(keys: Path) -> None:
    async with client(locked(keys, models=MODELS)) as http:
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            for key, ids in ((ALICE, ["a"]), (BOB, ["a", "org/model"])):
                listed = await http.get("/v1/models", headers=headers | bearer(key))
                assert [model["id"] for model in listed.json()["data"]] == ids
            for id, status in (("a", 200), ("org/model", 404)):
                answer = await http.get(f"/v1/models/{id}", headers=headers | bearer(ALICE))
                assert answer.status_code == status
            assert "Available: a." in answer.text
        # With only one model to see, it is the one that is meant.
        assert (await http.get("/props", headers=bearer(ALICE))).status_code == 501
        assert (await http.get("/props", headers=bearer(BOB))).status_code == 400


async def test_who_looks_on_sees_of_other_keys_models_nothing(tmp_path: Path) -> None:
    entries = [
        entry("alice", ALICE, models=["mine"]),
        entry("bob", BOB, models=["mine:tuned"]),
        entry("root", ROOT, admin=True),
    ]
    models = [ModelEntry("mine", 1), ModelEntry("mine:tuned", 1, of="mine"), ModelEntry("secret", 1)]
    served = app(ScriptedPool(HELLO, models), keys=str(write_keys(tmp_path / "keys", entries)))
    async with client(served) as http:
        for model in ("mine", "secret", "none"):
            await http.post(CHAT, content=chat_body(model=model), headers=bearer(ROOT))
        shown, counted = {}, {}
        for key in (ALICE, BOB, ROOT):
            status = (await http.get("/api/status", headers=bearer(key))).json()
            shown[key] = [(model["id"], model["names"]) for model in status["models"]]
            text = (await http.get("/metrics", headers=bearer(key))).text
            counted[key] = set(re.findall(r'model="([^"]+)"', text))
            one = await http.get("/metrics", params={"model": "secret"}, headers=bearer(key))
            assert one.status_code == (200 if key == ROOT else 404)
            assert ("secret" in text) is (key == ROOT)
    assert shown == {
        ALICE: [("mine", [])],
        BOB: [("mine:tuned", [])],
        ROOT: [("mine", ["mine:tuned"]), ("secret", [])],
    }
    assert counted == {ALICE: {"mine"}, BOB: {"mine"}, ROOT: {"mine", "secret", "unknown"}}


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_another_keys_model_is_as_one_that_there_is_not(keys: Path, path: str, body: dict[str, Any]) -> None:
    class Pool(ScriptedPool):
        def stream(self, request: Any, sink: Sink | None = None) -> Any:
            if request.model == "gone":
                raise ModelNotFound.of("gone", ["m", "secret"])
            return super().stream(request, sink)

        async def call(self, call: Any) -> Any:
            if call.model == "gone":
                raise ModelNotFound.of("gone", ["m", "secret"])
            return await super().call(call)

    pool = Pool(HELLO, [ModelEntry("m", 1), ModelEntry("secret", 1)])
    told = []
    async with client(app(pool, keys=str(keys))) as http:
        for model in ("secret", "none", "gone"):
            answer = await http.post(path, json={"model": model, **body}, headers=bearer(ALICE))
            assert answer.status_code == 404
            told.append(the_error(answer)["message"].replace(model, "?"))
    assert set(told) == {"The model '?' does not exist. Available: m."}
    assert pool.requests == []


async def test_a_key_never_sees_anothers_stored_response(keys: Path, tmp_path: Path) -> None:
    store = {"kind": "sqlite", "path": str(tmp_path / "store")}
    async with client(app(keys=str(keys), response_store=store)) as http:
        made = (await http.post("/v1/responses", json={"model": "m", "input": "Hi"}, headers=bearer(ALICE))).json()
        url = f"/v1/responses/{made['id']}"
        for key, status in ((BOB, 404), (ROOT, 404), (ALICE, 200)):
            follow = {"model": "m", "input": "And?", "previous_response_id": made["id"]}
            assert (await http.get(url, headers=bearer(key))).status_code == status
            assert (await http.get(f"{url}/input_items", headers=bearer(key))).status_code == status
            assert (await http.post("/v1/responses", json=follow, headers=bearer(key))).status_code == status
        assert (await http.delete(url, headers=bearer(BOB))).status_code == 404
        assert (await http.delete(url, headers=bearer(ALICE))).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/slots", None),
        ("POST", "/slots/0?action=erase", {}),
        ("POST", "/slots/0?action=save", {"filename": "x"}),
        ("POST", "/slots/0?action=restore", {"filename": "x"}),
        ("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}]),
    ],
)
async def test_what_all_share_is_for_admins(keys: Path, method: str, path: str, body: object) -> None:
    async with client(locked(keys)) as http:
        refused = await http.request(method, path, json=body, headers=bearer(BOB))
        assert (refused.status_code, the_error(refused)["type"]) == (403, "permission_error")
        assert (await http.request(method, path, json=body, headers=bearer(ROOT))).status_code == 501  # by the pool


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_a_limit_is_429_in_the_dialects_words(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, requests_per_minute=1), entry("bob", BOB)])
    async with client(locked(keys)) as http:
        statuses = []
        for key in (ALICE, ALICE, BOB):
            answer = await http.post(path, json={"model": "m", **body}, headers=bearer(key))
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                assert the_error(answer)["type"] in ("rate_limit_error", "unavailable_error")
                assert 50 <= int(answer.headers["retry-after"]) <= 60
    assert statuses == [200, 429, 200]


async def test_looking_on_uses_nothing_up(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, requests_per_minute=2, concurrent_requests=1)])
    async with client(locked(keys)) as http:
        for path in ("/metrics", "/api/status"):
            assert (await http.get(path)).status_code == 401
            for _ in range(5):
                assert (await http.get(path, headers=bearer(ALICE))).status_code == 200
        statuses = [(await http.get("/v1/models", headers=bearer(ALICE))).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


async def test_a_request_holds_its_place_until_it_has_ended_or_its_client_has_left(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, concurrent_requests=1)])
    headers = [(b"x-api-key", ALICE)]
    going_on = asyncio.Event()
    pool = ScriptedPool([*HELLO[:2], going_on, *HELLO[2:]])
    locked = app(pool, keys=str(keys))
    for end in ("answer", "client"):
        going_on.clear()
        first = Exchange(locked, "POST", CHAT, chat_body(), headers)
        await eventually(lambda: pool.open == 1)
        assert (await Exchange(locked, "POST", CHAT, chat_body(), headers).done()).status == 429
        if end == "answer":
            going_on.set()
        else:
            first.disconnect()
        await first.done()
    going_on.set()
    assert (await Exchange(locked, "POST", CHAT, chat_body(), headers).done()).status == 200


async def test_tokens_are_settled_by_what_was_used(tmp_path: Path) -> None:
    """An answer of `HELLO` uses 5 tokens, and is charged some 300 first."""
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, tokens_per_minute=1000)])
    async with client(locked(keys)) as http:
        for _ in range(20):
            assert (await http.post(CHAT, content=chat_body(), headers=bearer(ALICE))).status_code == 200
        long = chat_body(messages=[{"role": "user", "content": "x" * 400_000}])
        assert (await http.post(CHAT, content=long, headers=bearer(ALICE))).status_code == 429


async def test_a_request_that_fails_at_once_uses_nothing(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, tokens_per_minute=600)])
    failing = ScriptedPool([ModelNotFound.of("m", ["m"])])
    async with client(app(failing, keys=str(keys))) as http:
        for _ in range(10):
            assert (await http.post(CHAT, content=chat_body(), headers=bearer(ALICE))).status_code == 404


async def test_embeddings_are_charged_and_settled(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", [entry("alice", ALICE, tokens_per_minute=100)])
    async with AsyncExitStack() as stack:
        backend = FakeBackend(FakeSettings())
        await backend.start()
        stack.push_async_callback(backend.aclose)
        pool = ScriptedPool()
        pool.backend = backend
        http = await stack.enter_async_context(client(app(pool, keys=str(keys))))
        statuses = [
            (await http.post("/v1/embeddings", json={"input": "word " * 60}, headers=bearer(ALICE))).status_code
            for _ in range(6)
        ]
        assert statuses[0] == 200
        assert statuses[-1] == 429
        assert pool.calls[0].tenant == "alice"


class HeldBackend(FakeBackend):
    """Begins no answer before it may."""

    def __init__(self, settings: FakeSettings) -> None:
        super().__init__(settings)
        self.go = asyncio.Event()

    async def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        await self.go.wait()
        async with aclosing(super().generate(request, sink)) as frames:
            async for frame in frames:
                yield frame


async def test_two_keys_under_load_do_not_starve_each_other(tmp_path: Path) -> None:
    """One sends 300 at once, more than may wait; the other's twenty come in between, each in its turn."""
    keys = write_keys(
        tmp_path / "keys", [entry("alice", ALICE), entry("bob", BOB, concurrent_requests=20, requests_per_minute=1000)]
    )
    backend = HeldBackend(FakeSettings(slots=4, tokens=2))
    await backend.start()
    pool = LocalPool({"m": backend}, {"m": 256})  # six of them inside, and 254 that wait
    served = build_app(pool, GatewaySettings(keys=str(keys)), echo_request_id=True)
    finished: list[tuple[str, int]] = []

    async def ask(http: httpx.AsyncClient, name: str, key: bytes) -> None:
        answer = await http.post(CHAT, content=chat_body(stream=False), headers=bearer(key))
        finished.append((name, answer.status_code))

    async with client(served) as http, asyncio.TaskGroup() as group:
        for _ in range(300):
            group.create_task(ask(http, "alice", ALICE))
        await eventually(lambda: len(finished) == 40, within_s=60)
        for _ in range(20):
            group.create_task(ask(http, "bob", BOB))
        await eventually(lambda: pool._lines["m"].waiting == 254 + 20, within_s=60)
        backend.go.set()
    await backend.aclose()
    assert finished[:40] == [("alice", 429)] * 40
    answered = [name for name, _ in finished[40:]]
    assert {status for _, status in finished[40:]} == {200}
    assert (answered.count("alice"), answered.count("bob")) == (260, 20)
    last = max(index for index, name in enumerate(answered) if name == "bob")
    assert answered[: last + 1].count("alice") <= 6 + 20 + 6  # those inside before, turn by turn, and inside at the end
