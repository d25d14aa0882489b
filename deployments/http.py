"""The HTTP side: an explicit route table, and the endpoint all generating routes share. Knows no engine and no Ray."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import msgspec

from deployments import content_encoding, fan_out, response_store
from deployments.middleware import REQUEST_ID, ASGIApp, Message, Receive, RequestId, Scope, Send, read_body
from deployments.models import ModelEntry, ModelPool, the_only_model
from deployments.responses import ResponseMemory
from deployments.settings import GatewaySettings
from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses, sse
from protocols.calls import CountTokens
from protocols.codec import Call, Codec, Encoder, Reader, Stamp, frame_feed
from protocols.collect import BatchCollector
from protocols.errors import (
    MAX_NAME,
    ClientTooSlow,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    ServingError,
    UnsupportedMediaType,
)
from protocols.events import Failed, Frame
from protocols.llamacpp_native import questions
from protocols.openai_responses import RESPONSE_PREFIX
from protocols.request import Request

logger = logging.getLogger(__name__)

JSON = b"application/json"
ALLOWED = "tokenyard.allowed_methods"
"""Key in the ASGI scope under which the methods of a path stand, when it was asked for with another."""

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class HttpApp:
    """The route table. Every public path is on this screen; nothing reaches an engine by default."""

    def __init__(self, pool: ModelPool, settings: GatewaySettings) -> None:
        self._pool = pool
        self._settings = settings
        self._memory = ResponseMemory(response_store.create(settings.response_store))
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": self._generate(openai_chat.CODEC)},
            "/v1/responses": {"POST": self._generate(openai_responses.CODEC, self._memory)},
            "/v1/responses/input_tokens": {"POST": self._input_tokens},
            "/v1/completions": {"POST": self._generate(openai_completions.CODEC)},
            "/v1/messages": {"POST": self._generate(anthropic_messages.CODEC)},
            "/v1/messages/count_tokens": {"POST": self._count_tokens},
            "/v1/models": {"GET": self._models},
            "/v1/embeddings": {"POST": self._ask(questions.openai_embeddings, openai_chat.CODEC)},
            "/v1/rerank": {"POST": self._ask(questions.rerank, openai_chat.CODEC)},
            "/v1/reranking": {"POST": self._ask(questions.rerank, openai_chat.CODEC)},
            "/v1/health": {"GET": self._health},
            # Without a prefix, everything is in the manner of llama.cpp.
            "/": {"GET": self._health},
            "/health": {"GET": self._health},
            "/api/hello": {"GET": self._health},  # Claude Code looks here whether anybody is at home
            "/models": {"GET": self._models},
            "/completion": {"POST": self._generate(llamacpp_native.COMPLETION)},
            "/completions": {"POST": self._generate(llamacpp_native.COMPLETION)},
            "/infill": {"POST": self._generate(llamacpp_native.INFILL)},
            "/chat/completions": {"POST": self._generate(llamacpp_native.CHAT)},
            "/embedding": {"POST": self._ask(questions.embeddings)},
            "/embeddings": {"POST": self._ask(questions.embeddings)},
            "/rerank": {"POST": self._ask(questions.rerank)},
            "/reranking": {"POST": self._ask(questions.rerank)},
            "/tokenize": {"POST": self._ask(questions.tokenize)},
            "/detokenize": {"POST": self._ask(questions.detokenize)},
            "/apply-template": {"POST": self._ask(questions.apply_template)},
            "/props": {"GET": self._ask(questions.props)},
            "/slots": {"GET": self._ask(questions.slots)},
            "/slots/{id}": {"POST": self._slot_action},
            "/lora-adapters": {"GET": self._ask(questions.adapters), "POST": self._ask(questions.set_adapters)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            await self._memory.aclose()
            return
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        try:
            await self._endpoint(scope)(scope, receive, send)
        except ServingError as error:
            # RFC 9110, 15.5.6: "The origin server MUST generate an Allow header field in a 405 response".
            allow = [(b"allow", ", ".join(scope[ALLOWED]).encode())] if ALLOWED in scope else []
            await _send_error(send, error, _dialect(scope), allow)
        except ClientGone:
            logger.debug("request %s: the client left", scope[REQUEST_ID])

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Raises `NotFound` or `MethodNotAllowed`, in words that say what there is."""
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path)
        if methods is None and path.startswith("/v1/models/"):
            methods = {"GET": self._model}
        if methods is None and path.startswith("/v1/responses/"):
            methods = self._stored_response(path)
        if methods is None and path.startswith("/slots/"):
            methods = self._routes["/slots/{id}"]
        path = path[:MAX_NAME]
        if methods is None:
            raise NotFound(f"There is no {path} here. Routes: {', '.join(self._routes)}.")
        endpoint = methods.get("GET" if method == "HEAD" else method)
        if endpoint is None:
            scope[ALLOWED] = list(methods)
            raise MethodNotAllowed(f"{path} takes {' or '.join(methods)}, not {method}.")
        return endpoint

    # --- small endpoints ---

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, 200, b'{"status":"ok"}')

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries = self._pool.models()
        if _dialect(scope) is anthropic_messages.CODEC:
            query = scope["query_string"].decode("latin-1")
            body = anthropic_messages.model_page([(entry.id, entry.created) for entry in entries], query)
        else:
            body = _model_list(entries)
        await _send_json(send, 200, body)

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["path"].removeprefix("/v1/models/")
        entry = next((entry for entry in self._pool.models() if entry.id == wanted), None)
        if entry is None:
            raise ModelNotFound.of(wanted, [entry.id for entry in self._pool.models()])
        if _dialect(scope) is anthropic_messages.CODEC:
            body = anthropic_messages.model_body(entry.id, entry.created)
        else:
            body = msgspec.json.encode(_openai_model(entry))
        await _send_json(send, 200, body)

    # --- stored responses ---

    def _stored_response(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of `/v1/responses/{id}` and of what is below it."""
        memory = self._memory
        match path.removeprefix("/v1/responses/").split("/"):
            case [id] if id.startswith(RESPONSE_PREFIX):
                return {
                    "GET": _json(lambda scope: memory.retrieve(id, scope["query_string"])),
                    "DELETE": _json(lambda scope: memory.delete(id)),
                }
            case [id, "input_items"]:
                return {"GET": _json(lambda scope: memory.input_items(id, scope["query_string"]))}
            case [id, "cancel"]:
                return {"POST": _json(lambda scope: memory.cancel(id))}
            case _:
                return None

    # --- one question, one answer ---

    def _ask(self, read: Reader, codec: Codec[Any] = llamacpp_native.COMPLETION) -> Endpoint:
        """`codec` words the errors. The model stands in the body, or where there is none in the query."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            async with _errors_answered(send, codec, scope[REQUEST_ID]):
                ask = read(await self._body(scope, receive), scope[REQUEST_ID])
                model = ask.question.model or _query(scope, "model") or the_only_model(self._pool)
                question = msgspec.structs.replace(ask.question, model=model)
                async with _cancelled_when_client_leaves(receive):
                    answer = await self._pool.call(question)
                await _send_json(send, 200, ask.render(answer, model))

        return endpoint

    async def _slot_action(self, scope: Scope, receive: Receive, send: Send) -> None:
        action = questions.slot_action(scope["path"].removeprefix("/slots/"), _query(scope, "action"))
        await self._ask(action)(scope, receive, send)

    async def _count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        codec, request_id = anthropic_messages.CODEC, scope[REQUEST_ID]
        async with _errors_answered(send, codec, request_id):
            call = codec.decode(await self._body(scope, receive), request_id)
            async with _cancelled_when_client_leaves(receive):
                tokens = await self._count(call.request)
            await _send_json(send, 200, anthropic_messages.token_count(tokens))

    async def _input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope[REQUEST_ID]
        async with _errors_answered(send, openai_responses.CODEC, request_id):
            body = await self._body(scope, receive)
            async with _cancelled_when_client_leaves(receive):
                answer = await self._memory.input_tokens(body, request_id, self._count)
            await _send_json(send, 200, answer)

    async def _count(self, request: Request) -> int:
        return await self._pool.call(CountTokens(request.id, request.model, request))

    # --- generation ---

    def _generate(self, codec: Codec[Any], memory: ResponseMemory | None = None) -> Endpoint:
        """`memory` is what a dialect remembers from one request to the next, if it does."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            request_id = scope[REQUEST_ID]
            async with _errors_answered(send, codec, request_id):
                body = await self._body(scope, receive)
                call = codec.decode(body, request_id) if memory is None else await memory.decode(body, request_id)
                call = self._addressed(call)
                stamp = Stamp(secrets.token_hex(12), int(time.time()))
                frames = fan_out.stream(self._pool.stream, call)
                if memory is not None:
                    frames = memory.recorded(call, stamp, frames)
                async with _cancelled_when_client_leaves(receive):
                    if call.stream:
                        await self._stream(codec, call, stamp, frames, send)
                    else:
                        await self._complete(codec, call, stamp, frames, send)

        return endpoint

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        body = await read_body(scope, receive, self._settings.max_body_bytes)
        if body is None:
            raise ClientGone
        return body

    def _addressed(self, call: Call[Any]) -> Call[Any]:
        if all(request.model for request in call.requests):
            return call
        model = the_only_model(self._pool)
        requests = tuple(msgspec.structs.replace(request, model=model) for request in call.requests)
        return msgspec.structs.replace(call, requests=requests)

    async def _complete(
        self, codec: Codec[Any], call: Call[Any], stamp: Stamp, frames: AsyncGenerator[Frame, None], send: Send
    ) -> None:
        collector = BatchCollector([request.n for request in call.requests])
        async with aclosing(frames):
            async for frame in frames:
                collector.feed_frame(frame)
        await _send_json(send, 200, codec.render(call, stamp, collector.result()))

    async def _stream(
        self, codec: Codec[Any], call: Call[Any], stamp: Stamp, frames: AsyncGenerator[Frame, None], send: Send
    ) -> None:
        encoder = codec.encoder(call, stamp)
        async with EventStream(send, encoder, self._settings) as out:
            try:
                async with aclosing(frames):
                    async for frame in frames:
                        await out.write(frame)
            except ClientTooSlow as error:
                logger.warning("request %s: cut off: %s", call.requests[0].id, error.message)
                raise ClientGone from None
            except ServingError as error:
                if not out.started:
                    raise
                await out.fail(error)
            except Exception:
                if not out.started:
                    raise
                # Headers are out, so the error travels as the dialect's own event; the detail goes to the log.
                logger.exception("request %s failed mid-stream", call.requests[0].id)
                await out.fail(InternalError(InternalError.PUBLIC_MESSAGE))


class EventStream:
    """One SSE answer: headers at the first frame or after `headers_after_s`, then keep-alives through every silence.

    The timer is one `call_later` per silence, not a task per frame; the lock keeps keep-alives from overtaking headers.
    It also cuts off a client that has not taken a write for `stalled_client_s`: the block is cancelled, and ends with
    `ClientGone`.
    """

    def __init__(self, send: Send, encoder: Encoder, settings: GatewaySettings) -> None:
        self._send = send
        self._encoder = encoder
        self._feed = frame_feed(encoder)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._last_write = self._loop.time()
        self._writing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._block: asyncio.Task[Any] | None = None
        self._stalled = False
        self.started = False

    async def __aenter__(self) -> EventStream:
        self._block = asyncio.current_task()
        self._arm(self._settings.headers_after_s)
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        if self._stalled and self._block is not None and self._block.uncancel() == 0:
            raise ClientGone from None
        if exc_type is None:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write(self, frame: Frame) -> None:
        await self._put(self._feed(frame))

    async def fail(self, error: ServingError) -> None:
        await self._put(self._encoder.feed(Failed(error.info)))

    async def _put(self, data: bytes) -> None:
        async with self._lock:
            self._writing_since = self._loop.time()
            if not self.started:
                self.started = True
                self._arm(self._settings.keepalive_s)
                await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            if data:
                self._last_write = self._loop.time()
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._writing_since = None

    def _arm(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        now, delay = self._loop.time(), self._settings.keepalive_s
        if self._writing_since is not None:
            left = self._writing_since + self._settings.stalled_client_s - now
            if left <= 0:
                assert self._block is not None
                self._stalled = True
                self._block.cancel()
                return
            delay = min(delay, left)
        elif self.started and (silence := now - self._last_write) < delay:
            delay -= silence
        else:
            self._beat = self._loop.create_task(self._put(self._encoder.keepalive()))
        self._arm(delay)


_STREAM_HEADERS = [
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    # nginx, as an ingress, would otherwise collect the stream: https://nginx.org/en/docs/http/ngx_http_proxy_module.html
    (b"x-accel-buffering", b"no"),
]


@asynccontextmanager
async def _errors_answered(send: Send, codec: Codec[Any], request_id: str) -> AsyncIterator[None]:
    """What the block raises before its answer has begun is the answer."""
    try:
        yield
    except ServingError as error:
        await _send_error(send, error, codec)
    except (ClientGone, asyncio.CancelledError):
        raise
    except Exception:
        # The last boundary before the client: the detail goes to the log.
        logger.exception("request %s failed", request_id)
        await _send_error(send, InternalError(InternalError.PUBLIC_MESSAGE), codec)


def _dialect(scope: Scope) -> Codec[Any]:
    """The one that words what belongs to no dialect: by what the caller says of itself, and by the path."""
    path = scope["path"]
    if path.startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return anthropic_messages.CODEC
    return openai_chat.CODEC if path.startswith("/v1/") else llamacpp_native.COMPLETION


def _query(scope: Scope, name: str) -> str:
    """The last value of a query parameter; "" without it."""
    values: list[str] = parse_qs(scope["query_string"].decode("latin-1")).get(name, [""])
    return values[-1]


@asynccontextmanager
async def _cancelled_when_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects, and turns that into `ClientGone`."""
    block = asyncio.current_task()
    assert block is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        block.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and block.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return


def _json(answer: Callable[[Scope], Awaitable[bytes]]) -> Endpoint:
    """An endpoint whose whole work is to say what its body is."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await _send_json(send, 200, await answer(scope))

    return endpoint


async def _send_json(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", JSON), (b"content-length", str(len(body)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(
    send: Send, error: ServingError, codec: Codec[Any], extra: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = list(extra)
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if isinstance(error, UnsupportedMediaType):
        # RFC 9110, 15.5.16: this header "ought to be used to indicate which … codings would have been accepted".
        headers.append((b"accept-encoding", content_encoding.ACCEPTED.encode()))
    status = anthropic_messages.status(error) if codec is anthropic_messages.CODEC else error.status
    await _send_json(send, status, codec.error(error), headers)


def _openai_model(entry: ModelEntry) -> dict[str, object]:
    return {"id": entry.id, "object": "model", "created": entry.created, "owned_by": "tokenyard"}


def _model_list(entries: Sequence[ModelEntry]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": [_openai_model(entry) for entry in entries]})


def build_app(pool: ModelPool, settings: GatewaySettings, *, echo_request_id: bool) -> ASGIApp:
    return RequestId(HttpApp(pool, settings), echo=echo_request_id)
