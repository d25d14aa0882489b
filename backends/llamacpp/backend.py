"""llama.cpp as a `Backend`: loads the model, turns requests into token sequences, and streams what the engine makes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from backends.adapters import adapter_set
from backends.base import BackendStartError, BackendStats, ModelCard, Unsupported
from backends.chat_template import ChatTemplate
from backends.llamacpp.adapter_file import check_adapter_file
from backends.llamacpp.bindings import (
    DECODED,
    Batch,
    Context,
    LlamaCppError,
    LoraAdapter,
    Model,
    Tokens,
    built_with_amx,
    init_native,
)
from backends.llamacpp.engine import Engine
from backends.llamacpp.parameters import check_limits, is_quick, sampler_spec
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler import SamplerSpec
from backends.llamacpp.sequence import Generation
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.slot_store import SlotStore, erase
from backends.model_source import resolve_model
from protocols.calls import Adapter, SlotFile, SlotState
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError, Unavailable
from protocols.events import Finished, Frame
from protocols.request import ChatPrompt, InfillPrompt, LoraScale, Request, TextPrompt, TokenPrompt

log = logging.getLogger(__name__)

_INLINE_CHARS = 4096
"""Prompts up to this size are rendered and tokenised in a millisecond or two; larger ones leave the event loop."""


class _Loaded(msgspec.Struct, frozen=True):
    model: Model
    context: Context
    template: ChatTemplate
    card: ModelCard
    adapters: tuple[LoraAdapter, ...]
    slot_store: SlotStore | None


class LlamaCppBackend(Unsupported):
    def __init__(self, settings: LlamaCppSettings) -> None:
        self._settings = settings
        self._loaded: _Loaded | None = None
        self._engine: Engine | None = None
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="llamacpp-tokenize")
        self._scales = tuple(LoraScale(id, adapter.scale) for id, adapter in enumerate(settings.adapters))
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
            adapters=self._loaded.adapters,
        )
        self._engine = Engine(runner, context_shift=self._settings.context_shift)
        self._engine.start()
        return self._loaded.card

    async def generate(self, request: Request) -> AsyncGenerator[Frame, None]:
        loaded, engine = self._alive()
        _check_slots(request, loaded.card.slots)
        check_limits(request)
        scales = self._scales if request.lora is None else request.lora
        adapters = adapter_set(scales, len(loaded.adapters))
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
                adapters=adapters,
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

    def adapters(self) -> list[Adapter]:
        loaded, _ = self._alive()
        scales = {item.id: item.scale for item in self._scales}
        return [
            Adapter(id, settings.path, scales.get(id, 0.0), adapter.task_name, adapter.prompt_prefix)
            for id, (settings, adapter) in enumerate(zip(self._settings.adapters, loaded.adapters, strict=True))
        ]

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        loaded, _ = self._alive()
        self._scales = tuple(LoraScale(id, scale) for id, scale in adapter_set(scales, len(loaded.adapters)))

    async def slots(self) -> list[SlotState]:
        _, engine = self._alive()
        return await engine.ask(lambda runner: runner.slot_states())

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        store, engine = self._slot_store(slot)
        return await store.save(engine, slot, filename)

    async def restore_slot(self, slot: int, filename: str) -> SlotFile:
        store, engine = self._slot_store(slot)
        return await store.restore(engine, slot, filename)

    async def erase_slot(self, slot: int) -> int:
        _, engine = self._alive()
        _check_slot(slot, self._settings.slots)
        return await erase(engine, slot)

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
            self._loaded.context.close()
            self._loaded.model.close()

    def _alive(self) -> tuple[_Loaded, Engine]:
        if self._loaded is None or self._engine is None or self._closed:
            raise Unavailable("The model is not loaded.")
        if self._engine.failure is not None:
            raise Unavailable(self._engine.failure)
        return self._loaded, self._engine

    def _slot_store(self, slot: int) -> tuple[SlotStore, Engine]:
        loaded, engine = self._alive()
        _check_slot(slot, self._settings.slots)
        if loaded.slot_store is None:
            raise NotSupported(
                "Slots can be saved and restored where the model's setting slot_save_path names a folder"
            )
        return loaded.slot_store, engine

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
    repack = not built_with_amx() if settings.repack_weights is None else settings.repack_weights
    try:
        model = Model(path, gpu_layers=settings.gpu_layers, repack=repack)
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
    store = _slot_store(settings, path)
    adapters = tuple(_load_adapter(model, adapter.path) for adapter in settings.adapters)
    try:
        template = ChatTemplate(model.chat_template, bos_token=model.bos_text, eos_token=model.eos_text)
        context = Context(
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
    except (LlamaCppError, ValueError) as error:
        raise BackendStartError(f"{name}: {error}") from error
    if (code := _warm_up(context)) != DECODED:
        context.close()
        raise BackendStartError(f"{name}: a first token cannot be computed (llama_decode answered {code})")
    card = ModelCard(
        context_length=context_length,
        slots=settings.slots,
        engine="llama.cpp",
        vocab_size=model.vocab_size,
        parameters=model.parameters,
        file_bytes=path.stat().st_size,
        chat_template=model.chat_template,
    )
    return _Loaded(model, context, template, card, adapters, store)


def _load_adapter(model: Model, source: str) -> LoraAdapter:
    path = resolve_model(source, "adapter")
    try:
        check_adapter_file(path)
        return LoraAdapter(model, path)
    except (LlamaCppError, ValueError) as error:
        raise BackendStartError(f"adapter {source!r}: {error}") from error


def _slot_store(settings: LlamaCppSettings, model: Path) -> SlotStore | None:
    if settings.slot_save_path is None:
        return None
    caches = "one KV cache" if settings.unified_kv else f"{settings.slots} KV caches"
    return SlotStore(
        Path(settings.slot_save_path).expanduser(),
        model,
        [resolve_model(adapter.path, "adapter") for adapter in settings.adapters],
        f"{caches} of {settings.cache_type_k} keys and {settings.cache_type_v} values",
    )


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
    if request.slot.id is not None:
        _check_slot(request.slot.id, slots)


def _check_slot(id: int, slots: int) -> None:
    if not 0 <= id < slots:
        raise InvalidRequest(f"There is no slot {id}: this model has {slots}", param="id_slot")


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
