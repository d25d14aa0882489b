"""The JSON of the legacy Completions: what comes in as pydantic models, what goes out as msgspec structs.

Shapes: https://platform.openai.com/docs/api-reference/completions/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from protocols.openai_shared import MAX_TOP_LOGPROBS, OpenAIFields
from protocols.sampling_fields import I32

FinishWord = Literal["stop", "length"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's: this dialect continues text, and nothing else may ever end that."""


class Body(OpenAIFields):
    """`prompt` has four shapes, which the decoder tells apart."""

    prompt: Any = None
    max_tokens: Annotated[int, Field(ge=0, le=I32)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class OutLogprobs(msgspec.Struct, frozen=True):
    """Four lists of the same length, an item per token. `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class OutChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: OutLogprobs | None
    finish_reason: FinishWord
