"""llama-server's command line, as a table: what each flag is here, or why it is nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple, NoReturn

import msgspec

from deployments.settings import nearest


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What was said. `None` and empty: nothing. `sampling` holds fields of `protocols.request.Sampling`."""

    model: str | None = None
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    context: int = 0
    slots: int = -1
    batch_size: int = 2048
    micro_batch_size: int = 512
    threads: int | None = None
    gpu_layers: int = -1
    unified_kv: bool | None = None
    cache_ram_mib: int = 8192
    context_shift: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: str = "auto"
    repack: bool | None = None
    suffix_first: bool = False
    adapters: tuple[tuple[str, float], ...] = ()
    adapters_apply: bool = True
    slot_save_path: str | None = None
    pooling: str | None = None
    rerank: bool = False
    speculation: str | None = None
    draft_model: str | None = None
    draft_tokens: int | None = None
    draft_p_min: float | None = None
    chat_template: str | None = None
    chat_template_file: str | None = None
    reasoning_format: str = "auto"
    reasoning: str = "auto"
    reasoning_budget: int = -1
    show_slots: bool = True
    show_metrics: bool = False
    show_page: bool = True
    sleep_after_s: int = -1
    verbose: bool = False
    max_tokens: int = -1
    ignore_eos: bool = False
    sampling: dict[str, Any] = {}
    without_meaning: tuple[str, ...] = ()


class Flag(NamedTuple):
    """`kind` reads the value; a flag of constant `value` takes none. `field` of `Options` is what it sets."""

    names: tuple[str, ...]
    field: str
    kind: Callable[[str], Any] = str
    value: Any = None
    repeatable: bool = False


def _one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(values)}, not {text!r}")
        return text

    return read


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _switch(text: str) -> str:
    """llama-server's "on", "off" and "auto" have synonyms."""
    synonyms = {"on": ("on", "enabled", "true", "1"), "off": ("off", "disabled", "false", "0"), "auto": ("auto", "-1")}
    for meaning, words in synonyms.items():
        if text in words:
            return meaning
    raise argparse.ArgumentTypeError(f"expected on, off or auto, not {text!r}")


def _layers(text: str) -> int:
    return -1 if text in ("auto", "all") else int(text)


def _adapter(text: str) -> tuple[tuple[str, float], ...]:
    return tuple((path, 1.0) for path in _list(text))


def _scaled_adapter(text: str) -> tuple[tuple[str, float], ...]:
    parts = [part.rpartition(":") for part in _list(text)]
    return tuple((path, float(scale)) for path, _, scale in parts)


_SPECULATION = {
    "none": "off",
    "draft-simple": "draft",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "ngram",
    "ngram-mod": "ngram",
    "ngram-cache": "ngram",
}


def _speculation(text: str) -> str:
    return _SPECULATION[_one_of(*_SPECULATION)(text)]


def _samplers(text: str) -> tuple[str, ...]:
    return tuple(text.split(";"))


FLAGS: tuple[Flag, ...] = (
    Flag(("-m", "--model"), "model"),
    Flag(("-a", "--alias"), "aliases", _list),
    Flag(("--tags",), "tags", _list),
    Flag(("--host",), "hosts", _list),
    Flag(("--port",), "port", int),
    Flag(("--api-key",), "api_keys", _list),
    Flag(("--api-key-file",), "api_key_file"),
    Flag(("--cors-origins",), "cors_origins"),
    Flag(("--cors-methods",), "cors_methods"),
    Flag(("--cors-headers",), "cors_headers"),
    Flag(("--cors-credentials",), "cors_credentials", value=True),
    Flag(("--no-cors-credentials",), "cors_credentials", value=False),
    Flag(("-c", "--ctx-size"), "context", int),
    Flag(("-np", "--parallel"), "slots", int),
    Flag(("-b", "--batch-size"), "batch_size", int),
    Flag(("-ub", "--ubatch-size"), "micro_batch_size", int),
    Flag(("-t", "--threads"), "threads", int),
    Flag(("-ngl", "--gpu-layers", "--n-gpu-layers"), "gpu_layers", _layers),
    Flag(("-kvu", "--kv-unified"), "unified_kv", value=True),
    Flag(("-no-kvu", "--no-kv-unified"), "unified_kv", value=False),
    Flag(("-cram", "--cache-ram"), "cache_ram_mib", int),
    Flag(("--context-shift",), "context_shift", value=True),
    Flag(("--no-context-shift",), "context_shift", value=False),
    Flag(("-ctk", "--cache-type-k"), "cache_type_k"),
    Flag(("-ctv", "--cache-type-v"), "cache_type_v"),
    Flag(("-fa", "--flash-attn"), "flash_attention", _switch),
    Flag(("--repack",), "repack", value=True),
    Flag(("-nr", "--no-repack"), "repack", value=False),
    Flag(("--spm-infill",), "suffix_first", value=True),
    Flag(("--lora",), "adapters", _adapter, repeatable=True),
    Flag(("--lora-scaled",), "adapters", _scaled_adapter, repeatable=True),
    Flag(("--lora-init-without-apply",), "adapters_apply", value=False),
    Flag(("--slot-save-path",), "slot_save_path"),
    Flag(("--pooling",), "pooling", _one_of("none", "mean", "cls", "last", "rank")),
    Flag(("--rerank", "--reranking"), "rerank", value=True),
    Flag(("--spec-type",), "speculation", _speculation),
    Flag(("--spec-draft-model", "-md", "--model-draft"), "draft_model"),
    Flag(("--spec-draft-n-max",), "draft_tokens", int),
    Flag(("--spec-draft-p-min", "--draft-p-min"), "draft_p_min", float),
    Flag(("--chat-template",), "chat_template"),
    Flag(("--chat-template-file",), "chat_template_file"),
    Flag(("--reasoning-format",), "reasoning_format", _one_of("auto", "none", "deepseek", "deepseek-legacy")),
    Flag(("-rea", "--reasoning"), "reasoning", _switch),
    Flag(("--reasoning-budget",), "reasoning_budget", int),
    Flag(("--slots",), "show_slots", value=True),
    Flag(("--no-slots",), "show_slots", value=False),
    Flag(("--metrics",), "show_metrics", value=True),
    Flag(("--ui", "--webui"), "show_page", value=True),
    Flag(("--no-ui", "--no-webui"), "show_page", value=False),
    Flag(("--sleep-idle-seconds",), "sleep_after_s", int),
    Flag(("-v", "--verbose", "--log-verbose"), "verbose", value=True),
    Flag(("-n", "--predict", "--n-predict"), "max_tokens", int),
    Flag(("--ignore-eos",), "ignore_eos", value=True),
)

SAMPLING: tuple[Flag, ...] = (
    Flag(("-s", "--seed"), "seed", int),
    Flag(("--temp", "--temperature"), "temperature", float),
    Flag(("--top-k",), "top_k", int),
    Flag(("--top-p",), "top_p", float),
    Flag(("--min-p",), "min_p", float),
    Flag(("--top-nsigma", "--top-n-sigma"), "top_n_sigma", float),
    Flag(("--xtc-probability",), "xtc_probability", float),
    Flag(("--xtc-threshold",), "xtc_threshold", float),
    Flag(("--typical", "--typical-p"), "typical_p", float),
    Flag(("--repeat-last-n",), "repeat_last_n", int),
    Flag(("--repeat-penalty",), "repeat_penalty", float),
    Flag(("--presence-penalty",), "presence_penalty", float),
    Flag(("--frequency-penalty",), "frequency_penalty", float),
    Flag(("--dry-multiplier",), "dry_multiplier", float),
    Flag(("--dry-base",), "dry_base", float),
    Flag(("--dry-allowed-length",), "dry_allowed_length", int),
    Flag(("--dry-penalty-last-n",), "dry_penalty_last_n", int),
    Flag(("--adaptive-target",), "adaptive_target", float),
    Flag(("--adaptive-decay",), "adaptive_decay", float),
    Flag(("--dynatemp-range",), "dynatemp_range", float),
    Flag(("--dynatemp-exp",), "dynatemp_exponent", float),
    Flag(("--mirostat",), "mirostat", int),
    Flag(("--mirostat-lr",), "mirostat_eta", float),
    Flag(("--mirostat-ent",), "mirostat_tau", float),
    Flag(("--samplers",), "samplers", _samplers),
)

WITHOUT_MEANING = """
    -cb --cont-batching --jinja --embedding --embeddings --offline --warmup --kv-offload -kvo --op-offload
    --swa-full --perf --mmproj-auto --no-mmproj --no-mmproj-auto --no-ui-mcp-proxy --no-models-autoload --no-agent
    --cache-prompt --no-jinja --cache-idle-slots --no-cache-idle-slots -bs --backend-sampling --backend_sampling
    --no-perf --no-warmup --spec-draft-backend-sampling --no-spec-draft-backend-sampling
    --log-disable --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl --no-log-jsonl
    --no-host --reuse-port --no-display-prompt
""".split()
"""Said for what is always so, as continuous batching and all tasks that a model does, or decided by the engine."""

WITHOUT_MEANING_AND_VALUE = """
    --media-path -tb --threads-batch --threads-http -td --threads-draft --spec-draft-threads -C --cpu-mask -Cr
    --cpu-range --cpu-strict --prio --poll --numa -ctxcp --ctx-checkpoints --swa-checkpoints -cms
    --checkpoint-min-step -sps --slot-prompt-similarity --cache-reuse -to --timeout -lv --verbosity --log-verbosity
    --log-colors --spec-draft-n-min --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft -sm --split-mode
    -mg --main-gpu
""".split()

REFUSED = {
    "the model is a file here: --model FILE": "-hf -hfr --hf-repo -hff --hf-file -mu --model-url -hfd --hf-repo-draft",
    "several models are served by `tokenyard serve`": "--models-dir --models-preset --models-max --models-autoload",
    "there is no reading of images, sound or video": "-mm --mmproj -mmu --mmproj-url",
    "no tools are run here": "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --ui-mcp-proxy --agent",
    "a connection is encrypted by the proxy before it": "--ssl-key-file --ssl-cert-file",
    "guesses are never made up here": "--spec-synth-len --spec-synth-rates",
}


class UsageError(Exception):
    """A command line that cannot be followed; the message is for a person."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Note(argparse.Action):
    """Remembers that the flag was there."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.without_meaning = (*namespace.without_meaning, option_string)


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        raise UsageError(f"{option_string} cannot be followed: {self.help}")


class _Extend(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


def parse(arguments: Sequence[str]) -> Options:
    """Raises `UsageError`."""
    parser = _parser()
    said, unknown = parser.parse_known_args(arguments, argparse.Namespace(without_meaning=()))
    if unknown:
        flag = unknown[0].partition("=")[0]
        raise UsageError(f"unknown flag {flag}{nearest(flag, _known())}")
    values = vars(said)
    sampling = {flag.field: values.pop(key) for flag in SAMPLING if (key := _SAMPLING + flag.field) in values}
    if sampling.get("seed") == -1:
        del sampling["seed"]  # a new one for every request
    return Options(sampling=sampling, **values)


_SAMPLING = "sampling."


def _parser() -> _Parser:
    parser = _Parser(
        prog="tokenyard-llama-server",
        usage="%(prog)s --model FILE [flag …]",
        description="Serves one model in one process, by llama-server's flags.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"tokenyard {metadata.version('tokenyard')}")
    for title, prefix, flags in (("flags", "", FLAGS), ("what requests get that do not say", _SAMPLING, SAMPLING)):
        group = parser.add_argument_group(title)
        for flag in flags:
            dest, metavar = prefix + flag.field, flag.field.upper()
            if flag.value is not None:
                group.add_argument(*flag.names, dest=dest, action="store_const", const=flag.value)
            elif flag.repeatable:
                group.add_argument(*flag.names, dest=dest, action=_Extend, type=flag.kind, metavar=metavar)
            else:
                group.add_argument(*flag.names, dest=dest, type=flag.kind, metavar=metavar)
    group = parser.add_argument_group("flags without meaning here")
    group.add_argument(*WITHOUT_MEANING, dest="without_meaning", action=_Note, nargs=0)
    group.add_argument(*WITHOUT_MEANING_AND_VALUE, dest="without_meaning", action=_Note, metavar="VALUE")
    group = parser.add_argument_group("flags that cannot be followed")
    for reason, names in REFUSED.items():
        group.add_argument(*names.split(), action=_Refuse, nargs="?", help=reason, metavar="VALUE", dest="refused")
    return parser


def _known() -> list[str]:
    said = [name for flag in (*FLAGS, *SAMPLING) for name in flag.names]
    return sorted([*said, *WITHOUT_MEANING, *WITHOUT_MEANING_AND_VALUE])
