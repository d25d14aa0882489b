"""The JSON of Chat Completions: what comes in as pydantic models, what goes out as msgspec structs.

Shapes: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, Tag

from protocols.body import LIST, OBJECT, STRING, STRING_OR_LIST, STRING_OR_OBJECT, Wire
from protocols.events import FinishReason
from protocols.openai_shared import MAX_TOP_LOGPROBS, OpenAIFields
from protocols.sampling_fields import NaturalOrAll, Positive
from protocols.token_logprobs import OutTokenLogprob

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


class InMessage(Wire):
    """A message of any role. Which fields a role needs is checked by the decoder."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class FunctionSpec(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Wire):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Wire):
    name: str


class AllowedTool(Wire):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


class ChosenTool(Wire):
    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceWord = Literal["none", "auto", "required"]
ToolChoiceField = Annotated[
    Annotated[ToolChoiceWord, Tag(STRING)] | Annotated[ChosenTool, Tag(OBJECT)], STRING_OR_OBJECT
]


class SchemaFormat(Wire):
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Wire):
    """`schema` with `json_object` is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class Body(OpenAIFields):
    messages: list[InMessage] = Field(min_length=1)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    # Not in OpenAI's API, but in that of llama.cpp, and sent by the clients of local servers.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] | None = None
    reasoning_budget_tokens: NaturalOrAll | None = None
    thinking_budget_tokens: NaturalOrAll | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Any = None


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


class OutLogprobs(msgspec.Struct, frozen=True):
    content: tuple[OutTokenLogprob, ...]
    refusal: None = None


class OutChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: OutMessage
    logprobs: OutLogprobs | None
    finish_reason: FinishReason
