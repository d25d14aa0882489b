"""Events -> chunks, and `Completion` -> body."""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import UNSET

from protocols import sse
from protocols.codec import Call, Stamp
from protocols.collect import Completion, summed_usage, total_usage
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
from protocols.llamacpp_extras import OutProgress, OutTimings
from protocols.openai_completions.decode import CompletionOptions
from protocols.openai_completions.logprobs import LegacyLogprobs
from protocols.openai_completions.wire import FinishWord, OutChoice, OutCompletion
from protocols.openai_errors import error_body
from protocols.openai_shared import FINGERPRINT, OutUsage

_REASONS: dict[FinishReason, FinishWord] = {"stop": "stop", "length": "length", "tool_calls": "stop"}
""" "finish ∈ stop/length/content_filter (never tool_calls)" """

_encode = msgspec.json.Encoder().encode


class CompletionEncoder:
    """All that is constant in a stream's chunks is encoded once; a delta costs the encoding of its own text.

    Where there are several prompts, each has a `Started` of its own, in any order.
    """

    def __init__(self, call: Call[CompletionOptions], stamp: Stamp) -> None:
        self._requests = call.requests
        self._include_usage = call.options.include_usage
        self._progress = call.options.progress
        self._echo = _echoes(call)
        head = (
            b'data: {"id":' + _encode(_id(stamp)) + b',"object":"text_completion","created":'
            + _encode(stamp.created) + b',"model":' + _encode(call.requests[0].model)
            + b',"system_fingerprint":' + _encode(FINGERPRINT) + b',"choices":['
        )  # fmt: skip
        self._usage = b',"usage":null' if self._include_usage else b""
        self._head = head
        n = sum(request.n for request in call.requests)
        self._text = [head + b'{"index":%d,"text":' % choice for choice in range(n)]
        self._open = b',"finish_reason":null}]' + self._usage
        self._close = b',"logprobs":null' + self._open + b"}\n\n"
        wanted = call.requests[0].logprobs is not None
        self._logprobs = [LegacyLogprobs() for _ in range(n)] if wanted else None
        self._started = False
        self._finished: dict[int, Finished] = {}
        self._done = False

    def feed(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                if self._logprobs is not None:
                    return self._with_logprobs(event, self._logprobs[event.choice])
                return self._text[event.choice] + _encode(event.text) + self._close if event.text else b""
            case ReasoningDelta() | ToolCallStarted() | ToolCallDelta() | ToolCallEnded():
                return b""  # text is all that this dialect knows, here as in a body
            case Started():
                return self._start()
            case Progress():
                return self._prefill(event) if self._progress else b""
            case Finished():
                return self._finish(event)
            case Failed():
                self._end()
                return sse.message(error_body(event.error, prompt_param="prompt")) + sse.DONE
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

    def _with_logprobs(self, event: TextDelta, logprobs: LegacyLogprobs) -> bytes:
        if not event.logprobs:
            return self._text[event.choice] + _encode(event.text) + self._close if event.text else b""
        part = b',"logprobs":' + _encode(logprobs.take(event.logprobs))
        return self._text[event.choice] + _encode(event.text) + part + self._open + b"}\n\n"

    def _prefill(self, event: Progress) -> bytes:
        progress = _encode(OutProgress.of(event))
        return (
            self._text[event.choice] + b'"","logprobs":null' + self._open + b',"prompt_progress":' + progress + b"}\n\n"
        )

    def _finish(self, event: Finished) -> bytes:
        if event.choice in self._finished:
            raise IllegalEvent(f"a second end of choice {event.choice}")
        self._finished[event.choice] = event
        last = len(self._finished) == len(self._text)
        if last:
            self._end()
        reason = _encode(_REASONS[event.reason])
        chunk = self._text[event.choice] + b'"","logprobs":null,"finish_reason":' + reason + b"}]" + self._usage
        if not last:
            return chunk + b"}\n\n"
        timings = self._timings()
        if not self._include_usage:
            return chunk + timings + b"}\n\n" + sse.DONE
        usage = _encode(self._total())
        return chunk + b"}\n\n" + self._head + b'],"usage":' + usage + timings + b"}\n\n" + sse.DONE

    def _total(self) -> OutUsage:
        parts, first = [], 0
        for request in self._requests:
            of_prompt = [self._finished[choice].usage for choice in range(first, first + request.n)]
            parts.append(total_usage(of_prompt))
            first += request.n
        return OutUsage.of(summed_usage(parts))

    def _timings(self) -> bytes:
        """Those of a single prompt: of several that ran side by side they would be nobody's."""
        ends = sorted(self._finished.items())
        first: Timings | None = next((end.timings for _, end in ends if end.timings is not None), None)
        if first is None or len(self._requests) > 1:
            return b""
        return b',"timings":' + _encode(OutTimings.of(first))

    def _end(self) -> None:
        if self._done:
            raise IllegalEvent("a second end of the stream")
        self._done = True


def render(call: Call[CompletionOptions], stamp: Stamp, completion: Completion) -> bytes:
    echo = _echoes(call)
    wanted = call.requests[0].logprobs is not None
    return _encode(
        OutCompletion(
            id=_id(stamp),
            created=stamp.created,
            model=call.requests[0].model,
            system_fingerprint=FINGERPRINT,
            choices=tuple(
                OutChoice(
                    text=echo[choice.index] + choice.text,
                    index=choice.index,
                    logprobs=LegacyLogprobs().take(choice.logprobs) if wanted else None,
                    finish_reason=_REASONS[choice.reason],
                )
                for choice in completion.choices
            ),
            usage=OutUsage.of(completion.usage),
            timings=UNSET if completion.timings is None else OutTimings.of(completion.timings),
        )
    )


def _echoes(call: Call[CompletionOptions]) -> list[str]:
    """What comes before the text of each choice."""
    texts = call.options.echo or ("",) * len(call.requests)
    return [text for text, request in zip(texts, call.requests, strict=True) for _ in range(request.n)]


def _id(stamp: Stamp) -> str:
    return f"cmpl-{stamp.id}"
