"""The JSON of Chat Completions: what comes in as pydantic models, what goes out as msgspec structs.

Shapes: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, Tag

from protocols.body import LIST, STRING, STRING_OR_LIST, Wire
from protocols.events import FinishReason, Usage
from protocols.llamacpp_extras import OutTimings

# --- in: a request body ------------------------------------------------------------


class ImageUrl(Wire):
    url: str


class Part(Wire):
    """One content part. Which of the other fields belongs to which type is checked by the decoder."""

    type: Literal["text", "image_url", "refusal"]
    text: str | None = None
    image_url: ImageUrl | None = None
    refusal: str | None = None


class FunctionCall(Wire):
    name: str = Field(min_length=1)
    arguments: str


class AssistantToolCall(Wire):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[Part], Tag(LIST)], STRING_OR_LIST]
Stop = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[str], Field(max_length=16), Tag(LIST)], STRING_OR_LIST]


class InMessage(Wire):
    """A message of any role. Which fields a role needs is checked by the decoder."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(Wire):
    include_usage: bool | None = None


_I32 = 2**31 - 1


class Body(Wire):
    model: str = Field(min_length=1)
    messages: list[InMessage] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_I32)
    max_completion_tokens: int | None = Field(None, ge=1, le=_I32)
    stop: Stop | None = None
    n: int | None = Field(None, ge=1, le=_I32)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    # Not in OpenAI's API, but sent by the clients of local servers.
    top_k: int | None = Field(None, ge=-1, le=_I32)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0, le=100)
    ignore_eos: bool | None = None


# --- out: bodies and the rare chunks ------------------------------------------------------------


class OutFunction(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class OutToolCall(msgspec.Struct, frozen=True):
    """In a body; in a stream with `index`, and with `id` and `type` in the call's first chunk only."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: OutFunction | UnsetType = UNSET


class OutMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[OutToolCall, ...] | UnsetType = UNSET


class OutChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: OutMessage
    logprobs: None = None
    finish_reason: FinishReason


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class OutUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> OutUsage:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            # Every computed prompt token is kept for the next request: "cache_write | prompt − cached".
            prompt_tokens_details=PromptDetails(usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens),
            completion_tokens_details=CompletionDetails(usage.reasoning_tokens),
        )


class OutCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[OutChoice, ...]
    usage: OutUsage
    timings: OutTimings | UnsetType = UNSET
