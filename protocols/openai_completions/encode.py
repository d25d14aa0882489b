"""Events -> chunks, and `Completion` -> body."""

from __future__ import annotations

from typing import assert_never

import msgspec

from protocols import sse
from protocols.codec import Call, Stamp
from protocols.collect import Completion, first_timings, summed_usage, total_usage
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
    Usage,
)
from protocols.llamacpp_extras import OutProgress
from protocols.openai_chunks import Chunks, timings_part
from protocols.openai_completions.decode import CompletionOptions
from protocols.openai_completions.logprobs import LegacyLogprobs
from protocols.openai_completions.wire import FinishWord, OutChoice
from protocols.openai_errors import error_body
from protocols.openai_shared import answer_body

_REASONS: dict[FinishReason, FinishWord] = {"stop": "stop", "length": "length", "tool_calls": "stop"}
""" "finish ∈ stop/length/content_filter (never tool_calls)" """

_encode = msgspec.json.Encoder().encode


class CompletionEncoder:
    """All that is constant in a stream's chunks is encoded once; a delta costs the encoding of its own text.

    Where there are several prompts, each has a `Started` of its own, in any order.
    """

    def __init__(self, call: Call[CompletionOptions], stamp: Stamp) -> None:
        self._requests = call.requests
        self._progress = call.requests[0].extras.progress
        self._echo = _echoes(call)
        self._chunks = Chunks(_id(stamp), "text_completion", stamp, call.requests[0].model, call.options.include_usage)
        n = sum(request.n for request in call.requests)
        self._text = [self._chunks.head + b'{"index":%d,"text":' % choice for choice in range(n)]
        self._open = b',"finish_reason":null}]' + self._chunks.usage
        self._close = b',"logprobs":null' + self._open + b"}\n\n"
        wanted = call.requests[0].logprobs is not None
        self._logprobs = [LegacyLogprobs() for _ in range(n)] if wanted else None
        self._started = False
        self._finished: dict[int, Finished] = {}

    def feed(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                if self._logprobs is not None:
                    return self._with_logprobs(event, self._logprobs[event.choice])
                return self._plain(event) if event.text else b""
            case ReasoningDelta() | ToolCallStarted() | ToolCallDelta() | ToolCallEnded():
                return b""  # text is all that this dialect knows, here as in a body
            case Started():
                return self._start() + self._prefill(event)
            case Progress():
                return self._prefill(event)
            case Finished():
                return self._finish(event)
            case Failed():
                return self._chunks.failed(error_body(event.error, prompt_param="prompt"))
            case _:
                assert_never(event)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return b"".join(
            self._text[choice] + _encode(text) + self._close for choice, text in enumerate(self._echo) if text
        )

    def _plain(self, event: TextDelta) -> bytes:
        text = self._text[event.choice] + _encode(event.text)
        if event.timings is None:
            return text + self._close
        return text + b',"logprobs":null' + self._open + timings_part(event.timings) + b"}\n\n"

    def _with_logprobs(self, event: TextDelta, logprobs: LegacyLogprobs) -> bytes:
        if not event.logprobs:
            return self._plain(event) if event.text else b""
        part = b',"logprobs":' + _encode(logprobs.take(event.logprobs))
        close = self._open + timings_part(event.timings) + b"}\n\n"
        return self._text[event.choice] + _encode(event.text) + part + close

    def _prefill(self, event: Started | Progress) -> bytes:
        if not self._progress or (progress := OutProgress.of(event)) is None:
            return b""
        head = self._text[event.choice] + b'"","logprobs":null' + self._open
        return head + b',"prompt_progress":' + _encode(progress) + b"}\n\n"

    def _finish(self, event: Finished) -> bytes:
        if event.choice in self._finished:
            raise IllegalEvent(f"a second end of choice {event.choice}")
        self._finished[event.choice] = event
        reason = _encode(_REASONS[event.reason])
        end = b'"","logprobs":null,"finish_reason":' + reason + b"}]" + self._chunks.usage
        chunk = self._text[event.choice] + end
        if len(self._finished) < len(self._text):
            return chunk + b"}\n\n"
        # Timings of several prompts that ran side by side would be nobody's.
        timings = first_timings(self._finished.values()) if len(self._requests) == 1 else None
        return self._chunks.last(chunk, self._usage(), timings)

    def _usage(self) -> Usage:
        """All prompts, each counted once, and all completions."""
        parts, first = [], 0
        for request in self._requests:
            of_prompt = [self._finished[choice].usage for choice in range(first, first + request.n)]
            parts.append(total_usage(of_prompt))
            first += request.n
        return summed_usage(parts)


def render(call: Call[CompletionOptions], stamp: Stamp, completion: Completion) -> bytes:
    echo = _echoes(call)
    wanted = call.requests[0].logprobs is not None
    choices = [
        OutChoice(
            text=echo[choice.index] + choice.text,
            index=choice.index,
            logprobs=LegacyLogprobs().take(choice.logprobs) if wanted else None,
            finish_reason=_REASONS[choice.reason],
        )
        for choice in completion.choices
    ]
    return answer_body(_id(stamp), "text_completion", stamp, call.requests[0].model, choices, completion)


def _echoes(call: Call[CompletionOptions]) -> list[str]:
    """What comes before the text of each choice."""
    texts = call.options.echo or ("",) * len(call.requests)
    return [text for text, request in zip(texts, call.requests, strict=True) for _ in range(request.n)]


def _id(stamp: Stamp) -> str:
    return f"cmpl-{stamp.id}"
