"""What the files of a model forbid, where they are on this machine: found before a GPU is taken. Imports no vLLM.

A checkpoint that vLLM would download is not looked at, nor is one that only the replicas' nodes have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from backends.vllm.settings import VllmSettings


class _Config(msgspec.Struct):
    """Of a checkpoint's `config.json`, by the names of transformers. A model of more than text has it in a part."""

    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    text_config: _Config | None = None

    @property
    def text(self) -> _Config:
        return self.text_config or self

    @property
    def stretches(self) -> bool:
        """Whether positions are scaled, so that there may be more of them than the model was trained with."""
        rope = self.rope_parameters or self.rope_scaling or {}
        return any(key in rope for key in ("factor", "long_factor"))


class _Adapter(msgspec.Struct):
    """Of an adapter's `adapter_config.json`, as PEFT writes it."""

    r: int


def faults(settings: VllmSettings) -> Iterator[tuple[str, str]]:
    """(the setting, what is wrong with it)"""
    yield from _model_faults(settings)
    for index, adapter in enumerate(settings.adapters):
        path = Path(adapter.path).expanduser() / "adapter_config.json"
        if not path.is_file():
            continue
        try:
            rank = msgspec.json.decode(path.read_bytes(), type=_Adapter).r
        except (OSError, msgspec.DecodeError) as error:
            yield f"adapters[{index}].path", f"cannot read {path}: {error}"
            continue
        if rank > settings.max_lora_rank:
            yield f"adapters[{index}].path", f"its rank is {rank}, and max_lora_rank is {settings.max_lora_rank}"


def _model_faults(settings: VllmSettings) -> Iterator[tuple[str, str]]:
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        return
    path = folder / "config.json"
    if not path.exists():
        if not (folder / "params.json").exists():  # Mistral's own form, which vLLM reads too
            yield "model", f"{settings.model!r} is a folder without a checkpoint: there is no config.json in it"
        return
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config).text
    except (OSError, msgspec.DecodeError) as error:
        yield "model", f"cannot read {path}: {error}"
        return
    heads, layers, positions = config.num_attention_heads, config.num_hidden_layers, config.max_position_embeddings
    if heads and heads % settings.tensor_parallel:
        yield "tensor_parallel", f"{settings.tensor_parallel} does not divide the model's {heads} attention heads"
    if layers and layers < settings.pipeline_parallel:
        yield "pipeline_parallel", f"{settings.pipeline_parallel} groups, and the model has {layers} layers"
    wanted = settings.context_length
    if wanted and positions and wanted > positions and not config.stretches:
        yield "context_length", f"{wanted}, and the model knows {positions} positions"
