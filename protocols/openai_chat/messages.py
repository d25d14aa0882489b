"""The messages of a chat body, and whether the answer goes on from the last of them."""

from __future__ import annotations

from typing import TypeVar

from protocols.errors import InvalidRequest
from protocols.openai_chat.wire import Body, InMessage, Part
from protocols.request import ContentPart, ImagePart, Message, TextPart, ToolCall

T = TypeVar("T")


def conversation(wire: Body) -> tuple[tuple[Message, ...], bool]:
    """The messages, and whether the last one is the beginning of the answer.

    "last assistant message = prefill", unless `continue_final_message` says no.
    """
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(wire.messages))
    wish = _continuation(wire.continue_final_message)
    last, path = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "assistant" or wish is False:
        if wish:
            raise InvalidRequest(
                f"Nothing can be continued: '{path}' is no assistant message.", param="continue_final_message"
            )
        return messages, False
    if wish and wire.add_generation_prompt:
        raise InvalidRequest(
            "'add_generation_prompt' begins a new message and 'continue_final_message' goes on with the last one: "
            "give only one of them.",
            param="add_generation_prompt",
        )
    if last.tool_calls:
        raise InvalidRequest(
            f"'{path}' holds tool calls, and cannot be continued: their results have to follow as messages of "
            "role 'tool'.",
            param=f"{path}.tool_calls",
        )
    if len(messages) > 1 and messages[-2].role == "assistant":
        raise InvalidRequest(
            f"'{path}' is the second of two assistant messages at the end, and cannot be continued.", param=path
        )
    half = {"content": last.text, "reasoning_content": last.reasoning and not last.text}
    if isinstance(wish, str) and not half[wish]:
        raise InvalidRequest(
            f"Invalid 'continue_final_message': '{path}' does not end in its {wish}.", param="continue_final_message"
        )
    if last.content or last.reasoning:
        return messages, True
    # The beginning of an answer that holds nothing is what the generation prompt is.
    return messages[:-1] or messages, False


def _continuation(value: object) -> bool | str | None:
    if value is None or isinstance(value, bool) or value in ("content", "reasoning_content"):
        return value
    raise InvalidRequest(
        "Invalid 'continue_final_message': expected true, false, 'content' or 'reasoning_content'.",
        param="continue_final_message",
    )


def _message(wire: InMessage, path: str) -> Message:
    assistant = wire.role == "assistant"
    if wire.content is None and not assistant:
        raise InvalidRequest(
            f"Invalid '{path}.content': expected a string or a list of parts; only an assistant may leave it out.",
            param=f"{path}.content",
        )
    if wire.function_call is not None:
        raise InvalidRequest(
            f"'{path}.function_call' is the predecessor of 'tool_calls', and not supported: use those.",
            param=f"{path}.function_call",
        )
    if wire.tool_calls and not assistant:
        raise InvalidRequest(
            f"Invalid '{path}.tool_calls': only an assistant message may hold them, not one of role '{wire.role}'.",
            param=f"{path}.tool_calls",
        )
    if wire.role == "tool" and not wire.tool_call_id:
        raise InvalidRequest(
            f"Missing '{path}.tool_call_id': a message of role 'tool' needs the id of the call it answers.",
            param=f"{path}.tool_call_id",
        )
    parts: list[Part] = []
    if isinstance(wire.content, str):
        parts = [Part(type="text", text=wire.content)]
    elif wire.content is not None:
        parts = wire.content
    content = [_part(part, wire, f"{path}.content[{i}]") for i, part in enumerate(parts)]
    if assistant and wire.refusal:
        content.append(TextPart(wire.refusal))
    return Message(
        role=wire.role,
        # Null, "", [] and one empty text part are the same message, as a string and a list with one text part are:
        # "string and single-text-array must render to identical tokens".
        content=tuple(part for part in content if part != TextPart("")),
        reasoning=(wire.reasoning_content or None) if assistant else None,
        tool_calls=tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in wire.tool_calls or ()),
        tool_call_id=wire.tool_call_id if wire.role == "tool" else None,
        name=wire.name,
    )


def _part(part: Part, message: InMessage, path: str) -> ContentPart:
    match part.type:
        case "text":
            return TextPart(_need(part.text, "text", "text", path))
        case "refusal":
            if message.role != "assistant":
                raise _misplaced("refusal", "an assistant message", message, path)
            return TextPart(_need(part.refusal, "refusal", "refusal", path))
        case "image_url":
            if message.role not in ("user", "tool"):
                raise _misplaced("image_url", "a user or tool message", message, path)
            url = _need(part.image_url, "image_url", "image_url", path).url
            if not url.startswith(("https:", "data:")):
                raise InvalidRequest(
                    f"Invalid '{path}.image_url.url': expected an https: or data: URL.", param=f"{path}.image_url.url"
                )
            return ImagePart(url)


def _need(value: T | None, field: str, type_: str, path: str) -> T:
    if value is None:
        raise InvalidRequest(f"Missing '{path}.{field}': a part of type '{type_}' needs it.", param=f"{path}.{field}")
    return value


def _misplaced(type_: str, where: str, message: InMessage, path: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{path}.type': a part of type '{type_}' belongs in {where}, not in one of role '{message.role}'.",
        param=f"{path}.type",
    )
