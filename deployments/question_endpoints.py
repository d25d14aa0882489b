"""The endpoints that are one question to a model and one answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from deployments import caller, request_log
from deployments.http_answers import (
    Endpoint,
    cancelled_when_client_leaves,
    errors_answered,
    query_value,
    request_body,
    send_json,
)
from deployments.middleware import REQUEST_ID, Receive, Scope, Send, header
from deployments.models import ModelPool, the_only_model
from deployments.responses import ResponseMemory
from deployments.settings import GatewaySettings
from protocols import anthropic_messages, llamacpp_native, openai_responses
from protocols.calls import CountTokens
from protocols.codec import Codec, Reader
from protocols.llamacpp_native import questions
from protocols.openai_shared import input_token_count
from protocols.request import Request


def messages_codec(scope: Scope, settings: GatewaySettings) -> Codec[Any]:
    """As strict about the API's version as the operator wants it."""
    if not settings.anthropic_strict:
        return anthropic_messages.CODEC
    return anthropic_messages.strict_codec(header(scope, b"anthropic-version").decode("latin-1"))


class QuestionEndpoints:
    def __init__(
        self, pool_of: Callable[[Scope], ModelPool], memory: ResponseMemory, settings: GatewaySettings
    ) -> None:
        """`pool_of`: the models as the caller of a request may use them."""
        self._pool_of = pool_of
        self._memory = memory
        self._settings = settings

    def ask(self, read: Reader, codec: Codec[Any] = llamacpp_native.COMPLETION) -> Endpoint:
        """`codec` words the errors. The model stands in the body, or where there is none in the query."""

        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            request_log.current().dialect = codec.name
            async with errors_answered(send, codec, scope[REQUEST_ID]):
                pool = self._pool_of(scope)
                ask = read(await request_body(scope, receive, self._settings), scope[REQUEST_ID])
                model = ask.question.model or query_value(scope, "model") or the_only_model(pool)
                question = msgspec.structs.replace(ask.question, model=model)
                request_log.current().asks(model, codec.name, question.tag())
                async with cancelled_when_client_leaves(receive):
                    answer = await pool.call(question)
                await send_json(send, 200, ask.render(answer, model))

        return endpoint

    async def slot_action(self, scope: Scope, receive: Receive, send: Send) -> None:
        action = questions.slot_action(scope["path"].removeprefix("/slots/"), query_value(scope, "action"))
        await self.ask(action)(scope, receive, send)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        codec, request_id = messages_codec(scope, self._settings), scope[REQUEST_ID]
        async with errors_answered(send, codec, request_id):
            call = codec.decode(await request_body(scope, receive, self._settings), request_id)
            request_log.current().asks(call.request.model, codec.name, CountTokens.tag())
            async with cancelled_when_client_leaves(receive):
                tokens = await _count(self._pool_of(scope), call.request)
            await send_json(send, 200, anthropic_messages.token_count(tokens))

    async def input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope[REQUEST_ID]
        async with errors_answered(send, openai_responses.CODEC, request_id):
            body = await request_body(scope, receive, self._settings)
            count = partial(_count, self._pool_of(scope))
            request_log.current().asks("", openai_responses.CODEC.name, CountTokens.tag())
            async with cancelled_when_client_leaves(receive):
                answer = await self._memory.input_tokens(body, request_id, caller.owner(scope), count)
            await send_json(send, 200, answer)

    async def chat_input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        codec, request_id, pool = llamacpp_native.CHAT, scope[REQUEST_ID], self._pool_of(scope)
        async with errors_answered(send, codec, request_id):
            call = codec.decode(await request_body(scope, receive, self._settings), request_id)
            async with cancelled_when_client_leaves(receive):
                tokens = await _count(pool, call.request)
            await send_json(send, 200, input_token_count(tokens))


async def _count(pool: ModelPool, request: Request) -> int:
    model = request.model or the_only_model(pool)
    return await pool.call(CountTokens(request.id, model, request))
