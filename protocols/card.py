"""What a loaded model says about itself, and how it is doing."""

from __future__ import annotations

import msgspec

from protocols.request import Sampling


class ModelCard(msgspec.Struct, frozen=True):
    """A loaded model. `context_length` is the room of one request, in tokens; `slots` is how many run at once.

    `tasks` are those of "generate", "embed" and "rerank" that it does; a model that only does the latter two takes
    inputs of `context_length`. `embedding_length` is how many numbers a vector has, and `pooling` how the vectors of
    an input's tokens become one: with "none" they do not, and an input has as many vectors as tokens.
    `path` is the model's file, `bos_text` and `eos_text` what its texts begin and end with, `sampling` what applies
    where a request says nothing. One that is `asleep` is not in memory, until it is asked for.
    """

    context_length: int
    slots: int
    engine: str
    vocab_size: int = 0
    parameters: int = 0
    file_bytes: int = 0
    chat_template: str = ""
    tasks: tuple[str, ...] = ("generate",)
    embedding_length: int = 0
    pooling: str = ""
    path: str = ""
    bos_text: str = ""
    eos_text: str = ""
    sampling: Sampling = Sampling()
    asleep: bool = False


class BackendStats(msgspec.Struct, frozen=True):
    """A snapshot for routing, scaling and tests. Counts are requests unless they say tokens; totals only ever grow.

    `uncached_tokens_queued` is what there is to compute before every request there is, waiting or running, generates:
    prompts without the beginnings that are cached or another one is to compute first. Of those waiting, an estimate.
    `drafts_total` are the times that tokens were guessed, `step_requests_total` the requests in all steps together; 0
    where an engine does not say.
    Embeddings and rankings count as requests and prompt tokens too; `running` ones need no slot.
    """

    slots: int
    running: int
    waiting: int
    queued_prompt_tokens: int = 0
    uncached_tokens_queued: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    prompt_cache_tokens: int = 0
    prompt_cache_bytes: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    steps_total: int = 0
    prefill_tokens_per_s: float = 0.0
    draft_tokens_total: int = 0
    draft_accepted_total: int = 0
    drafts_total: int = 0
    step_requests_total: int = 0
