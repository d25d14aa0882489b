"""What the events of a stream say, in each dialect.

Other servers are read as well as ours: what is not known is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, assert_never

import msgspec

from deployments.bench.dialects import Dialect
from protocols.sse import ServerSentEvent


class MalformedEvent(ValueError):
    """An event whose data the dialect does not have."""


class Reading(msgspec.Struct):
    """A stream so far. Counts of tokens are the server's own, and None while it has not said any."""

    outputs: int = 0
    """Events that carried text, thinking or a piece of a tool call."""
    ended: bool = False
    error: tuple[str, str] | None = None
    """Type and message."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


Read = Callable[[Reading, ServerSentEvent], None]
"""Adds an event to a reading. Raises `MalformedEvent`."""


def reader(dialect: Dialect) -> Read:
    match dialect:
        case "chat":
            return _read_chat
        case "completions":
            return _read_completions
        case "responses":
            return _read_responses
        case "messages":
            return _read_messages
        case "native":
            return _read_native
        case _:
            assert_never(dialect)


def error_of(data: bytes) -> tuple[str, str] | None:
    """Type and message of an error's body, as any of the dialects writes it."""
    try:
        return _error(msgspec.json.decode(data))
    except msgspec.DecodeError:
        return None


def _error(found: object) -> tuple[str, str] | None:
    """`{"error": {…}}`, `{"error": "words"}`, or the object itself where it has a message."""
    if not isinstance(found, dict):
        return None
    inner = found.get("error", found)
    if isinstance(inner, str):
        return ("error", inner)
    if not isinstance(inner, dict) or "message" not in inner:
        return None
    return (str(inner.get("type") or inner.get("code") or "error"), str(inner["message"]))


# --- the streams ------------------------------------------------------------------------------------------------------


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of the two OpenAI families and of Messages: their names do not overlap in what they mean."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def into(self, reading: Reading) -> None:
        for prompt in (self.prompt_tokens, self.input_tokens):
            if prompt is not None:
                # Messages counts what came from the cache beside the rest of the prompt, the others within it.
                reading.prompt_tokens = prompt + (self.cache_read_input_tokens or 0)
        for output in (self.completion_tokens, self.output_tokens):
            if output is not None:
                reading.output_tokens = output
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = self.cache_read_input_tokens if details is None else details.cached_tokens
        if cached is not None:
            reading.cached_tokens = cached


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Sequence[Any] | None = None


class _ChatChoice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _CompletionChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    choices: Sequence[_ChatChoice] = ()
    usage: _Usage | None = None
    error: Any = None


class _CompletionChunk(msgspec.Struct):
    choices: Sequence[_CompletionChoice] = ()
    usage: _Usage | None = None
    error: Any = None


class _ResponseHead(msgspec.Struct):
    usage: _Usage | None = None
    error: Any = None


class _ResponsesEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    response: _ResponseHead | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _BlockDelta(msgspec.Struct):
    """The delta of a block, or of the message."""

    text: str = ""
    thinking: str = ""
    partial_json: str = ""


class _MessagesEvent(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    delta: _BlockDelta | None = None
    usage: _Usage | None = None


class _NativeEvent(msgspec.Struct):
    content: str = ""
    stop: bool = False
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    error: Any = None


_decode_chat = msgspec.json.Decoder(_ChatChunk).decode
_decode_completion = msgspec.json.Decoder(_CompletionChunk).decode
_decode_responses = msgspec.json.Decoder(_ResponsesEvent).decode
_decode_messages = msgspec.json.Decoder(_MessagesEvent).decode
_decode_native = msgspec.json.Decoder(_NativeEvent).decode

DecodedT = TypeVar("DecodedT")


def _decoded(decode: Callable[[str], DecodedT], data: str) -> DecodedT:
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise MalformedEvent(f"{error}: {data[:200]}") from None


def _read_chat(reading: Reading, event: ServerSentEvent) -> None:
    if event.data == "[DONE]":
        reading.ended = True
        return
    chunk = _decoded(_decode_chat, event.data)
    _note(reading, chunk.usage, chunk.error)
    for choice in chunk.choices:
        delta = choice.delta
        reading.outputs += bool(
            delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
        )
        reading.ended = reading.ended or choice.finish_reason is not None


def _read_completions(reading: Reading, event: ServerSentEvent) -> None:
    if event.data == "[DONE]":
        reading.ended = True
        return
    chunk = _decoded(_decode_completion, event.data)
    _note(reading, chunk.usage, chunk.error)
    for choice in chunk.choices:
        reading.outputs += bool(choice.text)
        reading.ended = reading.ended or choice.finish_reason is not None


def _note(reading: Reading, usage: _Usage | None, error: object) -> None:
    if usage is not None:
        usage.into(reading)
    if error is not None:
        reading.error = _error(error) or ("error", str(error))


def _read_responses(reading: Reading, event: ServerSentEvent) -> None:
    if event.data == "[DONE]":  # not in the dialect, but some write it
        return
    found = _decoded(_decode_responses, event.data)
    match found.type:
        case "response.completed" | "response.incomplete":
            reading.ended = True
            _note(reading, None if found.response is None else found.response.usage, None)
        case "response.failed":
            error = None if found.response is None else _error(found.response.error)
            reading.error = reading.error or error or ("error", "the response failed")
        case "error":
            reading.error = error_of(event.data.encode()) or ("error", event.data)
        case name if name.endswith(".delta"):
            reading.outputs += bool(found.delta)


def _read_messages(reading: Reading, event: ServerSentEvent) -> None:
    found = _decoded(_decode_messages, event.data)
    match found.type:
        case "message_start" if found.message is not None:
            _note(reading, found.message.usage, None)
        case "content_block_delta" if found.delta is not None:
            reading.outputs += bool(found.delta.text or found.delta.thinking or found.delta.partial_json)
        case "message_delta":
            _note(reading, found.usage, None)
        case "message_stop":
            reading.ended = True
        case "error":
            reading.error = error_of(event.data.encode()) or ("error", event.data)


def _read_native(reading: Reading, event: ServerSentEvent) -> None:
    found = _decoded(_decode_native, event.data)
    _note(reading, None, found.error)
    reading.outputs += bool(found.content)
    if found.stop:
        reading.ended = True
        reading.prompt_tokens, reading.output_tokens = found.tokens_evaluated, found.tokens_predicted
