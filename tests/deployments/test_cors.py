"""Preflights and grants, for the headers that clients in browsers send."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.cors import allows, is_loopback_host
from deployments.settings import ConfigError, GatewaySettings, parse
from tests.deployments.http_support import CHAT, app, client

PAGE = "http://localhost:3000"
FOREIGN = "https://evil.example"

OPENAI_SDK = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
ANTHROPIC_SDK = (
    "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,"
    "x-stainless-helper-method,x-stainless-lang"
)
OPEN_WEBUI = "authorization, content-type"


def preflight(origin: str, wanted: str = OPENAI_SDK) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }


async def asked(method: str, path: str, headers: dict[str, str], **settings: Any) -> Any:
    async with client(app(**settings)) as http:
        return await http.request(method, path, headers=headers)


@pytest.mark.parametrize("wanted", [OPENAI_SDK, ANTHROPIC_SDK, OPEN_WEBUI])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/models", "/completion"])
async def test_B83_a_preflight_is_granted_what_it_asks_for(path: str, wanted: str) -> None:
    answer = await asked("OPTIONS", path, preflight(PAGE, wanted), cors="loopback")
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-headers"] == wanted
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("cors", ["off", "loopback", ["https://chat.example"]])
async def test_a_page_that_is_not_allowed_is_granted_nothing(cors: object) -> None:
    for method, path in (("OPTIONS", CHAT), ("GET", "/v1/models")):
        answer = await asked(method, path, preflight(FOREIGN), cors=cors)
        assert answer.status_code == (204 if method == "OPTIONS" else 200)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_answers_and_errors_may_be_read_by_a_page_that_is_allowed() -> None:
    for path, status in (("/v1/models", 200), ("/v1/none", 404)):
        answer = await asked("GET", path, {"origin": "https://chat.example"}, cors=["https://chat.example/"])
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "retry-after" in answer.headers["access-control-expose-headers"]


async def test_a_star_is_everybody() -> None:
    answer = await asked("OPTIONS", CHAT, preflight(FOREIGN), cors=["*"])
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_a_page_of_the_internet_asks_for_the_private_network() -> None:
    headers = preflight("https://chat.example") | {"access-control-request-private-network": "true"}
    for cors, allowed in ((["https://chat.example"], "true"), ("off", None)):
        answer = await asked("OPTIONS", CHAT, headers, cors=cors)
        assert answer.headers.get("access-control-allow-private-network") == allowed


@pytest.mark.parametrize("wanted", ["a\x01b", "x: y", "a" * 5000, ""])
async def test_names_that_are_none_are_not_echoed(wanted: str) -> None:
    answer = await asked("OPTIONS", CHAT, preflight(PAGE, wanted), cors="loopback")
    assert answer.status_code == 204
    assert "access-control-allow-headers" not in answer.headers


async def test_without_an_origin_nothing_is_different() -> None:
    answer = await asked("GET", "/v1/models", {}, cors="loopback")
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert (await asked("OPTIONS", "/v1/models", {}, cors="loopback")).status_code == 405


@pytest.mark.parametrize(
    ("origin", "loopback"),
    [
        ("http://localhost", True),
        ("https://LOCALHOST:8443", True),
        ("http://app.localhost:1", True),
        ("http://127.0.0.1:5173", True),
        ("http://127.8.8.8", True),
        ("http://[::1]:3000", True),
        ("http://localhost.evil.example", False),
        ("http://evil.example/localhost", False),
        ("http://localhost@evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://10.0.0.1", False),
        ("file://localhost", False),
        ("http://[::1", False),
        ("null", False),
        ("", False),
    ],
)
def test_what_came_from_this_machine(origin: str, loopback: bool) -> None:
    assert allows("loopback", origin) is loopback


@pytest.mark.parametrize(("host", "loopback"), [("0.0.0.0", False), ("::", False), ("::1", True), ("my-host", False)])
def test_addresses_that_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback_host(host) is loopback


@pytest.mark.parametrize("cors", ["on", ["null"], ["chat.example"], ["https://chat.example/page"], [""]])
def test_what_is_no_origin_is_refused(cors: object) -> None:
    with pytest.raises(ConfigError, match="cors"):
        parse(GatewaySettings, {"cors": cors})


def test_a_relative_path_of_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole path"):
        parse(GatewaySettings, {"keys": "keys.yaml"})
