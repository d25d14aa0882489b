"""Events -> chunks, and `Completion` -> body."""

from __future__ import annotations

from typing import ClassVar, assert_never

import msgspec
from msgspec import UNSET

from protocols import sse
from protocols.codec import Call, Stamp
from protocols.collect import Choice, Completion, first_timings, total_usage
from protocols.errors import ErrorInfo
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
    Timings,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.llamacpp_extras import OutProgress
from protocols.openai_chat.decode import ChatOptions
from protocols.openai_chat.wire import (
    OutChoice,
    OutFunction,
    OutLogprobs,
    OutMessage,
    OutToolCall,
)
from protocols.openai_chunks import Chunks, timings_part
from protocols.openai_errors import error_body
from protocols.openai_shared import NO_ARGUMENTS, answer_body
from protocols.request import ChatPrompt, Request
from protocols.token_logprobs import OutTokenLogprob

_encode = msgspec.json.Encoder().encode


class ChatEncoder:
    """All that is constant in a stream's chunks is encoded once; a delta costs the encoding of its own text."""

    ROLE: ClassVar[bytes] = b'{"role":"assistant","content":""}'

    def __init__(self, call: Call[ChatOptions], stamp: Stamp) -> None:
        n = call.request.n
        self._stamp = stamp
        self._reasons = finish_reasons(call.request)
        self._logprobs = call.request.logprobs is not None
        self._progress = call.request.extras.progress
        self._chunks = Chunks(
            _id(stamp), "chat.completion.chunk", stamp, call.request.model, call.options.include_usage
        )
        self._delta = [self._chunks.head + b'{"index":%d,"delta":' % choice for choice in range(n)]
        self._text = [delta + b'{"content":' for delta in self._delta]
        self._reasoning = [delta + b'{"reasoning_content":' for delta in self._delta]
        self._open = b',"finish_reason":null}]' + self._chunks.usage
        self._close_delta = b',"logprobs":null' + self._open + b"}\n\n"
        self._started = False
        self._argued = [False] * n  # whether the open call of a choice has had arguments
        self._finished: list[Finished] = []

    def feed(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                if self._logprobs:
                    return self._text_with_logprobs(event)
                # "deltas are never empty strings"
                return self._content(self._text[event.choice], event) if event.text else b""
            case ReasoningDelta():
                return self._content(self._reasoning[event.choice], event) if event.text else b""
            case ToolCallDelta():
                return self._arguments(event, event.arguments, event.timings) if event.arguments else b""
            case ToolCallStarted():
                self._argued[event.choice] = False
                function = OutFunction(name=event.name, arguments="")
                id = event.id or call_id(self._stamp, event.choice, event.index)
                return self._tool_call(event.choice, OutToolCall(event.index, id, "function", function))
            case ToolCallEnded():
                return b"" if self._argued[event.choice] else self._arguments(event, NO_ARGUMENTS)
            case Started():
                return self._start(event)
            case Progress():
                return self._prefill(event)
            case Finished():
                return self._finish(event)
            case Failed():
                return self._chunks.failed(self._error(event.error))
            case _:
                assert_never(event)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def _start(self, event: Started) -> bytes:
        # "Tie them to a per-stream flag": a first token that is half a character must not lose the role.
        if self._started:
            raise IllegalEvent("a second Started")
        self._started = True
        return b"".join(delta + self.ROLE + self._close_delta for delta in self._delta) + self._prefill(event)

    def _error(self, error: ErrorInfo) -> bytes:
        return error_body(error, prompt_param="messages")

    def _content(self, head: bytes, event: TextDelta | ReasoningDelta) -> bytes:
        return head + _encode(event.text) + b"}" + self._close(event.timings)

    def _close(self, timings: Timings | None) -> bytes:
        """What comes behind a delta."""
        if timings is None:
            return self._close_delta
        return b',"logprobs":null' + self._open + timings_part(timings) + b"}\n\n"

    def _prefill(self, event: Started | Progress) -> bytes:
        """ "comments by default, progress chunks on `return_progress`" """
        if not self._progress or (progress := OutProgress.of(event)) is None:
            return b""
        head = self._delta[event.choice] + b'{},"logprobs":null' + self._open
        return head + b',"prompt_progress":' + _encode(progress) + b"}\n\n"

    def _text_with_logprobs(self, event: TextDelta) -> bytes:
        """A token may have no text of its own: then its probability comes with a delta that has none either."""
        if not event.text and not event.logprobs:
            return b""
        delta = b'{"content":' + _encode(event.text) + b"}" if event.text else b"{}"
        logprobs = _encode(OutLogprobs(tuple(OutTokenLogprob.of(item) for item in event.logprobs)))
        close = self._open + timings_part(event.timings) + b"}\n\n"
        return self._delta[event.choice] + delta + b',"logprobs":' + logprobs + close

    def _tool_call(self, choice: int, call: OutToolCall, timings: Timings | None = None) -> bytes:
        return self._delta[choice] + b'{"tool_calls":[' + _encode(call) + b"]}" + self._close(timings)

    def _arguments(self, event: ToolCallDelta | ToolCallEnded, arguments: str, timings: Timings | None = None) -> bytes:
        self._argued[event.choice] = True
        call = OutToolCall(index=event.index, function=OutFunction(arguments=arguments))
        return self._tool_call(event.choice, call, timings)

    def _finish(self, event: Finished) -> bytes:
        self._finished.append(event)
        reason = _encode(self._reasons[event.reason])
        end = b'{},"logprobs":null,"finish_reason":' + reason + b"}]" + self._chunks.usage
        chunk = self._delta[event.choice] + end
        if len(self._finished) < len(self._delta):
            return chunk + b"}\n\n"
        usage = total_usage([end.usage for end in self._finished])
        return self._chunks.last(chunk, usage, first_timings(self._finished))


def render(call: Call[ChatOptions], stamp: Stamp, completion: Completion) -> bytes:
    choices = [_choice(choice, call.request, stamp) for choice in completion.choices]
    return answer_body(_id(stamp), "chat.completion", stamp, call.request.model, choices, completion)


def _choice(choice: Choice, request: Request, stamp: Stamp) -> OutChoice:
    calls = tuple(
        OutToolCall(
            id=c.id or call_id(stamp, choice.index, index),
            type="function",
            function=OutFunction(c.name, c.arguments or NO_ARGUMENTS),
        )
        for index, c in enumerate(choice.tool_calls)
    )
    message = OutMessage(
        content=None if calls and not choice.text else choice.text,  # "message `content:null` when only tool calls"
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    logprobs = None
    if request.logprobs is not None:
        logprobs = OutLogprobs(tuple(OutTokenLogprob.of(item) for item in choice.logprobs))
    reason = finish_reasons(request)[choice.reason]
    return OutChoice(index=choice.index, message=message, logprobs=logprobs, finish_reason=reason)


def finish_reasons(request: Request) -> dict[FinishReason, FinishReason]:
    """As OpenAI has it, a call of the one function that `tool_choice` names ends with `stop`."""
    named = isinstance(request.prompt, ChatPrompt) and request.prompt.tool_choice.name is not None
    return {"stop": "stop", "length": "length", "tool_calls": "stop" if named else "tool_calls"}


def call_id(stamp: Stamp, choice: int, index: int) -> str:
    """For a call that the model gave no id: the same in a stream and in a body, and no other call's."""
    return f"call_{stamp.id}{choice:02x}{index:02x}"


def _id(stamp: Stamp) -> str:
    return f"chatcmpl-{stamp.id}"
