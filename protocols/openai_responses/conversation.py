"""Items -> messages. The items of one assistant turn (reasoning, text, calls) become one message.

Items of types that mean nothing here (traces of OpenAI's own tools, compacted history only OpenAI can read, types that
came after this was written) are left out: "skip unknown item types".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from protocols.body import shown, validated_at
from protocols.errors import InvalidRequest, NotFound
from protocols.openai_responses.tools import ToolSet, custom_arguments, flat_name
from protocols.openai_responses.wire import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    Part,
    ReasoningItem,
    ReferenceItem,
    ToolsItem,
)
from protocols.request import ContentPart, ImagePart, Message, TextPart, ToolCall

Item = dict[str, Any]

_SEAL = "ty1."


def seal(reasoning: str) -> str:
    """`encrypted_content`: opaque to clients, not a secret. It carries the text for those that keep nothing else."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str | None:
    """The reasoning in a `seal`; None for anything else: "decode own blobs, ignore foreign ones"."""
    if not content.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(content[len(_SEAL) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def item_type(item: Item, path: str) -> str:
    """Messages and references may leave their type out."""
    match item.get("type"):
        case str(type_):
            return type_
        case None if "role" in item:
            return "message"
        case None if "id" in item:
            return "item_reference"
        case None:
            raise InvalidRequest(f"Missing required parameter: '{path}.type'.", param=f"{path}.type")
        case other:
            raise InvalidRequest(f"Invalid '{path}.type': expected a string, got {shown(other)}.", param=f"{path}.type")


class Conversation:
    """Add items in order, then `messages`. Tools that come in items are added to `tools`.

    `items` are those that were added, with references replaced by what they refer to: what a later response needs.
    """

    def __init__(self, tools: ToolSet, known: Mapping[str, Item]) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._known = known
        self._messages: list[Message] = []
        self._calls_made: set[str] = set()
        # The assistant's turn that is being put together.
        self._reasoning: list[str] = []
        self._content: list[ContentPart] = []
        self._calls: list[ToolCall] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        self._end_turn()
        return tuple(self._messages)

    def add(self, item: Item, path: str) -> None:
        type_ = item_type(item, path)
        if type_ == "item_reference":
            wanted = validated_at(path, ReferenceItem, item).id
            found = self._known.get(wanted)
            if found is None:
                raise NotFound(f"Item with id '{wanted}' not found.", param=f"{path}.id")
            item, type_ = found, item_type(found, path)
        self.items.append(item)
        match type_:
            case "message":
                self._message(validated_at(path, MessageItem, item), path)
            case "reasoning":
                self._reason(validated_at(path, ReasoningItem, item))
            case "function_call":
                call = validated_at(path, FunctionCallItem, item)
                self._call(call, call.arguments)
            case "custom_tool_call":
                custom = validated_at(path, CustomCallItem, item)
                self._call(custom, custom_arguments(custom.input))
            case "function_call_output" | "custom_tool_call_output":
                self._output(validated_at(path, CallOutputItem, item), path)
            case "additional_tools" | "tool_search_output":
                self._tools.add(validated_at(path, ToolsItem, item).tools, f"{path}.tools")
            case _:
                pass

    def _message(self, item: MessageItem, path: str) -> None:
        content = _content(item.content, f"{path}.content", images=item.role == "user")
        if item.role == "assistant":
            if self._calls:
                self._end_turn()  # text behind calls: a message may only have it before them
            self._content += content
        else:
            self._end_turn()
            self._messages.append(Message(item.role, tuple(content)))

    def _reason(self, item: ReasoningItem) -> None:
        text = "".join(entry.text for entry in item.content or ())
        if not text and item.encrypted_content is not None:
            text = unseal(item.encrypted_content) or ""
        text = text or "\n\n".join(entry.text for entry in item.summary or ())
        if self._content or self._calls:
            self._end_turn()
        if text:
            self._reasoning.append(text)

    def _call(self, call: FunctionCallItem | CustomCallItem, arguments: str) -> None:
        self._calls_made.add(call.call_id)
        self._calls.append(ToolCall(call.call_id, flat_name(call.name, call.namespace), arguments))

    def _output(self, item: CallOutputItem, path: str) -> None:
        if item.call_id not in self._calls_made:
            raise InvalidRequest(
                f"No tool call found for the output with call_id '{item.call_id}'.", param=f"{path}.call_id"
            )
        self._end_turn()
        content = _content(item.output, f"{path}.output", images=True)
        self._messages.append(Message("tool", tuple(content), tool_call_id=item.call_id))

    def _end_turn(self) -> None:
        if not (self._reasoning or self._content or self._calls):
            return
        self._messages.append(
            Message(
                "assistant",
                tuple(self._content),
                reasoning="\n\n".join(self._reasoning) or None,
                tool_calls=tuple(self._calls),
            )
        )
        self._reasoning, self._content, self._calls = [], [], []


def _content(content: str | list[Part], path: str, images: bool) -> list[ContentPart]:
    parts = [Part(type="input_text", text=content)] if isinstance(content, str) else content
    read = [_part(part, f"{path}[{index}]", images) for index, part in enumerate(parts)]
    # "string and single-text-array must render to identical tokens", and nothing is the same message as "".
    return [part for part in read if part != TextPart("")]


def _part(part: Part, path: str, images: bool) -> ContentPart:
    match part.type:
        # "tolerate output_text" where it is the client's own text, and chat's word for it.
        case "input_text" | "output_text" | "text":
            return TextPart(_need(part.text, "text", part, path))
        case "refusal":
            return TextPart(_need(part.refusal, "refusal", part, path))
        case "input_image":
            if not images:
                raise InvalidRequest(
                    f"Invalid '{path}.type': an image belongs in a user message or a tool's output.",
                    param=f"{path}.type",
                )
            url = _need(part.image_url, "image_url", part, path)
            if not url.startswith(("https:", "data:")):
                raise InvalidRequest(
                    f"Invalid '{path}.image_url': expected an https: or data: URL.", param=f"{path}.image_url"
                )
            return ImagePart(url)
        case other:
            raise InvalidRequest(
                f"Invalid '{path}.type': expected input_text, input_image, output_text or refusal, "
                f"got {shown(other, show_string=True)}.",
                param=f"{path}.type",
            )


def _need(value: str | None, field: str, part: Part, path: str) -> str:
    if value is None:
        raise InvalidRequest(
            f"Missing '{path}.{field}': a part of type '{part.type}' needs it.", param=f"{path}.{field}"
        )
    return value
