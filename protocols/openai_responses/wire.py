"""The JSON of Responses: what comes in as pydantic models, what goes out as msgspec structs.

Shapes: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field, Tag

from protocols.body import LIST, STRING, STRING_OR_LIST, Wire
from protocols.events import Usage
from protocols.llamacpp_extras import OutTimings
from protocols.openai_shared import MAX_TOP_LOGPROBS, CompletionDetails, OpenAIFields, PromptDetails
from protocols.sampling_fields import Positive
from protocols.token_logprobs import OutTokenLogprob

# --- in: a request body ------------------------------------------------------------

Input = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[dict[str, Any]], Tag(LIST)], STRING_OR_LIST]


class ReasoningConfig(Wire):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its name before `summary`
    mode: Literal["standard"] | None = None  # there is no other way to run a model here


class TextFormat(Wire):
    """Which of the other fields belongs to which type is checked by the decoder."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Wire):
    """ "All sub-fields optional; default format {type:text}." """

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Body(OpenAIFields):
    """`input` items and `tools` are of many types, some of which are skipped: the decoder checks each one it reads."""

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1)
    store: bool | None = None
    max_tokens: Positive | None = Field(None, validation_alias=AliasChoices("max_output_tokens", "max_tokens"))
    max_tool_calls: Positive | None = None  # of hosted tools, of which there are none
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None  # a word or an object of many types: the decoder checks it
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    safety_identifier: str | None = None
    user: str | None = None


# --- in: items of `input` ------------------------------------------------------------


class Part(Wire):
    """One content part. Which of the other fields belongs to which type is checked by the decoder."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Content = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[Part], Tag(LIST)], STRING_OR_LIST]


class MessageItem(Wire):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Wire):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str


class CustomCallItem(Wire):
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str


class CallOutputItem(Wire):
    call_id: str = Field(min_length=1)
    output: Content


class TextEntry(Wire):
    text: str


class ReasoningItem(Wire):
    summary: list[TextEntry] | None = None
    content: list[TextEntry] | None = None
    encrypted_content: str | None = None


class ReferenceItem(Wire):
    id: str = Field(min_length=1)


class ToolsItem(Wire):
    tools: list[dict[str, Any]]


# --- in: tools ------------------------------------------------------------


class FunctionTool(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Wire):
    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Wire):
    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Wire):
    name: str = Field(min_length=1)
    tools: list[dict[str, Any]]


# --- out: items ------------------------------------------------------------

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    text: str
    logprobs: tuple[OutTokenLogprob, ...] = ()
    annotations: tuple[()] = ()


class OutReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    text: str


class OutSummaryText(msgspec.Struct, frozen=True, tag="summary_text", tag_field="type"):
    text: str


class OutReasoning(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    id: str
    status: ItemStatus
    summary: tuple[OutSummaryText, ...] = ()
    content: tuple[OutReasoningText, ...] = ()
    encrypted_content: str | None = None


class OutMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: tuple[OutText, ...] = ()


class OutFunctionCall(msgspec.Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class OutCustomCall(msgspec.Struct, frozen=True, kw_only=True, tag="custom_tool_call", tag_field="type"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


OutItem = OutReasoning | OutMessage | OutFunctionCall | OutCustomCall


# --- out: the response ------------------------------------------------------------


class OutUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> OutUsage:
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=PromptDetails.of(usage),
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionDetails.of(usage),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class OutError(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutIncomplete(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request, as the client wrote it or as it was understood.

    `temperature` and `top_p` are null when the model's own defaults apply.
    """

    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a response that are its own. On the wire, those of its `Echo` follow.

    `timings` are in a body; in a stream they stand beside the response.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None = None
    error: OutError | None = None
    incomplete_details: OutIncomplete | None = None
    output: tuple[OutItem, ...] = ()
    usage: OutUsage | None = None
    timings: OutTimings | UnsetType = UNSET
