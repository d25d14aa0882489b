"""From settings to a loaded model: weights, contexts, adapters and what drafts, or one line about what is wrong."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from backends.base import BackendStartError, ModelCard
from backends.chat_template import ChatTemplates
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
from backends.llamacpp.embedder import Embedder
from backends.llamacpp.embedding_context import EmbeddingContext, purpose
from backends.llamacpp.infill import infill_tokens
from backends.llamacpp.preflight import check_files, check_memory
from backends.llamacpp.prompt_cache import PromptCache
from backends.llamacpp.runner import Runner
from backends.llamacpp.sampler_params import SamplerParams
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.slot_store import SlotStore
from backends.model_source import part_paths, resolve_model
from backends.output.selection import OutputFormats, ToolFormatName
from backends.prompts import Tokenizer
from protocols.request import ChatPrompt, InfillPrompt

log = logging.getLogger(__name__)

_MOST_SCORE_BYTES = 512 * 2**20


class Generating(msgspec.Struct, frozen=True):
    """What a model that generates has."""

    runner: Runner
    adapters: tuple[LoraAdapter, ...]
    slot_store: SlotStore | None


class Loaded(msgspec.Struct, frozen=True):
    """`close` frees all of it, once; the engine thread must have ended. `input_length`: most tokens of an embedding."""

    model: Model
    card: ModelCard
    tokenizer: Tokenizer
    embedder: Embedder
    input_length: int
    generating: Generating | None
    resources: ExitStack

    def close(self) -> None:
        self.resources.close()


def load(settings: LlamaCppSettings) -> Loaded:
    """Takes a while. `BackendStartError` says what is wrong; nothing is left behind then."""
    path = resolve_model(settings.model)
    init_native()
    files = check_files(part_paths(path), f"model {settings.model!r}")
    if not built_with_gpu():
        check_memory(files, settings, repacks=_repacks(settings))
    with ExitStack() as resources:
        try:
            model = Model(path, gpu_layers=settings.gpu_layers, repack=_repacks(settings))
            resources.callback(model.close)
            loaded = _load(settings, model, path, resources)
        except (LlamaCppError, ValueError) as error:
            raise BackendStartError(f"model {settings.model!r}: {error}") from error
        return msgspec.structs.replace(loaded, resources=resources.pop_all())


def _load(settings: LlamaCppSettings, model: Model, path: Path, resources: ExitStack) -> Loaded:
    use = purpose(model, settings.pooling)
    generates = "generate" in use.tasks
    batch_size = settings.embedding_batch_size or settings.micro_batch_size
    input_length = min(batch_size, model.trained_context)
    context_length = min(settings.context_length, model.trained_context) if generates else input_length
    template = settings.chat_template or model.chat_template
    tool_template = "" if settings.chat_template else model.tool_use_template
    sources = {"default": template, "tool_use": tool_template} if generates else {}
    templates = ChatTemplates(sources, clock=datetime.now, bos_token=model.bos_text, eos_token=model.eos_text)
    open_embeddings = partial(
        EmbeddingContext,
        model,
        pooling=use.pooling,
        batch_size=batch_size,
        threads=settings.threads or available_cores(),
        flash_attention=settings.flash_attention,
    )
    embedder = Embedder(open_embeddings, slots=settings.slots, chunk=settings.prefill_chunk)
    resources.callback(embedder.close)
    if not generates:
        embedder.open().compute([np.zeros(1, np.int32)])  # the first request finds the weights in memory
    card = ModelCard(
        context_length=context_length,
        slots=settings.slots,
        engine="llama.cpp",
        vocab_size=model.vocab_size,
        parameters=model.parameters,
        file_bytes=sum(part.stat().st_size for part in part_paths(path)),
        chat_template=template,
        tasks=use.tasks,
        embedding_length=model.embedding_length,
        pooling=use.pooling,
        path=str(path),
        bos_text=model.bos_text,
        eos_text=model.eos_text,
        sampling=SamplerParams().to_sampling(),
    )

    def infill(prompt: InfillPrompt, max_tokens: int | None) -> Tokens:
        return infill_tokens(
            prompt,
            model,
            context_length=context_length,
            max_tokens=max_tokens,
            suffix_first=settings.infill_suffix_first,
        )

    tokenizer = Tokenizer(
        model,
        templates,
        infill=infill,
        formats=OutputFormats.of(template, settings.tool_format or _told_format(templates), settings.reasoning_format),
    )
    generating = _load_generating(settings, model, path, context_length, resources) if generates else None
    return Loaded(model, card, tokenizer, embedder, input_length, generating, resources)


def _told_format(templates: ChatTemplates) -> ToolFormatName | None:
    """The form of calls that a model is told of where its template has none; None where it has its own."""
    return "hermes" if templates.of(ChatPrompt(())).sample_call() is None else None


def _load_generating(
    settings: LlamaCppSettings, model: Model, path: Path, context_length: int, resources: ExitStack
) -> Generating:
    if settings.context_length > context_length:
        log.warning("model %r: the context is %d, what it was trained for", settings.model, context_length)
    store = _slot_store(settings, path, _flash_attention(settings, model, context_length))
    adapters = tuple(_load_adapter(model, adapter.path) for adapter in settings.adapters)
    context = _context(settings, model, context_length)
    resources.callback(context.close)
    if (code := _warm_up(context)) != DECODED:
        raise LlamaCppError(f"a first token cannot be computed (llama_decode answered {code})")
    drafting = _drafting(settings, model, context, context_length)
    if drafting is not None:
        resources.callback(drafting.close)
    runner = Runner(
        model,
        context,
        context_length=context_length,
        prefill_chunk=settings.prefill_chunk,
        prefix_sharing=settings.prefix_sharing,
        prompts=_prompt_cache(settings, context),
        adapters=adapters,
        drafting=drafting,
    )
    return Generating(runner, adapters, store)


def _load_adapter(model: Model, source: str) -> LoraAdapter:
    path = resolve_model(source, "adapter")
    try:
        check_adapter_file(path)
        return LoraAdapter(model, path)
    except (LlamaCppError, ValueError) as error:
        raise BackendStartError(f"adapter {source!r}: {error}") from error


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
        flash_attention=_flash_attention(settings, model, context_length),
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )


def _warm_up(context: Context) -> int:
    """Computes one token, so that the first request finds the weights in memory and the buffers made."""
    batch = Batch(1)
    batch.add([0], 0, 0, logits=True)
    code = context.decode(batch)
    context.forget(0)
    return code


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
    check_files(part_paths(path), f"draft model {source!r}")
    with ExitStack() as resources:
        try:
            draft = Model(path, gpu_layers=settings.gpu_layers, repack=_repacks(settings))
            resources.callback(draft.close)
            check_same_vocabulary(model, draft)
            context = _context(settings, draft, context_length)
            resources.callback(context.close)
            if not can_be_cut(context):
                raise LlamaCppError("its states cannot be cut, so it cannot take back a wrong guess")
        except (LlamaCppError, ValueError) as error:
            raise BackendStartError(f"draft model {source!r}: {error}") from error
        resources.pop_all()
        return DraftModel(draft, context, settings.speculation.p_min)


def _prompt_cache(settings: LlamaCppSettings, context: Context) -> PromptCache | None:
    if not settings.prompt_cache_mib:
        return None
    tokens = context.kv_size if settings.prompt_cache_tokens is None else settings.prompt_cache_tokens
    return PromptCache(limit_size=max(settings.prompt_cache_mib, 0) * 2**20, limit_tokens=tokens)


def _slot_store(settings: LlamaCppSettings, model: Path, flash_attention: str) -> SlotStore | None:
    if settings.slot_save_path is None:
        return None
    caches = "one KV cache" if settings.unified_kv else f"{settings.slots} KV caches"
    return SlotStore(
        Path(settings.slot_save_path).expanduser(),
        model,
        [resolve_model(adapter.path, "adapter") for adapter in settings.adapters],
        f"{caches} of {settings.cache_type_k} keys and {settings.cache_type_v} values, "
        f"flash attention {flash_attention}",  # without it, values are stored transposed
    )


# --- what depends on the machine -------------------------------------------


def _repacks(settings: LlamaCppSettings) -> bool:
    return not built_with_amx() if settings.repack_weights is None else settings.repack_weights


def _flash_attention(settings: LlamaCppSettings, model: Model, context_length: int) -> str:
    """What "auto" means here; llama.cpp's own choice is "on".

    On a CPU it makes prompts up to 10 % faster, and answers much slower. Milliseconds a step, with and without
    (SmolLM2-135M Q4_1, 2 threads, AVX-512, one KV cache per slot): 1 stream 500 tokens into its context 21 / 13, 1,900
    tokens 41 / 17; 8 streams at 500 tokens 128 / 72, at 1,500 308 / 117; 16 streams at 1,500 526 / 209.
    Without it, the attention scores of a computation are all in memory at once, and a token's logits alone differ from
    those among others of its sequence, by up to 0.2: what is guessed would not quite be what would have come without.
    """
    scores = 4 * model.heads * min(settings.micro_batch_size, settings.batch_size) * context_length
    if settings.flash_attention != "auto" or built_with_gpu() or scores > _MOST_SCORE_BYTES:
        return settings.flash_attention
    quantised = settings.cache_type_v not in ("f32", "f16", "bf16")
    return "on" if quantised or settings.speculation.kind != "off" else "off"


def available_cores() -> int:
    """The cores this process may run on, not more than its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(int(quota) // int(period), 1))
    return cores
