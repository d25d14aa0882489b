"""llama.cpp as a `Backend`: loads the model, turns requests into token sequences, and streams what the engine makes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar, assert_never

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
from backends.llamacpp.embedder import Embedder
from backends.llamacpp.embedding_context import EmbeddingContext, Matrix, purpose
from backends.llamacpp.embedding_inputs import checked_tokens, embedding_inputs, rerank_inputs
from backends.llamacpp.engine import Engine
from backends.llamacpp.parameters import check_limits, is_quick, sampler_spec
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler import SamplerSpec
from backends.llamacpp.sequence import Generation
from backends.llamacpp.settings import LlamaCppSettings
from backends.model_source import resolve_model
from protocols.calls import Embedding, EmbeddingRequest, Relevance, RerankRequest
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError, Unavailable
from protocols.events import Finished, Frame
from protocols.request import ChatPrompt, InfillPrompt, Request, TextPrompt, TokenPrompt

log = logging.getLogger(__name__)

T = TypeVar("T")

_INLINE_CHARS = 4096
"""Prompts up to this size are rendered and tokenised in a millisecond or two; larger ones leave the event loop."""


class _Loaded(msgspec.Struct, frozen=True):
    model: Model
    context: Context | None  # of a model that generates
    embedder: Embedder
    input_length: int  # most tokens of one input of `embedder`
    template: ChatTemplate
    card: ModelCard


class LlamaCppBackend(Unsupported):
    def __init__(self, settings: LlamaCppSettings) -> None:
        self._settings = settings
        self._loaded: _Loaded | None = None
        self._engine: Engine | None = None
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="llamacpp-tokenize")
        self._closed = False

    async def start(self) -> ModelCard:
        self._loaded = loaded = await asyncio.to_thread(_load, self._settings)
        runner = None
        if loaded.context is not None:
            runner = Runner(
                loaded.model,
                loaded.context,
                context_length=loaded.card.context_length,
                prefill_chunk=self._settings.prefill_chunk,
                prefix_sharing=self._settings.prefix_sharing,
                prompts=_prompt_cache(self._settings, loaded.context),
            )
        self._engine = Engine(runner, loaded.embedder, context_shift=self._settings.context_shift)
        self._engine.start()
        return loaded.card

    async def generate(self, request: Request) -> AsyncGenerator[Frame, None]:
        loaded, engine = self._generating()
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
                resume=checked_tokens(request.resume, loaded.model, "resume"),
                stop_indent=request.stop_indent,
                max_predict_ms=request.max_predict_ms,
                n=request.n,
                slot=request.slot,
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

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        loaded, engine = self._alive()
        if "embed" not in loaded.card.tasks:
            return await super().embed(request)
        chars = sum(len(prompt.text) for prompt in request.inputs if isinstance(prompt, TextPrompt))
        make = partial(embedding_inputs, loaded.model, request, loaded.input_length)
        inputs = await self._in_background(make) if chars > _INLINE_CHARS else make()
        # "Pooling none is never normalised."
        vectors = await _vectors(engine, inputs, -1 if loaded.card.pooling == "none" else request.normalize)
        return [
            Embedding(matrix.astype("<f4").tobytes(), matrix.shape[1], len(tokens))
            for matrix, tokens in zip(vectors, inputs, strict=True)
        ]

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        loaded, engine = self._alive()
        if "rerank" not in loaded.card.tasks:
            return await super().rerank(request)
        chars = sum(len(request.query) + len(document) for document in request.documents)
        make = partial(rerank_inputs, loaded.model, request, loaded.input_length)
        inputs = await self._in_background(make) if chars > _INLINE_CHARS else make()
        scores = await _vectors(engine, inputs, -1)
        return [Relevance(float(row[0, 0]), len(tokens)) for row, tokens in zip(scores, inputs, strict=True)]

    async def count_tokens(self, request: Request) -> int:
        self._generating()
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
            if self._loaded.context is not None:
                self._loaded.context.close()
            self._loaded.model.close()

    def _alive(self) -> tuple[_Loaded, Engine]:
        if self._loaded is None or self._engine is None or self._closed:
            raise Unavailable("The model is not loaded.")
        if self._engine.failure is not None:
            raise Unavailable(self._engine.failure)
        return self._loaded, self._engine

    def _generating(self) -> tuple[_Loaded, Engine]:
        loaded, engine = self._alive()
        if loaded.context is None:
            raise NotSupported("This model does not generate text")
        return loaded, engine

    async def _in_background(self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, make)

    async def _sampling(self, request: Request) -> SamplerSpec:
        """What `request` says about its tokens. Grammars and long lists take a while, so they leave the event loop."""
        loaded, _ = self._alive()
        if is_quick(request):
            return sampler_spec(loaded.model, request)
        return await self._in_background(partial(sampler_spec, loaded.model, request))

    async def _tokens(self, request: Request) -> Tokens:
        """The prompt of `request`, as `count_tokens` and `generate` both see it."""
        loaded, _ = self._alive()
        if _chars(request) <= _INLINE_CHARS:
            tokens = _tokenize(request, loaded)
        else:
            tokens = await self._in_background(partial(_tokenize, request, loaded))
        if not len(tokens):
            raise InvalidRequest("The prompt is empty", param="prompt")
        return tokens


async def _vectors(engine: Engine, inputs: Sequence[Tokens], normalize: int) -> list[Matrix]:
    call = engine.embed(inputs, normalize)
    try:
        return await call.answer
    finally:
        engine.cancel_call(call)


# --- loading ---------------------------------------------------------------


def _load(settings: LlamaCppSettings) -> _Loaded:
    path = resolve_model(settings.model)
    init_native()
    repack = not built_with_amx() if settings.repack_weights is None else settings.repack_weights
    try:
        model = Model(path, gpu_layers=settings.gpu_layers, repack=repack)
    except LlamaCppError as error:
        raise BackendStartError(f"model {settings.model!r}: {error}") from error
    try:
        return _load_contexts(settings, model, path)
    except (LlamaCppError, ValueError) as error:
        model.close()
        raise BackendStartError(f"model {settings.model!r}: {error}") from error


def _load_contexts(settings: LlamaCppSettings, model: Model, path: Path) -> _Loaded:
    use = purpose(model, settings.pooling)
    generates = "generate" in use.tasks
    input_length = min(settings.embedding_batch_size or settings.micro_batch_size, model.trained_context)
    context_length = min(settings.context_length, model.trained_context) if generates else input_length
    threads = settings.threads or available_cores()
    template = ChatTemplate(
        model.chat_template if generates else "", bos_token=model.bos_text, eos_token=model.eos_text
    )
    open_embeddings = partial(
        EmbeddingContext,
        model,
        pooling=use.pooling,
        batch_size=settings.embedding_batch_size or settings.micro_batch_size,
        threads=threads,
        flash_attention=settings.flash_attention,
    )
    embedder = Embedder(open_embeddings, slots=settings.slots, chunk=settings.prefill_chunk)
    context = None
    if generates:
        context = _generation_context(settings, model, context_length, threads)
    else:
        _warm_up_embeddings(embedder)
    card = ModelCard(
        context_length=context_length,
        slots=settings.slots,
        engine="llama.cpp",
        vocab_size=model.vocab_size,
        parameters=model.parameters,
        file_bytes=path.stat().st_size,
        chat_template=model.chat_template,
        tasks=use.tasks,
        embedding_length=model.embedding_length,
        pooling=use.pooling,
    )
    return _Loaded(model, context, embedder, input_length, template, card)


def _generation_context(settings: LlamaCppSettings, model: Model, context_length: int, threads: int) -> Context:
    if settings.context_length > context_length:
        log.warning("model %r: the context is %d, what it was trained for", settings.model, context_length)
    context = Context(
        model,
        sequences=settings.slots,
        context_length=context_length,
        batch_size=settings.batch_size,
        micro_batch_size=settings.micro_batch_size,
        threads=threads,
        unified_kv=settings.unified_kv,
        kv_size=settings.kv_size,
        flash_attention=settings.flash_attention,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )
    if (code := _warm_up(context)) != DECODED:
        context.close()
        raise LlamaCppError(f"a first token cannot be computed (llama_decode answered {code})")
    return context


def _warm_up_embeddings(embedder: Embedder) -> None:
    try:
        embedder.open().compute([np.zeros(1, np.int32)])
    except LlamaCppError:
        embedder.close()
        raise


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
            return checked_tokens(tokens, loaded.model, "prompt")
        case InfillPrompt():
            raise NotSupported("This model cannot fill gaps: it has no tokens for it")
        case _:
            assert_never(request.prompt)


def _tokenize_text(text: str, model: Model) -> Tokens:
    """Most templates write the beginning-of-text token themselves, and a model must not see it twice."""
    begins = bool(model.bos_text) and text.startswith(model.bos_text)
    return model.tokenize(text, add_special=model.adds_bos and not begins, parse_special=True)
