"""What the tests of `deployments` share: short scripts, a pool that plays them, and an HTTP exchange driven by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from backends.answers import answer
from backends.fake import FakeBackend
from deployments.middleware import ASGIApp, Message
from deployments.models import ModelEntry
from protocols.calls import AnswerT, CountTokens, Question
from protocols.errors import NotSupported
from protocols.events import Finished, Frame, Started, TextDelta, Usage
from protocols.request import ChatPrompt, Request, TextPart
from protocols.request import Message as ChatMessage
from protocols.sink import Sink
from protocols.sse import ServerSentEvent, SseParser

WITHIN_S = 10.0
"""How long anything may take before a test fails. Nothing is expected to come near it."""


async def eventually(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Returns once `condition` holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.002)


async def settle(turns: int = 20) -> None:
    """Lets everything that is ready run, without waiting for any clock."""
    for _ in range(turns):
        await asyncio.sleep(0)


def request(model: str = "m", text: str = "Hi", **fields: Any) -> Request:
    return Request("r1", model, ChatPrompt((ChatMessage("user", (TextPart(text),)),)), **fields)


STARTED = Frame((Started(3, 0),))


def text(piece: str, token: int = 0, choice: int = 0) -> Frame:
    return Frame((TextDelta(piece, choice=choice),), (token,), choice)


def finished(choice: int = 0, tokens: int = 2) -> Frame:
    return Frame((Finished("stop", Usage(3, tokens), choice=choice),), (), choice)


def events(frames: Iterable[Frame]) -> list[object]:
    """The events of `frames` in order, however they and their text were grouped."""
    found: list[object] = []
    for event in (event for frame in frames for event in frame.events):
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.choice == event.choice:
            found[-1] = msgspec.structs.replace(event, text=last.text + event.text)
        else:
            found.append(event)
    return found


def tokens(frames: Iterable[Frame]) -> list[int]:
    return [token for frame in frames for token in frame.tokens]


HELLO = [STARTED, text("Hel", 1), text("lo", 2), finished()]

Step = Frame | BaseException | asyncio.Event
"""A frame to yield, an exception to raise, or something to wait for."""


class ScriptedPool:
    """A `ModelPool` that answers every request with the same script, and knows how many of its streams are open."""

    def __init__(self, script: Sequence[Step] = (), models: Sequence[ModelEntry] = (ModelEntry("m", 7),)) -> None:
        self._script = script
        self._models = models
        self.requests: list[Request] = []
        self.calls: list[Question[Any]] = []
        self.backend: FakeBackend | None = None
        self.open = 0

    def models(self) -> Sequence[ModelEntry]:
        return self._models

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        """Answered by `backend`, a fake one; without one it counts the tokens of `STARTED`, as the script goes."""
        self.calls.append(call)
        self.open += 1
        try:
            if self.backend is None and isinstance(call, CountTokens):
                return cast(AnswerT, await self._count())
            if self.backend is None:
                raise NotSupported("This pool answers no questions")
            return await answer(self.backend, call)
        finally:
            self.open -= 1

    @property
    def counted(self) -> list[Request]:
        return [call.request for call in self.calls if isinstance(call, CountTokens)]

    async def _count(self) -> int:
        for step in self._script:
            if isinstance(step, Frame):
                break
            if isinstance(step, BaseException):
                raise step
            await step.wait()
        return 3

    async def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        self.requests.append(request)
        self.open += 1
        try:
            for step in self._script:
                if isinstance(step, Frame):
                    yield step
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    raise step
        finally:
            self.open -= 1


class Exchange:
    """One HTTP exchange with an ASGI app, where the test decides when the client reads and when it leaves."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes | None = b"",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.sent: list[Message] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        if body is not None:
            self.upload(body)
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "query_string": query.encode(),
        }
        self.task = asyncio.get_running_loop().create_task(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._received.get, self._send)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        await self.reading.wait()

    def upload(self, body: bytes, more: bool = False) -> None:
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self._received.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Exchange:
        async with asyncio.timeout(WITHIN_S):
            await self.task
        return self

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1]["more_body"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def chat_body(stream: bool = True, **fields: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    return json.dumps(body).encode()


def sse_events(body: bytes) -> list[ServerSentEvent]:
    return SseParser().feed(body)


def sse_text(body: bytes) -> str:
    """The text of a Chat Completions stream. Fails on one that does not end properly."""
    *chunks, end = sse_events(body)
    assert end.data == "[DONE]"
    return "".join(choice["delta"].get("content") or "" for c in chunks for choice in json.loads(c.data)["choices"])
