"""The JSON of Anthropic Messages: what comes in as pydantic models, what goes out as msgspec structs.

Shapes: https://platform.claude.com/docs/en/api/messages
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Discriminator, Field, Tag

from protocols.body import LIST, STRING, STRING_OR_LIST, Wire
from protocols.events import Usage
from protocols.sampling_fields import Positive, Probability, SamplingFields, Temperature

# --- in: content blocks ------------------------------------------------------------


class TextBlock(Wire):
    type: Literal["text"]
    text: str
    citations: Any = None


class ImageSource(Wire):
    """Which of the other fields belongs to which type is checked by the decoder."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Wire):
    type: Literal["image"]
    source: ImageSource


class Citations(Wire):
    enabled: bool | None = None


class DocumentSource(Wire):
    type: str
    data: str | None = None
    content: Content | None = None


class DocumentBlock(Wire):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(Wire):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None


class ThinkingBlock(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Wire):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Wire):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(Wire):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: Content | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Wire):
    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1)


class ToolChange(Wire):
    """A tool by its name, or by its definition."""

    type: Literal["tool_reference", "tool_definition"]
    name: str | None = None
    definition: InTool | None = None


class ToolChangeBlock(Wire):
    type: Literal["tool_addition", "tool_removal"]
    tool: ToolChange


class OtherBlock(Wire):
    """Of a type there is no use for here."""

    type: str


_TAGS = {
    type_: f"<{type_}>"
    for type_ in ("text", "image", "document", "search_result", "thinking", "redacted_thinking")
    + ("tool_use", "tool_result", "tool_reference")
} | {"tool_addition": "<tool_change>", "tool_removal": "<tool_change>"}


def _tag(value: object) -> str:
    type_ = value.get("type") if isinstance(value, dict) else None
    return _TAGS.get(type_, "<other>") if isinstance(type_, str) else "<other>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
    | Annotated[ToolChangeBlock, Tag("<tool_change>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_tag),
]
"""Which blocks may stand where is checked by the decoder."""

Content = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[Block], Tag(LIST)], STRING_OR_LIST]
System = Annotated[Annotated[str, Tag(STRING)] | Annotated[list[TextBlock], Tag(LIST)], STRING_OR_LIST]


class InMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Content | None = None
    clear_at: str | None = None


# --- in: a request body ------------------------------------------------------------


class InTool(Wire):
    """A tool with a schema, or one of Anthropic's own, which is only a type and a name."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None


class InToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")  # the name is one of pydantic's own


class OutputConfig(Wire):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Wire):
    user_id: str | None = None


class Body(SamplingFields):
    model: str = Field(min_length=1)
    messages: list[InMessage] = Field(min_length=1)
    system: System | None = None
    max_tokens: Positive | None = None
    stream: bool | None = None
    stop: list[str] | None = Field(None, max_length=100, validation_alias=AliasChoices("stop_sequences", "stop"))
    tools: list[InTool] | None = None
    tool_choice: InToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where `output_config.format` was before it
    mcp_servers: list[Any] | None = None
    metadata: Metadata | None = None
    temperature: Temperature | None = None  # 1 is the highest in Anthropic's API; open models are served with more
    top_p: Probability | None = None


# --- out: bodies and the rare events ------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class OutUsage(msgspec.Struct, frozen=True):
    """ "Total input tokens in a request is the summation of `input_tokens`, `cache_creation_input_tokens`, and
    `cache_read_input_tokens`"; nothing is created, since no prefix has to be marked to be kept.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    # Not at the start of a stream: clients from before it was there keep what is said first, and that is not true yet.
    output_tokens_details: OutputDetails | UnsetType

    @classmethod
    def at_start(cls, prompt_tokens: int, cached_tokens: int) -> OutUsage:
        return cls(prompt_tokens - cached_tokens, 0, cached_tokens, 0, UNSET)

    @classmethod
    def of(cls, usage: Usage) -> OutUsage:
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(usage.reasoning_tokens),
        )


class OutText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class OutThinking(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class OutToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


OutBlock = OutText | OutThinking | OutToolUse


class OutMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    content: tuple[OutBlock, ...]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: OutUsage


class OutModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"


class OutModelPage(msgspec.Struct, frozen=True):
    data: tuple[OutModel, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


class OutError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    error: dict[str, str | int]
    request_id: str | UnsetType = UNSET
