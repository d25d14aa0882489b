"""The short way to the socket, with uvicorn around it."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
import uvicorn.config

from deployments import http_protocol
from deployments.http_protocol import CHUNKS, ChunkingProtocol, ChunkWriter, chunk_writer
from deployments.middleware import ASGIApp, Message, Receive, Scope, Send
from tests.deployments.support import WITHIN_S


async def nothing(scope: Scope, receive: Receive, send: Send) -> None: ...


async def test_uvicorn_makes_such_connections_once_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    http_protocol.install()
    config = uvicorn.Config(nothing)
    config.load()
    assert config.http_protocol_class is ChunkingProtocol


class Server:
    """uvicorn with one application, on a port of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=0, http=ChunkingProtocol, lifespan="off", log_config=None)
        )

    async def __aenter__(self) -> Server:
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving

    async def get(self, method: bytes = b"GET") -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(method + b" / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            answer = await reader.read()
        writer.close()
        return answer


def start(*headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_chunks_and_sent_parts_are_one_body() -> None:
    written = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        chunks = chunk_writer(scope)
        assert chunks is not None
        written.append(chunks(b"too early"))
        await send(start())
        await send(part(b"one "))
        written.append(chunks(b"two "))
        written.append(chunks(b"x" * 300))
        await send(part(b" three", more=False))
        written.append(chunks(b"too late"))

    async with Server(app) as server:
        answer = await server.get()
    assert answer.partition(b"\r\n\r\n")[2] == (
        b"4\r\none \r\n4\r\ntwo \r\n12c\r\n" + b"x" * 300 + b"\r\n6\r\n three\r\n0\r\n\r\n"
    )
    assert written == [False, True, True, False]


async def test_a_body_of_known_length_has_no_chunks() -> None:
    written = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start((b"content-length", b"2")))
        chunks = chunk_writer(scope)
        written.append(chunks is not None and chunks(b"a"))
        await send(part(b"ab", more=False))

    async with Server(app) as server:
        assert (await server.get()).endswith(b"\r\n\r\nab")
    assert written == [False]


async def test_a_request_for_the_head_has_no_chunks() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert chunk_writer(scope) is None
        await send(start())
        await send(part(b"", more=False))

    async with Server(app) as server:
        assert (await server.get(b"HEAD")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_does_not_read_is_not_written_to() -> None:
    refused = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        chunks = chunk_writer(scope)
        assert chunks is not None
        await send(start())
        while chunks(bytes(2**16)):
            await asyncio.sleep(0)
        refused.set()

    async with Server(app) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**10)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            await refused.wait()
        writer.close()


async def test_another_loop_has_no_writer() -> None:
    writer = ChunkWriter(object(), asyncio.get_running_loop())  # type: ignore[arg-type]  # nothing is written
    scope = {CHUNKS: writer}
    assert chunk_writer(scope) is writer

    async def elsewhere() -> object:
        return chunk_writer(scope)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) is None
    assert chunk_writer({}) is None
