"""Events -> stream events, and `Completion` -> body."""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec

from protocols import sse
from protocols.anthropic_messages.decode import MessagesOptions
from protocols.anthropic_messages.errors import error_body
from protocols.anthropic_messages.signature import carrying, signature
from protocols.anthropic_messages.wire import (
    OutBlock,
    OutMessage,
    OutText,
    OutThinking,
    OutToolUse,
    OutUsage,
    StopReason,
)
from protocols.codec import Call, Stamp
from protocols.collect import Completion
from protocols.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    IllegalEvent,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.partial_json import JsonObject, json_object

PING = sse.message(b'{"type":"ping"}', b"ping")
MESSAGE_STOP = sse.message(b'{"type":"message_stop"}', b"message_stop")

_encode = msgspec.json.Encoder().encode


class MessagesEncoder:
    """One block is open at a time. A delta costs the encoding of its own text."""

    def __init__(self, call: Call[MessagesOptions], stamp: Stamp) -> None:
        self._model = call.request.model
        self._request_id = call.request.id
        self._thinking = call.options.thinking
        self._stamp = stamp
        self._started = self._done = False
        self._blocks = 0
        self._open: Literal["thinking", "text", "tool_use"] | None = None
        self._delta = b""  # the beginning of the open block's deltas, up to their text
        self._thoughts: list[str] = []  # of the open block, when they are omitted
        self._answered = self._called = False
        self._arguments = JsonObject()

    def feed(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._begin("text") + self._piece(event.text) if event.text else b""
            case ReasoningDelta():
                return self._think(event.text) if event.text else b""
            case ToolCallDelta():
                return self._argue(self._arguments.feed(event.arguments))
            case ToolCallStarted():
                return self._call(event)
            case ToolCallEnded():
                return self._argue(self._arguments.finish()) + self._close()
            case Started():
                return self._start(event)
            case Progress():
                return b""  # the keep-alive says enough
            case Finished():
                return self._finish(event)
            case Failed():
                self._end()
                return sse.message(error_body(event.error, self._request_id), b"error")
            case _:
                assert_never(event)

    def keepalive(self) -> bytes:
        return PING

    def _start(self, event: Started) -> bytes:
        # "Tie them to a per-stream flag": a first token that is half a character must not lose the message's start.
        if self._started:
            raise IllegalEvent("a second Started")
        self._started = True
        message = OutMessage(
            id=_id(self._stamp),
            content=(),
            model=self._model,
            stop_reason=None,
            stop_sequence=None,
            usage=OutUsage.at_start(event.prompt_tokens, event.cached_tokens),
        )
        return sse.message(b'{"type":"message_start","message":' + _encode(message) + b"}", b"message_start") + PING

    def _think(self, text: str) -> bytes:
        match self._thinking:
            case "none":
                return b""
            case "omitted":
                begin = self._begin("thinking")
                self._thoughts.append(text)
                return begin
            case "shown":
                return self._begin("thinking") + self._piece(text)

    def _call(self, event: ToolCallStarted) -> bytes:
        self._called = True
        self._arguments = JsonObject()
        block = OutToolUse(_call_id(event.id, self._stamp, event.index), event.name, msgspec.Raw(b"{}"))
        return self._close() + self._begin("tool_use", block)

    def _argue(self, arguments: str) -> bytes:
        return self._piece(arguments) if arguments else b""

    def _finish(self, event: Finished) -> bytes:
        # "If there is no block, or only thinking, an empty text block is appended"
        filler = b"" if self._answered else self._begin("text")
        close = self._close()
        self._end()
        reason, stop_sequence = _stop(event.reason, event.stop_sequence, self._called)
        delta = (
            b'{"type":"message_delta","delta":{"stop_reason":' + _encode(reason) + b',"stop_sequence":'
            + _encode(stop_sequence) + b'},"usage":' + _encode(OutUsage.of(event.usage)) + b"}"
        )  # fmt: skip
        return filler + close + sse.message(delta, b"message_delta") + MESSAGE_STOP

    def _end(self) -> None:
        if self._done:
            raise IllegalEvent("a second end of the stream")
        self._done = True

    # --- blocks ---

    def _begin(self, kind: Literal["thinking", "text", "tool_use"], block: OutBlock | None = None) -> bytes:
        """Nothing if such a block is open; else the end of the one that is, and the start of the new one."""
        if self._open == kind:
            return b""
        close = self._close()
        self._open = kind
        self._answered = self._answered or kind != "thinking"
        start = block or (OutThinking("", "") if kind == "thinking" else OutText(""))
        index = b"%d" % self._blocks
        self._blocks += 1
        self._delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":' + index + _DELTA[kind]
        return close + sse.message(
            b'{"type":"content_block_start","index":' + index + b',"content_block":' + _encode(start) + b"}",
            b"content_block_start",
        )

    def _piece(self, text: str) -> bytes:
        return self._delta + _encode(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        index = b"%d" % (self._blocks - 1)
        seal = b""
        if self._open == "thinking":
            delta = b',"delta":{"type":"signature_delta","signature":' + _encode(self._signature()) + b"}}"
            seal = sse.message(b'{"type":"content_block_delta","index":' + index + delta, b"content_block_delta")
        self._open = None
        return seal + sse.message(b'{"type":"content_block_stop","index":' + index + b"}", b"content_block_stop")

    def _signature(self) -> str:
        thoughts = "".join(self._thoughts)
        self._thoughts.clear()
        return carrying(thoughts) if self._thinking == "omitted" else signature(self._stamp.id)


_DELTA = {
    "thinking": b',"delta":{"type":"thinking_delta","thinking":',
    "text": b',"delta":{"type":"text_delta","text":',
    "tool_use": b',"delta":{"type":"input_json_delta","partial_json":',
}


def render(call: Call[MessagesOptions], stamp: Stamp, completion: Completion) -> bytes:
    (choice,) = completion.choices
    blocks: list[OutBlock] = []
    if choice.reasoning:
        match call.options.thinking:
            case "none":
                pass
            case "omitted":
                blocks.append(OutThinking("", carrying(choice.reasoning)))
            case "shown":
                blocks.append(OutThinking(choice.reasoning, signature(stamp.id)))
    if choice.text or not choice.tool_calls:
        blocks.append(OutText(choice.text))
    for index, tool_call in enumerate(choice.tool_calls):
        arguments = msgspec.Raw(json_object(tool_call.arguments).encode())
        blocks.append(OutToolUse(_call_id(tool_call.id, stamp, index), tool_call.name, arguments))
    reason, stop_sequence = _stop(choice.reason, choice.stop_sequence, bool(choice.tool_calls))
    return _encode(
        OutMessage(
            id=_id(stamp),
            content=tuple(blocks),
            model=call.request.model,
            stop_reason=reason,
            stop_sequence=stop_sequence,
            usage=OutUsage.of(completion.usage),
        )
    )


def _stop(reason: FinishReason, stop_sequence: str | None, called: bool) -> tuple[StopReason, str | None]:
    """A client that got calls has to run them, whatever ended the text behind them."""
    if reason == "length":
        return "max_tokens", None
    if reason == "tool_calls" or called:
        return "tool_use", None
    return ("end_turn", None) if stop_sequence is None else ("stop_sequence", stop_sequence)


def _id(stamp: Stamp) -> str:
    return f"msg_{stamp.id}"


def _call_id(id: str, stamp: Stamp, index: int) -> str:
    """A model's own is what its template will want to see again. One that was made for it has Anthropic's prefix."""
    if not id:
        return f"toolu_{stamp.id}{index:02d}"
    return f"toolu_{id.removeprefix('call_')}" if id.startswith("call_") else id
