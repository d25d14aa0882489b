"""Events -> stream, `Completion` -> body, and what of both is stored."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_never

import msgspec

from protocols import sse
from protocols.codec import Call, Stamp
from protocols.collect import Collector, Completion
from protocols.errors import ErrorInfo
from protocols.events import (
    Event,
    Failed,
    Finished,
    IllegalEvent,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.llamacpp_extras import OutProgress, OutTimings
from protocols.openai_errors import error_object
from protocols.openai_responses.decode import ResponsesOptions
from protocols.openai_responses.output import Added, Closed, Opened, Output, Step
from protocols.openai_responses.stored import StoredResponse, listed, response_id
from protocols.openai_responses.wire import (
    Head,
    OutCustomCall,
    OutFunctionCall,
    OutItem,
    OutMessage,
    OutReasoning,
    OutReasoningText,
    OutSummaryText,
    OutText,
)

_encode = msgspec.json.Encoder().encode

_TERMINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}


class _Delta(NamedTuple):
    """A delta event around its sequence number and text."""

    head: bytes
    middle: bytes
    logprobs: bool

    @classmethod
    def of(cls, type_: str, place: dict[str, Any], logprobs: bool = False) -> _Delta:
        name = type_.encode()
        head = b"event: " + name + b'\ndata: {"type":"' + name + b'","sequence_number":'
        return cls(head, b"," + _encode(place)[1:-1] + b',"delta":', logprobs)


class ResponsesEncoder:
    """What is constant in the deltas of an item is encoded once, when it opens; a delta costs its own text."""

    def __init__(self, call: Call[ResponsesOptions], stamp: Stamp) -> None:
        self._output = Output(call, stamp)
        self._summary = call.options.summary
        self._progress = call.request.extras.progress
        self._echo = _encode(call.options.echo)
        self._sequence = 0
        self._started = False
        self._done = False
        self._index = 0  # of the open item, or of the next one
        self._deltas: list[_Delta] = []  # of the open item: one, or two for reasoning that is its own summary

    def feed(self, event: Event) -> bytes:
        if self._done or self._started == isinstance(event, Started) and not isinstance(event, Failed):
            raise IllegalEvent(f"{type(event).__name__} before or after the stream, or a second Started")
        match event:
            case Started():
                return self._start() + self._prefill(event)
            case Finished():
                self._done = True
                closed = self._steps(event)
                head = self._output.head(event)
                extra = {} if event.timings is None else {"timings": OutTimings.of(event.timings)}
                return closed + self._lifecycle(_TERMINAL[head.status], head, **extra)
            case Progress():
                return self._prefill(event)
            case Failed():
                self._done = True
                # Readers take `response.created` for granted, also where nothing came before the failure.
                start = b"" if self._started else self._start()
                return start + self._steps(event) + self._fail(event.error)
            case _:
                return self._steps(event)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def _start(self) -> bytes:
        # "Tie them to a per-stream flag": a first token that is half a character must not lose the start events.
        self._started = True
        head = self._output.head(None)
        return self._lifecycle("response.created", head) + self._lifecycle("response.in_progress", head)

    def _prefill(self, event: Started | Progress) -> bytes:
        """ "comments by default, progress chunks on `return_progress`" """
        if not self._progress or (progress := OutProgress.of(event)) is None:
            return b""
        return self._lifecycle("response.in_progress", self._output.head(None), prompt_progress=progress)

    def _lifecycle(self, type_: str, head: Head, **extra: OutProgress | OutTimings) -> bytes:
        return self._event(type_, response=msgspec.Raw(_body(head, self._echo)), **extra)

    def _fail(self, error: ErrorInfo) -> bytes:
        words = error_object(error, prompt_param="input")
        event = self._event(
            "error", code=words["code"] or words["type"], message=words["message"], param=words["param"]
        )
        return event + self._lifecycle("response.failed", self._output.head(error))

    def _event(self, type_: str, **fields: Any) -> bytes:
        data = _encode({"type": type_, "sequence_number": self._next(), **fields})
        return sse.message(data, event=type_.encode())

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    # --- items ---

    def _steps(self, event: Event) -> bytes:
        return b"".join([chunk for step in self._output.feed(event) for chunk in self._step(step)])

    def _step(self, step: Step) -> list[bytes]:
        match step:
            case Added():
                return [self._delta(delta, step) for delta in self._deltas]
            case Opened(item):
                return self._opened(item)
            case Closed(item):
                return self._closed(item)
            case _:
                assert_never(step)

    def _delta(self, delta: _Delta, step: Added) -> bytes:
        logprobs = b',"logprobs":' + _encode(step.logprobs) if delta.logprobs else b""
        timings = b"" if step.timings is None else b',"timings":' + _encode(OutTimings.of(step.timings))
        text = _encode(step.text)
        return b"".join((delta.head, b"%d" % self._next(), delta.middle, text, logprobs, timings, b"}\n\n"))

    def _opened(self, item: OutItem) -> list[bytes]:
        place = {"item_id": item.id, "output_index": self._index}
        part, summary = {**place, "content_index": 0}, {**place, "summary_index": 0}
        events = [self._event("response.output_item.added", output_index=self._index, item=item)]
        match item:
            case OutMessage():
                events.append(self._event("response.content_part.added", **part, part=OutText("")))
                self._deltas = [_Delta.of("response.output_text.delta", part, logprobs=True)]
            case OutReasoning():
                events.append(self._event("response.content_part.added", **part, part=OutReasoningText("")))
                self._deltas = [_Delta.of("response.reasoning_text.delta", part)]
                if self._summary:
                    added = self._event("response.reasoning_summary_part.added", **summary, part=OutSummaryText(""))
                    events.append(added)
                    self._deltas.append(_Delta.of("response.reasoning_summary_text.delta", summary))
            case OutFunctionCall():
                self._deltas = [_Delta.of("response.function_call_arguments.delta", place)]
            case OutCustomCall():
                self._deltas = [_Delta.of("response.custom_tool_call_input.delta", place)]
            case _:
                assert_never(item)
        return events

    def _closed(self, item: OutItem) -> list[bytes]:
        place = {"item_id": item.id, "output_index": self._index}
        part, summary = {**place, "content_index": 0}, {**place, "summary_index": 0}
        events: list[bytes] = []
        match item:
            case OutMessage(content=(text,)):
                done = self._event("response.output_text.done", **part, text=text.text, logprobs=text.logprobs)
                events += [done, self._event("response.content_part.done", **part, part=text)]
            case OutReasoning(content=(raw,)):
                events.append(self._event("response.reasoning_text.done", **part, text=raw.text))
                events.append(self._event("response.content_part.done", **part, part=raw))
                for short in item.summary:
                    events.append(self._event("response.reasoning_summary_text.done", **summary, text=short.text))
                    events.append(self._event("response.reasoning_summary_part.done", **summary, part=short))
            case OutFunctionCall():
                whole = {"name": item.name, "arguments": item.arguments}
                events.append(self._event("response.function_call_arguments.done", **place, **whole))
            case OutCustomCall():
                events.append(self._event("response.custom_tool_call_input.done", **place, input=item.input))
            case _:
                raise AssertionError(f"closed without its part: {item}")
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self._index += 1
        return events


def _body(head: Head, echo: bytes) -> bytes:
    return _encode(head)[:-1] + b"," + echo[1:]


def render(call: Call[ResponsesOptions], stamp: Stamp, completion: Completion) -> bytes:
    """Reasoning, text and calls in this order, as a `Completion` has them."""
    (choice,) = completion.choices
    output = Output(call, stamp)
    output.feed(ReasoningDelta(choice.reasoning))
    output.feed(TextDelta(choice.text, choice.logprobs))
    for index, made in enumerate(choice.tool_calls):
        output.feed(ToolCallStarted(index, made.id, made.name))
        output.feed(ToolCallDelta(index, made.arguments))
        output.feed(ToolCallEnded(index))
    end = Finished(choice.reason, completion.usage)
    output.feed(end)
    head = output.head(end)
    if completion.timings is not None:
        head = msgspec.structs.replace(head, timings=OutTimings.of(completion.timings))
    return _body(head, _encode(call.options.echo))


class Recorder:
    """Feed every event of a generation; `record` is what is to be stored of it, once it has ended.

    It is the response exactly as the client gets it, streamed or whole.
    """

    def __init__(self, call: Call[ResponsesOptions], stamp: Stamp, owner: str = "") -> None:
        self._call = call
        self._stamp = stamp
        self._owner = owner
        self._output = Output(call, stamp)
        self._collector = None if call.stream else Collector()
        self.record: StoredResponse | None = None

    def feed(self, event: Event) -> None:
        if self._collector is not None:
            self._collector.feed(event)
            if self._collector.done:
                self._keep(render(self._call, self._stamp, self._collector.result()))
            return
        self._output.feed(event)
        if isinstance(event, Finished | Failed):
            head = self._output.head(event if isinstance(event, Finished) else event.error)
            self._keep(_body(head, _encode(self._call.options.echo)))

    def _keep(self, body: bytes) -> None:
        options = self._call.options
        own = listed(options.input, self._stamp.id)
        id = response_id(self._stamp.id)
        self.record = StoredResponse(id, msgspec.Raw(body), own, options.ancestors, self._owner)
