"""Messages of content blocks -> canonical messages. A string is the same as one text block, wherever either may stand.

What a message becomes depends on it alone, never on later ones: a conversation's next turn begins with the very
messages of this one, and finds them cached. Only `clear_at` asks for something else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn, TypeVar, assert_never

import msgspec

from protocols.anthropic_messages.signature import carried
from protocols.anthropic_messages.wire import (
    Citations,
    DocumentBlock,
    ImageBlock,
    InMessage,
    OtherBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChange,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from protocols.errors import InvalidRequest
from protocols.request import ContentPart, ImagePart, Message, TextPart, ToolCall

T = TypeVar("T")

Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | ToolChangeBlock
    | OtherBlock
)

BILLING_HEADER = "x-anthropic-billing-header:"
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class ToolUpdate(msgspec.Struct, frozen=True):
    """From here on a tool is offered, or no longer. `path` is where that is said, for what is wrong with it."""

    tool: ToolChange
    offered: bool
    path: str


class Conversation(msgspec.Struct, frozen=True):
    messages: tuple[Message, ...]
    updates: tuple[ToolUpdate, ...]


def conversation(system: str | list[TextBlock] | None, messages: Sequence[InMessage]) -> Conversation:
    reader = _Reader()
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    reader.system([_without_billing(text) for text in texts])
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        before = len(reader.messages)
        reader.message(message, f"messages[{i}]")
        if message.role == "system" and message.clear_at == "next_user_message" and i < last_user:
            # "Once a later `role: "user"` message exists in `messages` the message stays in the array … but is no
            # longer shown to the model." The tools it brought or took stay as it left them.
            del reader.messages[before:]
    return Conversation(tuple(reader.messages), tuple(reader.updates))


def _without_billing(text: str) -> str:
    """Claude Code's first block changes with every request, and would keep all that follows from being cached."""
    if BILLING_HEADER not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(BILLING_HEADER))


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.updates: list[ToolUpdate] = []

    def system(self, texts: Sequence[str]) -> None:
        """Blocks are instructions of their own, so they are set apart."""
        if text := "\n\n".join(text for text in texts if text):
            self.messages.append(Message("system", (TextPart(text),)))

    def message(self, wire: InMessage, path: str) -> None:
        if wire.content is None and wire.role != "system":
            raise _missing(f"{path}.content")
        blocks, path = _blocks(wire.content), f"{path}.content"
        match wire.role:
            case "system":
                self.system(self._system_texts(blocks, path))
            case "user":
                self._user(blocks, path)
            case "assistant":
                self.messages.append(_assistant(blocks, path))
            case _:
                assert_never(wire.role)

    def _system_texts(self, blocks: Sequence[Block], path: str) -> list[str]:
        texts = []
        for i, block in enumerate(blocks):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolChangeBlock():
                    texts.append(self._tool_change(block, f"{path}[{i}]").text)
                case _:
                    _refuse(block, "a system message", f"{path}[{i}]")
        return texts

    def _user(self, blocks: Sequence[Block], path: str) -> None:
        """Results of tools are messages of their own, in their place among the user's words."""
        parts: list[ContentPart] = []
        before = len(self.messages)
        for i, block in enumerate(blocks):
            where = f"{path}[{i}]"
            match block:
                case ToolResultBlock():
                    self._say(parts)
                    parts = []
                    self.messages.append(self._tool_result(block, where))
                case ToolChangeBlock():
                    parts.append(self._tool_change(block, where))
                case _:
                    parts += _parts(block, "a user message", where)
        self._say(parts)
        if len(self.messages) == before:
            self.messages.append(Message("user"))

    def _say(self, parts: Sequence[ContentPart]) -> None:
        if content := _present(parts):
            self.messages.append(Message("user", content))

    def _tool_result(self, block: ToolResultBlock, path: str) -> Message:
        parts: list[ContentPart] = [TextPart("Error: ")] if block.is_error else []
        for i, inner in enumerate(_blocks(block.content)):
            where = f"{path}.content[{i}]"
            if isinstance(inner, ToolReferenceBlock):
                reference = ToolChange(type="tool_reference", name=inner.tool_name)
                self.updates.append(ToolUpdate(reference, True, where))
                parts.append(_announced(inner.tool_name, True))
            else:
                parts += _parts(inner, "a tool's result", where)
        return Message("tool", _present(parts), tool_call_id=block.tool_use_id)

    def _tool_change(self, block: ToolChangeBlock, path: str) -> TextPart:
        offered = block.type == "tool_addition"
        self.updates.append(ToolUpdate(block.tool, offered, f"{path}.tool"))
        definition = block.tool.definition
        name = block.tool.name or (None if definition is None else definition.name)
        return _announced(_need(name, "name", f"{path}.tool"), offered)


def _blocks(content: str | Sequence[Block] | None) -> Sequence[Block]:
    return (TextBlock(type="text", text=content),) if isinstance(content, str) else content or ()


def _announced(tool: str, offered: bool) -> TextPart:
    return TextPart(f"Tool {'now' if offered else 'no longer'} available: {tool}\n")


def _assistant(blocks: Sequence[Block], path: str) -> Message:
    parts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking or carried(block.signature or "") or "")
            case RedactedThinkingBlock():
                pass  # only its author can read it
            case ToolUseBlock():
                # As templates print it themselves.
                calls.append(ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
            case ImageBlock():
                _refuse(block, "an assistant message", f"{path}[{i}]")
            case _:
                parts += _parts(block, "an assistant message", f"{path}[{i}]")
    reasoning = "\n\n".join(thought for thought in thoughts if thought)
    return Message("assistant", _present(parts), reasoning=reasoning or None, tool_calls=tuple(calls))


def _parts(block: Block, where: str, path: str) -> list[ContentPart]:
    """Blocks that anybody may say."""
    match block:
        case TextBlock():
            return [TextPart(block.text)]
        case ImageBlock():
            return [_image(block, path)]
        case DocumentBlock():
            return _document(block, where, path)
        case SearchResultBlock():
            _no_citations(block.citations, path)
            texts: list[ContentPart] = [TextPart(inner.text) for inner in block.content]
            return _enclosed("search_result", {"title": block.title, "source": block.source}, texts)
        case _:
            _refuse(block, where, path)


def _image(block: ImageBlock, path: str) -> ImagePart:
    source, path = block.source, f"{path}.source"
    match source.type:
        case "base64":
            if source.media_type not in IMAGE_TYPES:
                raise InvalidRequest(
                    f"Invalid '{path}.media_type': expected one of {', '.join(IMAGE_TYPES)}.",
                    param=f"{path}.media_type",
                )
            return ImagePart(f"data:{source.media_type};base64,{_need(source.data, 'data', path)}")
        case "url":
            url = _need(source.url, "url", path)
            if not url.startswith("https:"):
                raise InvalidRequest(f"Invalid '{path}.url': expected an https: URL.", param=f"{path}.url")
            return ImagePart(url)
        case _:
            raise InvalidRequest(f"Invalid '{path}.type': expected 'base64' or 'url'.", param=f"{path}.type")


def _document(block: DocumentBlock, where: str, path: str) -> list[ContentPart]:
    _no_citations(block.citations, path)
    source, inside = block.source, f"{path}.source"
    parts: list[ContentPart]
    match source.type:
        case "text":
            parts = [TextPart(_need(source.data, "data", inside))]
        case "content":
            if source.content is None:
                raise _missing(f"{inside}.content")
            parts = []
            for i, inner in enumerate(_blocks(source.content)):
                if not isinstance(inner, TextBlock | ImageBlock):
                    _refuse(inner, "a document", f"{inside}.content[{i}]")
                parts += _parts(inner, where, f"{inside}.content[{i}]")
        case _:
            raise InvalidRequest(
                f"Invalid '{inside}.type': expected 'text' or 'content'; other documents, such as PDF, have to be sent "
                "as their text or as images.",
                param=f"{inside}.type",
            )
    return _enclosed("document", {"title": block.title, "context": block.context}, parts)


def _enclosed(tag: str, header: dict[str, str | None], parts: list[ContentPart]) -> list[ContentPart]:
    lines = [f"<{tag}>", *(f"<{name}>{text}</{name}>" for name, text in header.items() if text), ""]
    return [TextPart("\n".join(lines)), *parts, TextPart(f"\n</{tag}>\n")]


def _no_citations(citations: Citations | None, path: str) -> None:
    if citations is not None and citations.enabled:
        path += ".citations.enabled"
        raise InvalidRequest(f"Invalid '{path}': this server's models do not cite; set it to false.", param=path)


def _present(parts: Sequence[ContentPart]) -> tuple[ContentPart, ...]:
    return tuple(part for part in parts if part != TextPart(""))


def _need(value: T | None, field: str, path: str) -> T:
    if value is None:
        raise _missing(f"{path}.{field}")
    return value


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)


def _refuse(block: Block, where: str, path: str) -> NoReturn:
    raise InvalidRequest(
        f"Invalid '{path}.type': a block of type '{block.type[:40]}' cannot be part of {where} here.",
        param=f"{path}.type",
    )
