"""Between a client and the server: passes every byte on as it comes, and remembers what was said."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self

import h11
import msgspec


class Exchange(msgspec.Struct):
    """A request and its answer. `status` 0: there was none."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Relay:
    def __init__(self, port: int) -> None:
        """`port`: where the server listens, on this machine."""
        self._server_port = port
        self._connections: list[tuple[bytearray, bytearray]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def exchanges(self) -> list[Exchange]:
        """So far; those of one connection in their order."""
        return [exchange for said, answered in self._connections for exchange in read(bytes(said), bytes(answered))]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        said, answered = bytearray(), bytearray()
        self._connections.append((said, answered))
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass(reader, server_writer, said))
                group.create_task(_pass(server_reader, writer, answered))
        finally:
            self._tasks.discard(task)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
            await writer.drain()
    writer.close()  # either side may leave first; the other one learns of it


def read(said: bytes, answered: bytes) -> list[Exchange]:
    """What went over one connection. An answer that was cut off is there as far as it came."""
    server, client = h11.Connection(h11.SERVER), h11.Connection(h11.CLIENT)
    for reader, data in ((server, said), (client, answered)):
        reader.receive_data(data)
        reader.receive_data(b"")  # the end
    found: list[Exchange] = []
    while isinstance(request := server.next_event(), h11.Request):
        headers = {name.decode(): value.decode() for name, value in request.headers}
        exchange = Exchange(request.method.decode(), request.target.decode(), headers)
        found.append(exchange)
        client.send(request)
        while isinstance(event := server.next_event(), h11.Data):
            exchange.body += event.data
            client.send(event)
        if not isinstance(event, h11.EndOfMessage):
            break
        client.send(event)
        if not _read_answer(client, server, exchange):
            break
        server.start_next_cycle()
        client.start_next_cycle()
    return found


def _read_answer(client: h11.Connection, server: h11.Connection, exchange: Exchange) -> bool:
    """Whether it is whole, and another request may follow."""
    with suppress(h11.RemoteProtocolError):  # it was cut off
        while (event := client.next_event()) is not h11.NEED_DATA:
            match event:
                case h11.Response():
                    exchange.status = event.status_code
                    server.send(event)
                case h11.Data():
                    exchange.answer += event.data
                    server.send(event)
                case h11.EndOfMessage():
                    server.send(event)
                    return server.our_state is h11.DONE and server.their_state is h11.DONE
                case _:
                    return False
    return False
