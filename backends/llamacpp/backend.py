"""llama.cpp as a `Backend`: loads the model, turns requests into token sequences, and streams what the engine makes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from backends.base import BackendStartError, BackendStats, ModelCard, Unsupported
from backends.chat_template import ChatTemplate
from backends.llamacpp.bindings import (
    DECODED,
    Batch,
    Context,
    LlamaCppError,
    Model,
    Tokens,
    built_with_amx,
    init_native,
)
from backends.llamacpp.draft_model import DraftModel, can_be_cut, check_same_vocabulary
from backends.llamacpp.drafting import Drafting
from backends.llamacpp.engine import Engine
from backends.llamacpp.parameters import check_limits, is_quick, sampler_spec
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler import SamplerSpec
from backends.llamacpp.sequence import Generation
from backends.llamacpp.settings import LlamaCppSettings
from backends.model_source import resolve_model
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError, Unavailable
from protocols.events import Finished, Frame
from protocols.request import ChatPrompt, InfillPrompt, Request, TextPrompt, TokenPrompt

log = logging.getLogger(__name__)

_INLINE_CHARS = 4096
"""Prompts up to this size are rendered and tokenised in a millisecond or two; larger ones leave the event loop."""


class _Loaded(msgspec.Struct, frozen=True):
    model: Model
    context: Context
    template: ChatTemplate
    card: ModelCard
    drafting: Drafting | None


class LlamaCppBackend(Unsupported):
    def __init__(self, settings: LlamaCppSettings) -> None:
        self._settings = settings
        self._loaded: _Loaded | None = None
        self._engine: Engine | None = None
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="llamacpp-tokenize")
        self._closed = False

    async def start(self) -> ModelCard:
        self._loaded = await asyncio.to_thread(_load, self._settings)
        runner = Runner(
            self._loaded.model,
            self._loaded.context,
            context_length=self._loaded.card.context_length,
            prefill_chunk=self._settings.prefill_chunk,
            prefix_sharing=self._settings.prefix_sharing,
            prompts=_prompt_cache(self._settings, self._loaded.context),
            drafting=self._loaded.drafting,
        )
        self._engine = Engine(runner, context_shift=self._settings.context_shift)
        self._engine.start()
        return self._loaded.card

    async def generate(self, request: Request) -> AsyncGenerator[Frame, None]:
        loaded, engine = self._alive()
        _check_slots(request, loaded.card.slots)
        check_limits(request)
        sampling = await self._sampling(request)
        prompt = await self._tokens(request)
        if len(prompt) >= loaded.card.context_length:
            raise ContextOverflow.of(len(prompt), loaded.card.context_length)
        stream = engine.submit(
            Generation(
                id=request.id,
                prompt=prompt,
                sampling=sampling,
                max_tokens=request.max_tokens,
                stop=request.stop,
                ignore_eos=request.ignore_eos,
                resume=_checked(request.resume, loaded.model, "resume"),
                stop_indent=request.stop_indent,
                max_predict_ms=request.max_predict_ms,
                n=request.n,
                slot=request.slot,
                speculate=self._settings.speculation.kind != "off" if request.speculate is None else request.speculate,
            )
        )
        open_choices = request.n
        try:
            while open_choices:
                item = await stream.items.get()
                if isinstance(item, ServingError):
                    raise item
                yield item
                if item.events and isinstance(item.events[-1], Finished):
                    open_choices -= 1
        finally:
            engine.cancel(stream)

    async def count_tokens(self, request: Request) -> int:
        return len(await self._tokens(request))

    def stats(self) -> BackendStats:
        if self._engine is None:
            return BackendStats(slots=self._settings.slots, running=0, waiting=0)
        return self._engine.stats()

    async def check_health(self) -> None:
        self._alive()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._engine is not None:
            self._engine.stop("The model is being shut down.")
            await asyncio.to_thread(self._engine.join)
        # The model must outlive whoever is still tokenising with it.
        await asyncio.to_thread(self._tokenizers.shutdown)
        if self._loaded is not None:
            if self._loaded.drafting is not None:
                self._loaded.drafting.close()
            self._loaded.context.close()
            self._loaded.model.close()

    def _alive(self) -> tuple[_Loaded, Engine]:
        if self._loaded is None or self._engine is None or self._closed:
            raise Unavailable("The model is not loaded.")
        if self._engine.failure is not None:
            raise Unavailable(self._engine.failure)
        return self._loaded, self._engine

    async def _sampling(self, request: Request) -> SamplerSpec:
        """What `request` says about its tokens. Grammars and long lists take a while, so they leave the event loop."""
        loaded, _ = self._alive()
        if is_quick(request):
            return sampler_spec(loaded.model, request)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, sampler_spec, loaded.model, request)

    async def _tokens(self, request: Request) -> Tokens:
        """The prompt of `request`, as `count_tokens` and `generate` both see it."""
        loaded, _ = self._alive()
        if _chars(request) <= _INLINE_CHARS:
            tokens = _tokenize(request, loaded)
        else:
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(self._tokenizers, _tokenize, request, loaded)
        if not len(tokens):
            raise InvalidRequest("The prompt is empty", param="prompt")
        return tokens


# --- loading ---------------------------------------------------------------


def _load(settings: LlamaCppSettings) -> _Loaded:
    path = resolve_model(settings.model)
    init_native()
    try:
        model = Model(path, gpu_layers=settings.gpu_layers, repack=_repacks(settings))
    except LlamaCppError as error:
        raise BackendStartError(f"model {settings.model!r}: {error}") from error
    try:
        return _load_context(settings, model, path)
    except BackendStartError:
        model.close()
        raise


def _load_context(settings: LlamaCppSettings, model: Model, path: Path) -> _Loaded:
    name = f"model {settings.model!r}"
    if not model.generates:
        raise BackendStartError(f"{name}: it does not generate text")
    if settings.context_length > model.trained_context:
        log.warning("%s: the context is %d, what it was trained for", name, model.trained_context)
    context_length = min(settings.context_length, model.trained_context)
    try:
        template = ChatTemplate(model.chat_template, bos_token=model.bos_text, eos_token=model.eos_text)
        context = _context(settings, model, context_length)
    except (LlamaCppError, ValueError) as error:
        raise BackendStartError(f"{name}: {error}") from error
    if (code := _warm_up(context)) != DECODED:
        context.close()
        raise BackendStartError(f"{name}: a first token cannot be computed (llama_decode answered {code})")
    try:
        drafting = _drafting(settings, model, context, context_length)
    except BackendStartError:
        context.close()
        raise
    card = ModelCard(
        context_length=context_length,
        slots=settings.slots,
        engine="llama.cpp",
        vocab_size=model.vocab_size,
        parameters=model.parameters,
        file_bytes=path.stat().st_size,
        chat_template=model.chat_template,
    )
    return _Loaded(model, context, template, card, drafting)


def _context(settings: LlamaCppSettings, model: Model, context_length: int) -> Context:
    return Context(
        model,
        sequences=settings.slots,
        context_length=context_length,
        batch_size=settings.batch_size,
        micro_batch_size=settings.micro_batch_size,
        threads=settings.threads or available_cores(),
        unified_kv=settings.unified_kv,
        kv_size=settings.kv_size,
        flash_attention=settings.flash_attention,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )


def _drafting(settings: LlamaCppSettings, model: Model, context: Context, context_length: int) -> Drafting | None:
    """What guesses tokens, also for requests that ask for it themselves. None where wrong guesses cannot be undone."""
    speculation = settings.speculation
    if not can_be_cut(context):
        if speculation.kind != "off":
            log.warning("model %r: its states cannot be cut, so nothing is guessed", settings.model)
        return None
    drafts = None
    if speculation.draft_model is not None:
        drafts = _load_draft_model(settings, speculation.draft_model, model, context_length)
    return Drafting(speculation, context_length, apart=not settings.unified_kv, model=drafts)


def _load_draft_model(settings: LlamaCppSettings, source: str, model: Model, context_length: int) -> DraftModel:
    path = resolve_model(source)
    try:
        draft = Model(path, gpu_layers=settings.gpu_layers, repack=_repacks(settings))
    except LlamaCppError as error:
        raise BackendStartError(f"draft model {source!r}: {error}") from error
    context = None
    try:
        check_same_vocabulary(model, draft)
        context = _context(settings, draft, context_length)
        if not can_be_cut(context):
            raise LlamaCppError("its states cannot be cut, so it cannot take back a wrong guess")
    except (LlamaCppError, ValueError) as error:
        if context is not None:
            context.close()
        draft.close()
        raise BackendStartError(f"draft model {source!r}: {error}") from error
    return DraftModel(draft, context, settings.speculation.p_min)


def _repacks(settings: LlamaCppSettings) -> bool:
    return not built_with_amx() if settings.repack_weights is None else settings.repack_weights


def _warm_up(context: Context) -> int:
    """Computes one token, so that the first request finds the weights in memory and the buffers made."""
    batch = Batch(1)
    batch.add([0], 0, 0, logits=True)
    code = context.decode(batch)
    context.forget(0)
    return code


def available_cores() -> int:
    """The cores this process may run on, not more than its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def _prompt_cache(settings: LlamaCppSettings, context: Context) -> PromptCache | None:
    if not settings.prompt_cache_mib:
        return None
    tokens = context.kv_size if settings.prompt_cache_tokens is None else settings.prompt_cache_tokens
    return PromptCache(limit_size=max(settings.prompt_cache_mib, 0) * 2**20, limit_tokens=tokens)


def _check_slots(request: Request, slots: int) -> None:
    if request.n > slots:
        raise InvalidRequest(f"This model produces at most {slots} choices per request", param="n")
    if request.n > 1 and request.resume:
        raise InvalidRequest("A request with several choices cannot be resumed", param="n")
    if request.slot.id is not None and not 0 <= request.slot.id < slots:
        raise InvalidRequest(f"There is no slot {request.slot.id}: this model has {slots}", param="id_slot")


# --- prompts ---------------------------------------------------------------


def _chars(request: Request) -> int:
    match request.prompt:
        case ChatPrompt(messages=messages, tools=tools):
            return sum(len(m.text) + len(m.reasoning or "") for m in messages) + 512 * len(tools)
        case TextPrompt(text=text):
            return len(text)
        case TokenPrompt():
            return 0
        case InfillPrompt(prefix=prefix, suffix=suffix, files=files):
            return len(prefix) + len(suffix) + sum(len(file.text) for file in files)
        case _:
            assert_never(request.prompt)


def _tokenize(request: Request, loaded: _Loaded) -> Tokens:
    match request.prompt:
        case ChatPrompt(messages=messages, tools=tools, template_kwargs=kwargs):
            return _tokenize_text(loaded.template.render(messages, tools, kwargs=kwargs), loaded.model)
        case TextPrompt(text=text):
            return _tokenize_text(text, loaded.model)
        case TokenPrompt(tokens=tokens):
            return _checked(tokens, loaded.model, "prompt")
        case InfillPrompt():
            raise NotSupported("This model cannot fill gaps: it has no tokens for it")
        case _:
            assert_never(request.prompt)


def _tokenize_text(text: str, model: Model) -> Tokens:
    """Most templates write the beginning-of-text token themselves, and a model must not see it twice."""
    begins = bool(model.bos_text) and text.startswith(model.bos_text)
    return model.tokenize(text, add_special=model.adds_bos and not begins, parse_special=True)


def _checked(tokens: tuple[int, ...], model: Model, param: str) -> Tokens:
    """An id outside the vocabulary would make the whole batch fail, with everyone else's tokens in it."""
    for token in tokens:
        if not 0 <= token < model.vocab_size:
            raise InvalidRequest(f"There is no token {token} in a vocabulary of {model.vocab_size}", param=param)
    return np.array(tokens, np.int32)
