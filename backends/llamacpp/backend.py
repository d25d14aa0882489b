"""llama.cpp as a `Backend`: loads the model, turns requests into token sequences, and streams what the engine makes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

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
    built_with_gpu,
    init_native,
)
from backends.llamacpp.draft_model import DraftModel, can_be_cut, check_same_vocabulary
from backends.llamacpp.drafting import Drafting
from backends.llamacpp.engine import Engine
from backends.llamacpp.parameters import check_limits, is_quick, sampler_spec
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.prompts import Tokenizer, prompt_chars
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler import SamplerSpec
from backends.llamacpp.sequence import Generation
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.slot_store import SlotStore, erase
from backends.model_source import resolve_model
from protocols.calls import Adapter, Piece, SlotFile, SlotState
from protocols.errors import ContextOverflow, InvalidRequest, NotSupported, ServingError, Unavailable
from protocols.events import Finished, Frame
from protocols.request import ChatPrompt, LoraScale, Request

_X = TypeVar("_X")
_Y = TypeVar("_Y")

log = logging.getLogger(__name__)

_INLINE_CHARS = 4096
"""Prompts up to this size are rendered and tokenised in a millisecond or two; larger ones leave the event loop."""


class _Loaded(msgspec.Struct, frozen=True):
    model: Model
    context: Context
    tokenizer: Tokenizer
    card: ModelCard
    adapters: tuple[LoraAdapter, ...]
    slot_store: SlotStore | None
    drafting: Drafting | None


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
            drafting=self._loaded.drafting,
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
                resume=loaded.tokenizer.checked(request.resume, "resume"),
                stop_indent=request.stop_indent,
                max_predict_ms=request.max_predict_ms,
                n=request.n,
                slot=request.slot,
                adapters=adapters,
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

    async def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[Piece]:
        loaded, _ = self._alive()

        def pieces(text: str) -> list[Piece]:
            tokens = loaded.model.tokenize(text, add_special=add_special, parse_special=parse_special)
            return [Piece(token, loaded.model.special_piece(token)) for token in tokens.tolist()]

        return pieces(text) if len(text) <= _INLINE_CHARS else await self._aside(pieces, text)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        loaded, _ = self._alive()

        def text(tokens: Sequence[int]) -> str:
            ids = loaded.tokenizer.checked(tokens, "tokens").tolist()
            return b"".join(map(loaded.model.special_piece, ids)).decode("utf-8", "replace")

        return text(tokens) if len(tokens) <= _INLINE_CHARS else await self._aside(text, tokens)

    async def apply_template(self, prompt: ChatPrompt) -> str:
        loaded, _ = self._alive()

        def render(prompt: ChatPrompt) -> str:
            return loaded.tokenizer.template.render(prompt.messages, prompt.tools, kwargs=prompt.template_kwargs)

        return await self._aside(render, prompt)

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
        return await self._aside(partial(sampler_spec, loaded.model), request)

    async def _tokens(self, request: Request) -> Tokens:
        """The prompt of `request`, as `count_tokens` and `generate` both see it."""
        loaded, _ = self._alive()
        if prompt_chars(request) <= _INLINE_CHARS:
            return loaded.tokenizer.tokens(request)
        return await self._aside(loaded.tokenizer.tokens, request)

    async def _aside(self, function: Callable[[_X], _Y], argument: _X) -> _Y:
        """The same call on another thread: it may take a while."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, function, argument)


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
    store = _slot_store(settings, path)
    adapters = tuple(_load_adapter(model, adapter.path) for adapter in settings.adapters)
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
    tokenizer = Tokenizer(model, template, context_length=context_length, suffix_first=settings.infill_suffix_first)
    return _Loaded(model, context, tokenizer, card, adapters, store, drafting)


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
        flash_attention=_flash_attention(settings, model.heads, context_length),
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


_MOST_SCORE_BYTES = 512 * 2**20


def _flash_attention(settings: LlamaCppSettings, heads: int, context_length: int) -> str:
    """What "auto" means here; llama.cpp's own choice is "on".

    On a CPU it makes prompts up to 10 % faster, and answers much slower. Milliseconds a step, with and without
    (SmolLM2-135M Q4_1, 2 threads, AVX-512, one KV cache per slot): 1 stream 500 tokens into its context 21 / 13, 1,900
    tokens 41 / 17; 8 streams at 500 tokens 128 / 72, at 1,500 308 / 117; 16 streams at 1,500 526 / 209.
    Without it, the attention scores of a computation are all in memory at once.
    """
    scores = 4 * heads * min(settings.micro_batch_size, settings.batch_size) * context_length
    if settings.flash_attention != "auto" or built_with_gpu() or scores > _MOST_SCORE_BYTES:
        return settings.flash_attention
    return "off" if settings.cache_type_v in ("f32", "f16", "bf16") else "on"


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
