"""What a command line means: the model's settings, and what applies to requests that do not say so themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from backends.chat_template.builtin import BUILTIN
from backends.llamacpp.settings import LlamaCppSettings
from deployments.llama_server.access import CorsOptions
from deployments.llama_server.flags import Options, UsageError
from deployments.settings import ConfigError, parse
from protocols.request import Sampling

_AUTOMATIC_SLOTS = 4
_LEAST_BATCH = 32
_TRAINED_CONTEXT = 2**24
"""More than any model was trained for: what it was trained for applies."""


class Defaults(msgspec.Struct, frozen=True):
    """For requests that say nothing of their own.

    `echo`: every answer shows what the engine made of its request.
    """

    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    ignore_eos: bool = False
    think: bool | None = None
    think_tokens: int | None = None
    echo: bool = False


def defaults(options: Options) -> Defaults:
    return Defaults(
        sampling=Sampling(**options.sampling),
        max_tokens=None if options.max_tokens < 0 else options.max_tokens,
        ignore_eos=options.ignore_eos,
        # llama-server turns thinking on where a template has a switch for it, which not every template does itself.
        think=options.reasoning != "off",
        think_tokens=None if options.reasoning_budget < 0 else options.reasoning_budget,
        echo=options.verbose,
    )


def api_keys(options: Options) -> tuple[str, ...]:
    """Those of the command line, and a line each of the file. Raises `UsageError`."""
    if options.api_key_file is None:
        return options.api_keys
    lines = _text("--api-key-file", options.api_key_file).splitlines()
    if not (keys := tuple(line.strip() for line in lines if line.strip())):
        raise UsageError(f"--api-key-file {options.api_key_file}: there is no key in it")
    return (*options.api_keys, *keys)


def cors(options: Options) -> CorsOptions:
    return CorsOptions(options.cors_origins, options.cors_methods, options.cors_headers, options.cors_credentials)


def model_settings(options: Options) -> LlamaCppSettings:
    """Raises `UsageError`."""
    if options.model is None:
        raise UsageError("no model: --model FILE names a GGUF, or package:<package>/<file> one in a Python package")
    try:
        return parse(LlamaCppSettings, _settings(options, options.model), "settings")
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _settings(options: Options, model: str) -> dict[str, Any]:
    slots = _AUTOMATIC_SLOTS if options.slots < 0 else options.slots
    unified = options.slots < 0 if options.unified_kv is None else options.unified_kv
    # "n_ctx_slot = n_ctx / n_slots", except that a request may have all of a cache that is shared.
    context = options.context or _TRAINED_CONTEXT * slots
    settings: dict[str, Any] = {
        "model": model,
        "slots": slots,
        "unified_kv": unified,
        "context_length": context if unified and options.context else context // slots,
        "kv_size": max(context, 256) if unified and options.context else None,
        "batch_size": max(options.batch_size, _LEAST_BATCH, slots),
        "micro_batch_size": max(min(options.micro_batch_size, options.batch_size), _LEAST_BATCH),
        "threads": options.threads,
        "gpu_layers": options.gpu_layers,
        "prompt_cache_mib": options.cache_ram_mib,
        "context_shift": options.context_shift,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "flash_attention": options.flash_attention,
        "repack_weights": options.repack,
        "infill_suffix_first": options.suffix_first,
        "slot_save_path": options.slot_save_path,
        "pooling": "rank" if options.rerank else options.pooling,
        "chat_template": _chat_template(options),
        "speculation": _speculation(options),
        "adapters": [
            {"path": path, "scale": scale if options.adapters_apply else 0.0} for path, scale in options.adapters
        ],
    }
    if options.reasoning_format == "none":
        settings["reasoning_format"] = "none"
    return settings


def _chat_template(options: Options) -> str | None:
    """The text. `--chat-template` takes it, or the name of a well-known one."""
    if options.chat_template_file is not None:
        return _text("--chat-template-file", options.chat_template_file)
    return BUILTIN.get(options.chat_template or "", options.chat_template)


def _text(flag: str, path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None


def _speculation(options: Options) -> dict[str, Any]:
    kind = options.speculation or ("off" if options.draft_model is None else "draft")
    speculation = {
        "kind": kind,
        "draft_model": options.draft_model if kind == "draft" else None,
        "max_tokens": options.draft_tokens,
        "p_min": options.draft_p_min,
    }
    return {key: value for key, value in speculation.items() if value is not None}
