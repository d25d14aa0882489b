"""Input that is meant to hurt: it ends in the right 4xx, in bounded time and memory, and others are still served."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import zstandard

from backends.chat_template import ChatTemplates
from deployments import local_http
from deployments.http import build_app
from deployments.local_http import MAX_HEAD_BYTES, GuardedProtocol
from deployments.settings import GatewaySettings
from protocols.body import MAX_CONTAINERS
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt
from tests.deployments.http_support import CHAT, USER, app, client
from tests.deployments.key_support import ALICE, bearer, entry, write_keys
from tests.deployments.support import HELLO, Exchange, ScriptedPool, chat_body, eventually

NAMES = {CHAT: "messages", "/v1/messages": "messages", "/v1/responses": "input", "/chat/completions": "messages"}
MIB = 2**20


async def sent(path: str, body: bytes, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    """Answered by an app which then still answers others."""
    served = app(**settings)
    async with client(served) as http:
        answer = await http.post(path, content=body, headers=headers)
        assert (await http.post(CHAT, content=chat_body())).status_code == 200
    return answer


def asked(path: str, messages: str, **fields: object) -> bytes:
    rest = json.dumps({"model": "m", "max_tokens": 5, **fields})[1:-1]
    return f'{{"{NAMES[path]}": {messages}, {rest}}}'.encode()


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_an_oversized_body(path: str) -> None:
    assert (await sent(path, b" " * (MIB + 1), max_body_bytes=MIB)).status_code == 413


async def test_a_body_without_an_end_is_not_kept() -> None:
    exchange = Exchange(app(max_body_bytes=MIB), "POST", CHAT, None)
    for _ in range(17):
        exchange.upload(b" " * (MIB // 16), more=True)
    assert (await exchange.done()).status == 413


@pytest.mark.parametrize("nest", ["[", '{"a":'])
async def test_deep_nesting(path: str, nest: str) -> None:
    assert (await sent(path, asked(path, nest * 20_000))).status_code == 400
    closed = {"[": "[" * 20_000 + "]" * 20_000, '{"a":': '{"a":' * 20_000 + "0" + "}" * 20_000}[nest]
    assert (
        await sent(path, asked(path, json.dumps([USER]), x=0).replace(b'"x": 0', f'"x": {closed}'.encode()))
    ).status_code == 400


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("gzip", gzip.compress(bytes(4 * MIB))),
        ("gzip, gzip", gzip.compress(gzip.compress(bytes(4 * MIB)))),
        ("zstd", zstandard.compress(bytes(4 * MIB))),
    ],
)
async def test_a_decompression_bomb(path: str, name: str, bomb: bytes) -> None:
    assert len(bomb) < MIB // 100
    assert (await sent(path, bomb, {"content-encoding": name}, max_body_bytes=MIB)).status_code == 413


@pytest.mark.parametrize("name", ["gzip", "zstd"])
async def test_a_bomb_of_a_gigabyte_takes_no_memory_but_its_limit(name: str) -> None:
    packer = zlib.compressobj(wbits=31) if name == "gzip" else zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(packer.compress(bytes(MIB)) for _ in range(1024)) + packer.flush()
    served = app(max_body_bytes=MIB)
    async with client(served) as http:
        tracemalloc.start()
        try:
            answer = await http.post(CHAT, content=bomb[:MIB], headers={"content-encoding": name})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert answer.status_code == 413
    assert peak < 32 * MIB


async def test_ten_thousand_messages(path: str) -> None:
    answer = await sent(path, asked(path, json.dumps([USER] * 10_000)))
    assert answer.status_code == 400
    assert "10000 messages, and at most 4096" in answer.text


async def test_ten_thousand_messages_to_count_or_to_render() -> None:
    for route in ("/v1/messages/count_tokens", "/apply-template"):
        assert (await sent(route, json.dumps({"model": "m", "messages": [USER] * 10_000}).encode())).status_code == 400


async def test_many_small_values(path: str) -> None:
    for value in ("{}", "[]", '{"role":"user"}'):
        answer = await sent(path, asked(path, "[" + ",".join([value] * 2 * MAX_CONTAINERS) + "]"))
        assert answer.status_code == 413


async def test_as_many_bad_messages_as_a_body_may_have(path: str) -> None:
    """One error is kept of them, and told."""
    answer = await sent(path, asked(path, "[" + ",".join(["{}"] * (MAX_CONTAINERS - 10)) + "]"))
    assert answer.status_code == 400
    assert "[0]" in answer.text


async def test_brackets_of_a_prompt_are_no_values(path: str) -> None:
    text = json.dumps([{"role": "user", "content": '{["\\' * MAX_CONTAINERS}])
    assert (await sent(path, asked(path, text))).status_code == 200


@pytest.mark.parametrize("open_string", ['"', '"\\', '"' + '\\"' * MIB], ids=["quote", "backslash", "escaped quotes"])
async def test_a_string_without_an_end(open_string: str) -> None:
    assert (await sent(CHAT, b"[" * MAX_CONTAINERS + b"[" + open_string.encode())).status_code == 413
    assert (await sent(CHAT, open_string.encode())).status_code == 400


@pytest.mark.parametrize("junk", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\x00", b"\xf4\x90\x80\x80"])
async def test_invalid_utf_8(path: str, junk: bytes) -> None:
    body = asked(path, json.dumps([{"role": "user", "content": "JUNK"}])).replace(b"JUNK", junk)
    assert (await sent(path, body)).status_code == 400


def tool(path: str, schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    if path == "/v1/messages":
        return {"name": name, "input_schema": schema}
    function = {"name": name, "parameters": schema}
    return {"type": "function", **function} if path == "/v1/responses" else {"type": "function", "function": function}


async def test_huge_tool_schemas(path: str) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_CONTAINERS)}}
    many = [tool(path, {"type": "object"}, f"f{i}") for i in range(1025)]
    messages = json.dumps([USER])
    assert (await sent(path, asked(path, messages, tools=[tool(path, wide)]))).status_code == 413
    refused = await sent(path, asked(path, messages, tools=many))
    assert refused.status_code == 400
    assert "1025 tools, and at most 1024" in refused.text
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    assert (await sent(path, asked(path, messages, tools=[tool(path, deep)]))).status_code == 400


INJECTED = "{{ 7 * 191 }}{% for i in range(10 ** 9) %}x{% endfor %}{{ ''.__class__.__mro__ }}{{ messages }}"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/chat/completions"])
async def test_what_clients_write_is_no_template(path: str) -> None:
    """Neither messages nor tools nor a template that a body brings is run, and no variable of ours can be replaced."""
    messages = [{"role": "user", "content": INJECTED}]
    fields = {
        "tools": [tool(path, {"type": "object", "description": INJECTED})],
        "chat_template": INJECTED,
        "chat_template_kwargs": {"messages": [], "tools": [], "bos_token": INJECTED, "raise_exception": INJECTED},
    }
    pool = ScriptedPool(HELLO)
    async with client(app(pool)) as http:
        answer = await http.post(path, content=asked(path, json.dumps(messages), **fields))
    if answer.status_code == 400:
        assert pool.requests == []
        return
    (request,) = pool.requests
    assert isinstance(request.prompt, ChatPrompt)
    templates = ChatTemplates({}, clock=lambda: datetime(2026, 1, 1))
    try:
        rendered = templates.render(request.prompt)
    except InvalidRequest as error:
        assert "chat_template_kwargs" in error.message or "template" in error.message
    else:
        assert INJECTED in rendered
        assert str(7 * 191) not in rendered


async def test_too_many_documents_to_rank() -> None:
    body = {"query": "a", "documents": ["a"] * 2049}
    assert (await sent("/v1/rerank", json.dumps(body).encode())).status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-a": "a" * 40_000}, 431),
        ({f"x-{i}": "a" * 20 for i in range(2_000)}, 431),
        ({"x-a": "a" * 20_000}, 200),
    ],
)
async def test_large_headers(path: str, headers: dict[str, str], status: int) -> None:
    assert (await sent(path, asked(path, json.dumps([USER])), headers)).status_code == status


async def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    served = app(keys=str(write_keys(tmp_path / "keys", [entry("alice", ALICE)])))
    for key in (b"\xff\xfe", b"\x00", b"ty-" + b"a" * 30_000, ALICE + b"\x00", b"a, " + ALICE):
        for header in ((b"authorization", b"Bearer " + key), (b"x-api-key", key)):
            assert (await Exchange(served, "POST", CHAT, chat_body(), [header]).done()).status == 401
    async with client(served) as http:
        assert (await http.post(CHAT, content=chat_body(), headers=bearer(ALICE))).status_code == 200


# --- slow clients -----------------------------------------------------------------------------------------------------


async def test_a_body_that_does_not_arrive() -> None:
    for path, told in ((CHAT, "request_timeout"), ("/tokenize", "invalid_request_error")):
        exchange = Exchange(app(body_within_s=0.01), "POST", path, None)
        exchange.upload(b'{"model"', more=True)
        assert (await exchange.done()).status == 408
        assert told in exchange.body.decode()


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The server of `serve --local`, with less patience."""
    monkeypatch.setattr(local_http, "HEAD_WITHIN_S", 0.3)
    settings = GatewaySettings(body_within_s=0.3)
    served = build_app(ScriptedPool(HELLO), settings, echo_request_id=True)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        config = uvicorn.Config(served, http=GuardedProtocol, ws="none", log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


def good(host: str = "test") -> bytes:
    body = chat_body(stream=False)
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def answered(port: int, first: bytes, then: Iterable[bytes] = ()) -> bytes:
    """All that comes until the server closes, where the client sends `first`, then a piece every 20 ms.

    A server that closes on a client that still sends resets the connection, behind its answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)

    async def go_on() -> None:
        for piece in then:
            writer.write(piece)
            await asyncio.sleep(0.02)

    sending = asyncio.create_task(go_on())
    answer = b""
    try:
        async with asyncio.timeout(10):
            while piece := await reader.read(65536):
                answer += piece
    except ConnectionResetError:
        pass
    finally:
        sending.cancel()
        writer.close()
    return answer


def drops(piece: bytes) -> Iterator[bytes]:
    for _ in range(1000):
        yield piece


async def status_of_another(port: int) -> int:
    async with httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{port}{CHAT}"
        return (await http.post(url, content=chat_body(stream=False))).status_code


@pytest.mark.parametrize(
    ("first", "drop"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\n", b""),
        (b"POST / HTTP/1.1\r\nx-a: ", b"a"),
        (b"GET / HTTP/1.1\r\n", b"x-a: a\r\n"),
    ],
    ids=["says nothing", "stops", "a long header", "many headers"],
)
async def test_a_head_that_does_not_arrive_ends_its_connection(port: int, first: bytes, drop: bytes) -> None:
    slow = [asyncio.create_task(answered(port, first, drops(drop))) for _ in range(20)]
    assert await status_of_another(port) == 200
    for answer in await asyncio.gather(*slow):
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_later_request_of_a_connection_has_no_more_time(port: int) -> None:
    answer = await answered(port, good() + b"POST / HTTP/1.1\r\nx-a: ", drops(b"a"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


async def test_a_body_that_comes_in_drops_is_408(port: int) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n".encode()
    answer = await answered(port, head, drops(b" "))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"request_timeout" in answer
    assert await status_of_another(port) == 200


async def test_a_head_without_an_end_is_not_kept(port: int) -> None:
    answer = await answered(port, b"GET / HTTP/1.1\r\nx-a: " + b"a" * (4 * MAX_HEAD_BYTES))
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # the rest of it was on its way, and reset the line
    assert await status_of_another(port) == 200


async def test_a_patient_server_lets_a_quick_client_take_its_time_between_requests(port: int) -> None:
    async with httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{port}{CHAT}"
        for _ in range(2):
            assert (await http.post(url, content=chat_body(stream=False))).status_code == 200
            await asyncio.sleep(0.5)
