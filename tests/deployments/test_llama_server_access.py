"""Keys and origins as llama-server has them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from deployments.http import build_app
from deployments.llama_server.access import ApiKeys, Cors
from deployments.llama_server.flags import UsageError, parse
from deployments.llama_server.settings import api_keys, cors
from deployments.settings import GatewaySettings
from tests.deployments.support import HELLO, ScriptedPool, chat_body


def client(line: str = "") -> httpx.AsyncClient:
    options = parse(line.split())
    inner = build_app(ScriptedPool(HELLO), GatewaySettings(), echo_request_id=True)
    app = Cors(ApiKeys(inner, api_keys(options)), cors(options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def chat(http: httpx.AsyncClient, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await http.post(path, content=chat_body(), headers=named)


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer two"}, {"x_api_key": "one"}, {"x_api_key": "two", "authorization": "Bearer x"}],
)
async def test_a_key_opens_the_door(headers: dict[str, str]) -> None:
    async with client("--api-key one,two") as http:
        assert (await chat(http, **headers)).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer on"}, {"x_api_key": "one,two"}])
async def test_without_one_it_stays_closed(headers: dict[str, str]) -> None:
    async with client("--api-key one,two") as http:
        for path, kind in (("/v1/chat/completions", "authentication_error"), ("/completion", "authentication_error")):
            answer = await chat(http, path, **headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, kind)
            assert answer.json()["error"]["message"] == "Invalid API Key"
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/health")).status_code == 200


async def test_without_keys_it_is_open() -> None:
    async with client() as http:
        assert (await chat(http)).status_code == 200


def test_keys_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\n\n b \n")
    assert api_keys(parse(["--api-key", "x", "--api-key-file", str(file)])) == ("x", "a", "b")
    file.write_text("\n")
    with pytest.raises(UsageError, match="no key in it"):
        api_keys(parse(["--api-key-file", str(file)]))


LOCAL = ["http://localhost", "http://localhost:8080", "http://127.0.0.1:3000", "http://[::1]"]
ELSEWHERE = ["http://evil.com", "http://notlocalhost", "http://localhost.evil.com", "http://127.0.0.1.evil.com", "null"]


@pytest.mark.parametrize(
    ("line", "origin", "allowed"),
    [
        *(("--cors-origins localhost", origin, origin) for origin in LOCAL),
        *(("--cors-origins localhost", origin, None) for origin in ELSEWHERE),
        ("", "http://evil.com", "http://evil.com"),
        ("--no-cors-credentials", "http://evil.com", "*"),
        ("--cors-origins https://a.org", "https://b.org", "https://a.org"),
    ],
)
async def test_origins(line: str, origin: str, allowed: str | None) -> None:
    async with client(f"--api-key one {line}") as http:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await http.request("OPTIONS", "/completions", headers=asked)
        assert (preflight.status_code, preflight.content) == (200, b"")
        assert preflight.headers["access-control-allow-headers"] == "*"
        credentials = "false" if "--no-cors-credentials" in line else "true"
        assert preflight.headers["access-control-allow-credentials"] == credentials
        for answer in (preflight, await chat(http, origin=origin), await chat(http, origin=origin, x_api_key="one")):
            assert answer.headers.get("access-control-allow-origin") == allowed
