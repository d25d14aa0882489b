"""The models as one caller may use them: which there are for its key, what is charged for, and what is too large."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing

import msgspec

from deployments.limits import Account
from deployments.middleware import ACCOUNT, Scope
from deployments.models import ModelEntry, ModelPool
from deployments.settings import GatewaySettings
from protocols.calls import (
    AnswerT,
    ApplyTemplate,
    CountTokens,
    EmbeddingRequest,
    EraseSlot,
    GetSlots,
    Question,
    RerankRequest,
    RestoreSlot,
    SaveSlot,
    SetAdapters,
)
from protocols.errors import InvalidRequest, ModelNotFound, PermissionDenied
from protocols.events import Finished, Frame, Started
from protocols.request import ChatPrompt, Prompt, Request
from protocols.sink import Sink, watched

_SHARED = (GetSlots, SaveSlot, RestoreSlot, EraseSlot, SetAdapters)
"""Questions about what all keys share: they show others' requests, or change their answers."""

_BYTES_PER_TOKEN = 4
_TYPICAL_OUTPUT = 256
"""Tokens an answer is charged for beforehand, if it may have as many: `max_tokens` is mostly far more than it gets."""

_encode = msgspec.msgpack.Encoder().encode


class GrantedPool:
    """The `ModelPool` of one request. `account` is its key's; None where there are no keys."""

    def __init__(self, pool: ModelPool, settings: GatewaySettings, account: Account | None) -> None:
        self._pool = pool
        self._settings = settings
        self._account = account

    def models(self) -> Sequence[ModelEntry]:
        entries = self._pool.models()
        if self._account is None:
            return entries
        return [entry for entry in entries if self._account.key.may_use(entry.id)]

    def stream(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]:
        self._check_size(request.prompt)
        if self._account is None:
            return self._pool.stream(request, sink)
        return self._charged(request, self._account, sink)

    async def _charged(self, request: Request, account: Account, sink: Sink | None) -> AsyncGenerator[Frame, None]:
        self._check_model(request.model, account)
        output = min(request.max_tokens or _TYPICAL_OUTPUT, _TYPICAL_OUTPUT)
        charged = _prompt_tokens(account, request) + request.n * output
        account.charge(charged)
        used = _Used()
        try:
            own = msgspec.structs.replace(request, tenant=account.key.id)
            async with aclosing(self._pool.stream(own, watched(sink, used.count))) as frames:
                async for frame in frames:
                    used.count(frame)
                    yield frame
        except ModelNotFound:
            raise self._not_found(request.model) from None
        finally:
            account.settle(charged, used.tokens)

    async def call(self, call: Question[AnswerT]) -> AnswerT:
        if isinstance(call, CountTokens):
            self._check_size(call.request.prompt)
        elif isinstance(call, ApplyTemplate):
            self._check_size(call.prompt)
        account = self._account
        if account is None:
            return await self._pool.call(call)
        self._check_model(call.model, account)
        if isinstance(call, _SHARED) and not account.key.admin:
            raise PermissionDenied("This is about what all users of the model share, and needs a key of an admin.")
        charged = _prompt_tokens(account, call) if isinstance(call, EmbeddingRequest | RerankRequest) else 0
        account.charge(charged)
        used = 0
        try:
            answer = await self._pool.call(msgspec.structs.replace(call, tenant=account.key.id))
            if charged:
                used = sum(part.prompt_tokens for part in answer)  # type: ignore[attr-defined]  # lists, both of them
            return answer
        except ModelNotFound:
            raise self._not_found(call.model) from None
        finally:
            account.settle(charged, used)

    def _check_model(self, model: str, account: Account) -> None:
        if not account.key.may_use(model):
            raise self._not_found(model)

    def _not_found(self, model: str) -> ModelNotFound:
        """The same for a model that there is not and for one that the key may not use: it names the key's own."""
        return ModelNotFound.of(model, [entry.id for entry in self.models()])

    def _check_size(self, prompt: Prompt) -> None:
        if not isinstance(prompt, ChatPrompt):
            return
        for what, count, limit in (
            ("messages", len(prompt.messages), self._settings.max_messages),
            ("tools", len(prompt.tools), self._settings.max_tools),
        ):
            if count > limit:
                raise InvalidRequest(f"The request has {count} {what}, and at most {limit} are taken.")


def pool_of(pool: ModelPool, settings: GatewaySettings, scope: Scope) -> ModelPool:
    """`pool` for the caller of a request."""
    return GrantedPool(pool, settings, scope.get(ACCOUNT))


def models_of(pool: ModelPool, scope: Scope) -> Set[str] | None:
    """The ids of the models that a request's caller may see anything of; None: all, also those that are gone."""
    account: Account | None = scope.get(ACCOUNT)
    if account is None or account.key.models is None:
        return None
    return {entry.of or entry.id for entry in pool.models() if account.key.may_use(entry.id)}


class _Used:
    """What a request has used so far: by its usage for choices that have one, and by their tokens for the others."""

    def __init__(self) -> None:
        self._prompt = 0
        self._completions: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        return self._prompt + sum(self._completions.values())

    def count(self, frame: Frame) -> None:
        if frame.tokens:
            self._completions[frame.choice] = self._completions.get(frame.choice, 0) + len(frame.tokens)
        for event in frame.events:
            if isinstance(event, Started):
                self._prompt = event.prompt_tokens
            elif isinstance(event, Finished):
                self._prompt = event.usage.prompt_tokens
                self._completions[event.choice] = event.usage.completion_tokens


def _prompt_tokens(account: Account, asked: Request | EmbeddingRequest | RerankRequest) -> int:
    """About as many as its prompt has; not looked at where nobody counts them."""
    return len(_encode(asked)) // _BYTES_PER_TOKEN if account.counts_tokens else 0
