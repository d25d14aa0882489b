"""The HTTP side: an explicit route table, and the endpoint all generating routes share. Knows no engine and no Ray."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import Any

import msgspec

from deployments import caller, fan_out, granted, request_log, response_store
from deployments.access import Access
from deployments.cors import Cors
from deployments.event_stream import EventStream
from deployments.http_answers import (
    ClientGone,
    Endpoint,
    cancelled_when_client_leaves,
    dialect_of,
    errors_answered,
    request_body,
    send_error,
    send_json,
)
from deployments.http_protocol import ChunkWriter, chunk_writer
from deployments.middleware import REQUEST_ID, ASGIApp, Receive, RequestId, Scope, Send
from deployments.models import ModelEntry, ModelPool, the_only_model
from deployments.monitor import Monitor
from deployments.monitor_endpoints import MonitorEndpoints
from deployments.question_endpoints import QuestionEndpoints, messages_codec
from deployments.request_log import RequestLog, Traces
from deployments.responses import ResponseMemory, Run
from deployments.settings import ConfigError, GatewaySettings
from deployments.stored_responses import stored_response_endpoints
from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses
from protocols.codec import Call, Codec, Stamp
from protocols.collect import BatchCollector
from protocols.errors import (
    MAX_NAME,
    ClientTooSlow,
    InternalError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    ServingError,
    Unavailable,
)
from protocols.events import Frame
from protocols.llamacpp_native import questions
from protocols.sink import watched

logger = logging.getLogger(__name__)

ALLOWED = "tokenyard.allowed_methods"
"""Key in the ASGI scope under which the methods of a path stand, when it was asked for with another."""


class HttpApp:
    """The route table. Every public path is on this screen; nothing reaches an engine by default."""

    def __init__(self, pool: ModelPool, settings: GatewaySettings, monitor: Monitor | None = None) -> None:
        self._pool = pool
        self._pool_of = functools.partial(granted.pool_of, pool, settings)
        self._settings = settings
        self._memory = ResponseMemory(response_store.create(settings.response_store))
        asking = QuestionEndpoints(self._pool_of, self._memory, settings)
        ask = asking.ask
        looking = MonitorEndpoints(monitor or Monitor(pool), pool, settings)
        self._routes: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": self._generate(openai_chat.CODEC)},
            "/v1/responses": {"POST": self._generate(openai_responses.CODEC, self._memory)},
            "/v1/responses/input_tokens": {"POST": asking.input_tokens},
            "/v1/completions": {"POST": self._generate(openai_completions.CODEC)},
            "/v1/messages": {"POST": self._messages},
            "/v1/messages/count_tokens": {"POST": asking.count_tokens},
            "/v1/models": {"GET": self._models},
            "/v1/embeddings": {"POST": ask(questions.openai_embeddings, openai_chat.CODEC)},
            "/v1/rerank": {"POST": ask(questions.rerank, openai_chat.CODEC)},
            "/v1/reranking": {"POST": ask(questions.rerank, openai_chat.CODEC)},
            "/v1/health": {"GET": self._health},
            # Without a prefix, everything is in the manner of llama.cpp.
            "/": {"GET": looking.home},
            "/health": {"GET": self._health},
            "/api/hello": {"GET": self._hello},  # Claude Code looks here whether anybody is at home
            "/api/status": {"GET": looking.status},
            "/metrics": {"GET": looking.metrics},
            "/models": {"GET": self._models},
            "/completion": {"POST": self._generate(llamacpp_native.COMPLETION)},
            "/completions": {"POST": self._generate(llamacpp_native.COMPLETION)},
            "/infill": {"POST": self._generate(llamacpp_native.INFILL)},
            "/chat/completions": {"POST": self._generate(llamacpp_native.CHAT)},
            "/chat/completions/input_tokens": {"POST": asking.chat_input_tokens},
            "/embedding": {"POST": ask(questions.embeddings)},
            "/embeddings": {"POST": ask(questions.embeddings)},
            "/rerank": {"POST": ask(questions.rerank)},
            "/reranking": {"POST": ask(questions.rerank)},
            "/tokenize": {"POST": ask(questions.tokenize)},
            "/detokenize": {"POST": ask(questions.detokenize)},
            "/apply-template": {"POST": ask(questions.apply_template)},
            "/props": {"GET": ask(questions.props)},
            "/slots": {"GET": ask(questions.slots)},
            "/slots/{id}": {"POST": asking.slot_action},
            "/lora-adapters": {"GET": ask(questions.adapters), "POST": ask(questions.set_adapters)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            await self._memory.aclose()
            return
        if scope["type"] != "http":
            raise ValueError(f"this application speaks HTTP, not {scope['type']}")
        if dialect_of(scope) is anthropic_messages.CODEC:
            send = caller.with_request_id(send, scope[REQUEST_ID])
        try:
            await self._endpoint(scope)(scope, receive, send)
        except ServingError as error:
            # RFC 9110, 15.5.6: "The origin server MUST generate an Allow header field in a 405 response".
            allow = [(b"allow", ", ".join(scope[ALLOWED]).encode())] if ALLOWED in scope else []
            await send_error(send, error, dialect_of(scope), scope[REQUEST_ID], allow)
        except ClientGone:
            request_log.current().outcome = request_log.CLIENT_GONE
            logger.debug("request %s: the client left", scope[REQUEST_ID])

    def _endpoint(self, scope: Scope) -> Endpoint:
        """Raises `NotFound` or `MethodNotAllowed`, in words that say what there is."""
        path, method = scope["path"], scope["method"]
        methods = self._routes.get(path)
        if methods is None and path.startswith("/v1/models/"):
            methods = {"GET": self._model}
        if methods is None and path.startswith("/v1/responses/"):
            methods = stored_response_endpoints(self._memory, path)
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

    async def _hello(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b'{"status":"ok"}')

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whether a model can answer. "`/health` 503 {error: unavailable_error, Loading model} until ready"."""
        if not any(entry.ready for entry in self._pool.models()):
            raise Unavailable("Loading model", retry_after_s=1.0)
        await send_json(send, 200, b'{"status":"ok"}')

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        entries = self._pool_of(scope).models()
        if dialect_of(scope) is anthropic_messages.CODEC:
            query = scope["query_string"].decode("latin-1")
            body = anthropic_messages.model_page([(entry.id, entry.created) for entry in entries], query)
        else:
            body = _model_list(entries)
        await send_json(send, 200, body)

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["path"].removeprefix("/v1/models/")
        entries = self._pool_of(scope).models()
        entry = next((entry for entry in entries if entry.id == wanted), None)
        if entry is None:
            raise ModelNotFound.of(wanted, [entry.id for entry in entries])
        if dialect_of(scope) is anthropic_messages.CODEC:
            body = anthropic_messages.model_body(entry.id, entry.created)
        else:
            body = msgspec.json.encode(_openai_model(entry))
        await send_json(send, 200, body)

    # --- generation ---

    async def _messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(messages_codec(scope, self._settings))(scope, receive, send)

    def _generate(self, codec: Codec[Any], memory: ResponseMemory | None = None) -> Endpoint:
        """`memory` is what a dialect remembers from one request to the next, if it does."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            request_id, owner, pool = scope[REQUEST_ID], caller.owner(scope), self._pool_of(scope)
            record = request_log.current()
            record.dialect = codec.name
            async with errors_answered(send, codec, request_id):
                body = await request_body(scope, receive, self._settings)
                if memory is None:
                    call = codec.decode(body, request_id)
                else:
                    call = await memory.decode(body, request_id, owner)
                del body  # it may be megabytes, and the stream takes minutes
                call = _addressed(call, pool, caller.session(scope), caller.timeout_s(scope))
                record.asks(call.requests[0].model, codec.name, request_log.GENERATE, call.stream)
                stamp = Stamp(secrets.token_hex(12), _now(), _Once())
                run: Run = functools.partial(fan_out.stream, pool.stream, call)
                if memory is not None:
                    run = functools.partial(memory.recorded, call, stamp, owner, run)
                async with cancelled_when_client_leaves(receive):
                    if call.stream:
                        await self._stream(codec, call, stamp, run, send, chunk_writer(scope))
                    else:
                        await self._complete(codec, call, stamp, run(None), send)

        return endpoint

    async def _complete(
        self, codec: Codec[Any], call: Call[Any], stamp: Stamp, frames: AsyncGenerator[Frame, None], send: Send
    ) -> None:
        record = request_log.current()
        collector = BatchCollector([request.n for request in call.requests])
        async with aclosing(frames):
            async for frame in frames:
                record.observe(frame)
                collector.feed_frame(frame)
        await send_json(send, 200, codec.render(call, stamp, collector.result()))

    async def _stream(
        self, codec: Codec[Any], call: Call[Any], stamp: Stamp, run: Run, send: Send, chunks: ChunkWriter | None
    ) -> None:
        record, encoder = request_log.current(), codec.encoder(call, stamp)
        async with EventStream(send, encoder, self._settings, call.keepalive_s, chunks) as out:
            try:
                async with aclosing(run(watched(out.take, record.observe))) as frames:
                    async for frame in frames:
                        record.observe(frame)
                        await out.write(frame)
            except ClientTooSlow as error:
                logger.warning("request %s: cut off: %s", call.requests[0].id, error.message)
                raise ClientGone from None
            except ServingError as error:
                if not out.started:
                    raise
                record.failed(error)
                await out.fail(error)
            except Exception:
                if not out.started:
                    raise
                # Headers are out, so the error travels as the dialect's own event; the detail goes to the log.
                logger.exception("request %s failed mid-stream", call.requests[0].id)
                failure = InternalError(InternalError.PUBLIC_MESSAGE)
                record.failed(failure)
                await out.fail(failure)


def _addressed(call: Call[Any], pool: ModelPool, session: str | None, timeout_s: float | None) -> Call[Any]:
    """`session` is what the request belongs to by its headers, which know more of it than its body."""
    model = "" if all(request.model for request in call.requests) else the_only_model(pool)
    requests = tuple(
        msgspec.structs.replace(
            request, model=model or request.model, affinity=session or request.affinity, timeout_s=timeout_s
        )
        for request in call.requests
    )
    return msgspec.structs.replace(call, requests=requests)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return


def _now() -> int:
    return int(time.time())


class _Once:
    """The time at which it is first asked for. Each stream has one: `functools.cache` takes 600 bytes."""

    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time: int | None = None

    def __call__(self) -> int:
        if self._time is None:
            self._time = _now()
        return self._time


def _openai_model(entry: ModelEntry) -> dict[str, object]:
    plain = {"id": entry.id, "object": "model", "created": entry.created, "owned_by": "tokenyard"}
    named = {"aliases": entry.aliases, "tags": entry.tags} if entry.aliases or entry.tags else {}
    return plain | named


def _model_list(entries: Sequence[ModelEntry]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": [_openai_model(entry) for entry in entries]})


def build_app(
    pool: ModelPool, settings: GatewaySettings, *, echo_request_id: bool, monitor: Monitor | None = None
) -> ASGIApp:
    """Raises `ConfigError` if a file that the settings name cannot be used."""
    monitor = monitor or Monitor(pool)
    allowed = Cors(Access(HttpApp(pool, settings, monitor), settings), settings.cors)
    traces = None if settings.trace_endpoint is None else _traces(settings.trace_endpoint)
    return RequestId(RequestLog(allowed, monitor, traces=traces), echo=echo_request_id)


def _traces(endpoint: str) -> Traces:
    try:
        spans: Traces = import_module("deployments.tracing").otlp(endpoint)
    except ModuleNotFoundError as error:
        raise ConfigError(f"trace_endpoint needs a package that is not here (extra otel): {error}") from None
    return spans
