"""Body -> `Call[ChatOptions]`. Everything that is wrong with a body is an `InvalidRequest` naming the JSON path."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocols.body import parse_object, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.openai_chat.wire import Body, InMessage, Part
from protocols.request import (
    ChatPrompt,
    ContentPart,
    ImagePart,
    Message,
    Request,
    Sampling,
    TextPart,
    ToolCall,
)

T = TypeVar("T")


class ChatOptions(msgspec.Struct, frozen=True):
    include_usage: bool


_NOT_YET: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": ([], ["text"]),
    "audio": (),
    "grammar": ("",),
    "json_schema": (),
}
"""Parameters that change the answer and are not supported yet -> values that ask for nothing. Ignoring any other value
would silently give the client something it did not ask for."""


def decode(body: bytes, request_id: str) -> Call[ChatOptions]:
    raw = parse_object(body)
    wire = validated(Body, raw)
    for name, neutral in _NOT_YET.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"'{name}' is not supported yet: leave it out.", param=name)
    if wire.n is not None and wire.n > 1:
        raise InvalidRequest("Only one choice per request is supported yet: 'n' must be 1.", param="n")

    # "`max_completion_tokens` wins over `max_tokens`"
    max_tokens = wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens
    stop = [wire.stop] if isinstance(wire.stop, str) else wire.stop or []
    request = Request(
        id=request_id,
        model=wire.model,
        prompt=ChatPrompt(tuple(_message(m, f"messages[{i}]") for i, m in enumerate(wire.messages))),
        sampling=Sampling(
            temperature=wire.temperature,
            top_p=wire.top_p,
            top_k=wire.top_k,
            min_p=wire.min_p,
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            repeat_penalty=wire.repeat_penalty,
            seed=wire.seed,
        ),
        max_tokens=max_tokens,
        stop=tuple(s for s in stop if s),  # an empty stop string would match before the first token
        ignore_eos=bool(wire.ignore_eos),
    )
    include_usage = wire.stream_options is not None and bool(wire.stream_options.include_usage)
    return Call((request,), stream=bool(wire.stream), options=ChatOptions(include_usage))


# --- messages ------------------------------------------------------------


def _message(wire: InMessage, path: str) -> Message:
    assistant = wire.role == "assistant"
    if wire.content is None and not assistant:
        raise InvalidRequest(
            f"Invalid '{path}.content': expected a string or a list of parts; only an assistant may leave it out.",
            param=f"{path}.content",
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
