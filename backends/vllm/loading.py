"""From settings to a running engine, its vocabulary and its card, or one line about what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from backends.base import BackendStartError, ModelCard
from backends.chat_template import ChatTemplates
from backends.output.selection import OutputFormats, ToolFormatName
from backends.prompts import Tokenizer
from backends.vllm import replay
from backends.vllm.compat import VERSION, AsyncEngineArgs, AsyncLLM, UsageContext, __version__, current_platform
from backends.vllm.settings import VllmSettings
from backends.vllm.vocabulary import HfVocabulary, UnknownTokenizer
from protocols.request import ChatPrompt, Sampling

log = logging.getLogger(__name__)

_CPU_KV_CACHE_MIB = 1024

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Loaded(msgspec.Struct, frozen=True):
    """`defaults` are the checkpoint's sampling parameters, by vLLM's names. `kv_tokens` fit into the KV cache."""

    engine: Any
    card: ModelCard
    vocabulary: HfVocabulary
    tokenizer: Tokenizer
    defaults: dict[str, Any]
    kv_tokens: int


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    """Those of `AsyncEngineArgs`. What is not set is left to vLLM."""
    cpu = settings.device == "cpu"
    kv_cache_mib = settings.kv_cache_mib or (_CPU_KV_CACHE_MIB if cpu else None)
    given = {
        "model": str(Path(settings.model).expanduser())
        if Path(settings.model).expanduser().exists()
        else settings.model,
        "runner": "pooling" if settings.pools else settings.task,
        "max_num_seqs": settings.slots,
        "max_model_len": settings.context_length,
        "max_num_batched_tokens": settings.batch_size,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "distributed_executor_backend": "ray" if settings.across_nodes else "mp" if settings.workers > 1 else None,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_mib is None else kv_cache_mib * 2**20,
        "block_size": settings.block_size,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.eager or cpu,
        "max_logprobs": settings.max_logprobs,
        "trust_remote_code": settings.trust_remote_code,
        "structured_outputs_config": {"backend": settings.structured_outputs},
    }
    if settings.adapters:
        given |= {
            "enable_lora": True,
            "max_loras": min(len(settings.adapters), 8),
            "max_cpu_loras": len(settings.adapters),
            "max_lora_rank": settings.max_lora_rank,
        }
    return {name: value for name, value in given.items() if value is not None}


def load(settings: VllmSettings, on_step: Callable[[], None]) -> Loaded:
    """Takes a while. `on_step` is called after each of the engine's steps. `BackendStartError` says what is wrong."""
    if not __version__.startswith(f"{VERSION}."):
        raise BackendStartError(f"vLLM {__version__} is installed, and this is made for {VERSION}")
    if (settings.device == "cpu") != current_platform.is_cpu():
        found = "the CPU" if current_platform.is_cpu() else "GPUs"
        raise BackendStartError(f"The vLLM that is installed computes on {found}, and the device is {settings.device}")
    for adapter in settings.adapters:
        if not (Path(adapter.path).expanduser() / "adapter_config.json").is_file():
            raise BackendStartError(f"adapter {adapter.path!r}: there is no file adapter_config.json in it")
    try:
        return _load(settings, on_step)
    except (OSError, ValueError, RuntimeError, UnknownTokenizer) as error:
        lines = str(error).strip().splitlines()
        raise BackendStartError(f"model {settings.model!r}: {lines[0] if lines else type(error).__name__}") from error


def _load(settings: VllmSettings, on_step: Callable[[], None]) -> Loaded:
    config = AsyncEngineArgs(**engine_arguments(settings)).create_engine_config(UsageContext.ENGINE_CONTEXT)
    generates = config.model_config.runner_type == "generate"
    if generates:
        config.model_config.logits_processors = [replay.PATHS[bool(config.use_v2_model_runner)]]
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[lambda config, index: _Steps(on_step)])
    try:
        return _described(settings, engine, config)
    except BaseException:
        engine.shutdown()
        raise


def _described(settings: VllmSettings, engine: Any, config: Any) -> Loaded:
    model = config.model_config
    tokenizer = engine.get_tokenizer()
    diff = model.get_diff_sampling_param()
    defaults = {name: diff[name] for name in _NAMES if name in diff}
    vocabulary = HfVocabulary(
        tokenizer.backend_tokenizer,
        vocab_size=model.get_vocab_size(),
        bos_text=tokenizer.bos_token or "",
        eos_text=tokenizer.eos_token or "",
        end_tokens=_end_tokens(tokenizer, model),
        has_types="token_type_ids" in tokenizer.model_input_names,
    )
    template = _template(settings, tokenizer)
    templates = ChatTemplates(
        template, clock=datetime.now, bos_token=vocabulary.bos_text, eos_token=vocabulary.eos_text
    )
    source = template.get("default", "")
    card = ModelCard(
        context_length=model.max_model_len,
        slots=settings.slots,
        engine="vllm",
        vocab_size=vocabulary.vocab_size,
        chat_template=source,
        embedding_length=model.get_hidden_size() if settings.pools else 0,
        pooling="last" if settings.pools else "",
        path=settings.model,
        bos_text=vocabulary.bos_text,
        eos_text=vocabulary.eos_text,
        sampling=Sampling(**{_NAMES[name]: value for name, value in (_NEUTRAL | defaults).items()}),
    )
    formats = OutputFormats.of(source, settings.tool_format or _told_format(templates), settings.reasoning_format)
    cache = config.cache_config
    return Loaded(
        engine=engine,
        card=card,
        vocabulary=vocabulary,
        tokenizer=Tokenizer(vocabulary, templates, formats=formats),
        defaults=defaults,
        kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
    )


def _end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """ "It can be either int or list of int" """
    named = model.try_get_generation_config().get("eos_token_id")
    found = set(named if isinstance(named, list) else [] if named is None else [named])
    return found if tokenizer.eos_token_id is None else found | {tokenizer.eos_token_id}


def _template(settings: VllmSettings, tokenizer: Any) -> dict[str, str]:
    if settings.chat_template is not None:
        return {"default": Path(settings.chat_template).expanduser().read_text(encoding="utf-8")}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return {name: text for name, text in template.items() if name in ("default", "tool_use")}
    return {"default": template or ""}


def _told_format(templates: ChatTemplates) -> ToolFormatName | None:
    """The form of calls that a model is told of where its template has none; None where it has its own."""
    return "hermes" if templates.of(ChatPrompt(())).sample_call() is None else None


class _Steps:
    """What vLLM takes for one of its statistics loggers, by the methods it calls: counts steps."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def record(self, *args: Any, **kwargs: Any) -> None:
        self._on_step()

    def log_engine_initialized(self) -> None:
        """There is nothing to say."""

    def log(self) -> None:
        """The same."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """It never sleeps."""
