"""Events -> output items, one open at a time. What streams show step by step, and what is stored, are built here."""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec
from msgspec import UNSET

from protocols.codec import Call, Stamp
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
    Timings,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.openai_errors import error_object
from protocols.openai_responses.conversation import seal
from protocols.openai_responses.custom_input import CustomInput
from protocols.openai_responses.decode import ResponsesOptions
from protocols.openai_responses.stored import output_item_id, response_id
from protocols.openai_responses.tools import Declared
from protocols.openai_responses.wire import (
    Head,
    ItemStatus,
    OutCustomCall,
    OutError,
    OutFunctionCall,
    OutIncomplete,
    OutItem,
    OutMessage,
    OutReasoning,
    OutReasoningText,
    OutSummaryText,
    OutText,
    OutUsage,
)
from protocols.openai_shared import NO_ARGUMENTS
from protocols.token_logprobs import OutTokenLogprob

ItemType = Literal["reasoning", "message", "function_call", "custom_tool_call"]


class Opened(msgspec.Struct, frozen=True):
    """The next item, in progress and empty."""

    item: OutItem


class Added(msgspec.Struct, frozen=True):
    """More of the open item's text, arguments or input. `timings` are those so far."""

    text: str
    logprobs: tuple[OutTokenLogprob, ...] = ()
    timings: Timings | None = None


class Closed(msgspec.Struct, frozen=True):
    """The open item as it is for good."""

    item: OutItem


Step = Opened | Added | Closed


class _OpenItem:
    def __init__(self, type_: ItemType, id_: str, call: ToolCallStarted | None, declared: Declared | None) -> None:
        self.type = type_
        self.id = id_
        self.call = call
        self.declared = declared
        self.ended = False  # a call whose arguments are complete; it stays open until it is known whether it was cut
        self.text: list[str] = []
        self.logprobs: list[OutTokenLogprob] = []
        self.custom = CustomInput() if type_ == "custom_tool_call" else None


class Output:
    """Feed every event of a stream; `items` are the closed ones. `head` is the response at any moment."""

    def __init__(self, call: Call[ResponsesOptions], stamp: Stamp) -> None:
        self._options = call.options
        self._stamp = stamp
        self._open: _OpenItem | None = None
        self.items: list[OutItem] = []

    @property
    def index(self) -> int:
        """The output index of the open item."""
        return len(self.items)

    def feed(self, event: Event) -> list[Step]:
        match event:
            case TextDelta():
                if not event.text and not event.logprobs:
                    return []
                return [*self._enter("message"), self._add(event.text, event.logprobs, event.timings)]
            case ReasoningDelta():
                return [*self._enter("reasoning"), self._add(event.text, timings=event.timings)] if event.text else []
            case ToolCallStarted():
                return [*self._close("completed"), self._begin_call(event)]
            case ToolCallDelta():
                return self._arguments(event.arguments, event.timings)
            case ToolCallEnded():
                if self._open is None:
                    raise IllegalEvent("the end of a call that is not open")
                self._open.ended = True
                return []
            case Finished():
                return self._close("incomplete" if event.reason == "length" else "completed")
            case Failed():
                return self._close("incomplete")
            case Started() | Progress():
                return []
            case _:
                assert_never(event)

    def head(self, end: Finished | ErrorInfo | None) -> Head:
        """The response in progress (None), finished or failed."""
        id_, created, items = response_id(self._stamp.id), self._stamp.created, tuple(self.items)
        match end:
            case None:
                return Head(id=id_, created_at=created, status="in_progress", output=items)
            case Finished():
                cut = end.reason == "length"
                ended = None if cut or self._stamp.ended is None else self._stamp.ended()
                return Head(
                    id=id_,
                    created_at=created,
                    status="incomplete" if cut else "completed",
                    completed_at=ended,
                    incomplete_details=OutIncomplete("max_output_tokens") if cut else None,
                    output=items,
                    usage=OutUsage.of(end.usage),
                )
            case ErrorInfo():
                return Head(id=id_, created_at=created, status="failed", error=_failure(end), output=items)
            case _:
                assert_never(end)

    def _enter(self, type_: Literal["message", "reasoning"]) -> list[Step]:
        if self._open is not None and self._open.type == type_:
            return []
        return [*self._close("completed"), self._begin(type_)]

    def _begin(self, type_: ItemType, call: ToolCallStarted | None = None, declared: Declared | None = None) -> Opened:
        item_id = output_item_id(type_, self._stamp.id, len(self.items))
        self._open = _OpenItem(type_, item_id, call, declared)
        return Opened(self._item(self._open, "in_progress"))

    def _begin_call(self, event: ToolCallStarted) -> Opened:
        declared = self._options.names.get(event.name, Declared(event.name))
        return self._begin("custom_tool_call" if declared.custom else "function_call", event, declared)

    def _add(self, text: str, logprobs: tuple[TokenLogprob, ...] = (), timings: Timings | None = None) -> Added:
        assert self._open is not None
        out = tuple(OutTokenLogprob.of(entry) for entry in logprobs)
        self._open.text.append(text)
        self._open.logprobs += out
        return Added(text, out, timings)

    def _arguments(self, piece: str, timings: Timings | None) -> list[Step]:
        if self._open is None or self._open.call is None:
            raise IllegalEvent("arguments of a call that is not open")
        text = piece if self._open.custom is None else self._open.custom.feed(piece)
        return [self._add(text, timings=timings)] if text else []

    def _close(self, status: Literal["completed", "incomplete"]) -> list[Step]:
        item = self._open
        if item is None:
            return []
        steps: list[Step] = []
        if item.custom is not None and (rest := item.custom.finish()):
            steps.append(self._add(rest))
        if item.ended and status == "incomplete":
            # The limit, or the failure, came behind this call or cut it: its arguments tell.
            status = "completed" if _whole(item) else "incomplete"
        if item.type == "function_call" and status == "completed" and not item.text:
            steps.append(self._add(NO_ARGUMENTS))
        closed = self._item(item, status)
        self.items.append(closed)
        self._open = None
        return [*steps, Closed(closed)]

    def _item(self, item: _OpenItem, status: ItemStatus) -> OutItem:
        text = "".join(item.text)
        shown = status != "in_progress"  # an item that has just been opened has no parts yet
        match item.type:
            case "reasoning":
                return OutReasoning(
                    id=item.id,
                    status=status,
                    summary=(OutSummaryText(text),) if shown and self._options.summary else (),
                    content=(OutReasoningText(text),) if shown else (),
                    encrypted_content=seal(text) if shown and self._options.sealed else None,
                )
            case "message":
                content = (OutText(text, tuple(item.logprobs)),) if shown else ()
                return OutMessage(id=item.id, status=status, content=content)
            case "function_call" | "custom_tool_call":
                assert item.call is not None and item.declared is not None
                name, namespace = item.declared.name, item.declared.namespace or UNSET
                if item.type == "function_call":
                    return OutFunctionCall(
                        id=item.id,
                        status=status,
                        call_id=item.call.id,
                        name=name,
                        namespace=namespace,
                        arguments=text,
                    )
                return OutCustomCall(
                    id=item.id, status=status, call_id=item.call.id, name=name, namespace=namespace, input=text
                )
            case _:
                assert_never(item.type)


def _whole(item: _OpenItem) -> bool:
    if item.custom is not None:
        return item.custom.closed
    try:
        msgspec.json.decode("".join(item.text) or NO_ARGUMENTS)
    except msgspec.DecodeError:
        return False
    return True


_FAILURES = {
    # "`response.failed` with code context_length_exceeded" is what makes Codex compact instead of trying again.
    "context_overflow": "context_length_exceeded",
    "invalid_request": "invalid_prompt",
    "overloaded": "rate_limit_exceeded",
}


def _failure(error: ErrorInfo) -> OutError:
    return OutError(
        _FAILURES.get(error.kind, "server_error"), str(error_object(error, prompt_param="input")["message"])
    )
