"""Non-streaming is a fold of streaming: `Collector` turns a stream's events into one `Completion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec

from protocols.errors import ServingError
from protocols.events import (
    Event,
    EventOrder,
    Failed,
    Finished,
    FinishReason,
    Frame,
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
    Usage,
)
from protocols.request import ToolCall


class Choice(msgspec.Struct, frozen=True):
    """One finished alternative. `text` and `reasoning` are complete; `tool_calls` in order of their index."""

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop_sequence: str | None
    tokens: tuple[int, ...] = ()  # of frames only: events do not carry them
    started: Started | None = None
    finished: Finished | None = None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. `usage` counts the prompt once and the completion tokens of all choices."""

    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings | None


def total_usage(parts: list[Usage]) -> Usage:
    """The usage of a request with several choices: one prompt, all completions."""
    return Usage(
        prompt_tokens=max(u.prompt_tokens for u in parts),
        completion_tokens=sum(u.completion_tokens for u in parts),
        cached_tokens=max(u.cached_tokens for u in parts),
        reasoning_tokens=sum(u.reasoning_tokens for u in parts),
    )


def summed_usage(parts: Sequence[Usage]) -> Usage:
    """The usage of several requests that were one call: all prompts, all completions."""
    return Usage(
        prompt_tokens=sum(u.prompt_tokens for u in parts),
        completion_tokens=sum(u.completion_tokens for u in parts),
        cached_tokens=sum(u.cached_tokens for u in parts),
        reasoning_tokens=sum(u.reasoning_tokens for u in parts),
    )


def first_timings(ends: Iterable[Finished]) -> Timings | None:
    """Those of the lowest choice that has any."""
    return next((end.timings for end in sorted(ends, key=lambda end: end.choice) if end.timings is not None), None)


class _OpenChoice:
    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[tuple[ToolCallStarted, list[str]]] = []
        self.tokens: list[int] = []
        self.finished: Finished | None = None


class Collector:
    """Feed every event of a stream, then `result()`. Raises `IllegalEvent` on a broken order, the error on `Failed`."""

    def __init__(self, n: int = 1) -> None:
        self._order = EventOrder(n)
        self._choices = [_OpenChoice() for _ in range(n)]
        self._started: Started | None = None

    @property
    def done(self) -> bool:
        return self._order.done

    def add_tokens(self, tokens: Sequence[int], choice: int) -> None:
        self._choices[choice].tokens.extend(tokens)

    def feed(self, event: Event) -> None:
        self._order.feed(event)
        choice = self._choices[event.choice]
        match event:
            case Started():
                self._started = event
            case Progress() | ToolCallEnded():
                pass
            case ReasoningDelta():
                choice.reasoning.append(event.text)
            case TextDelta():
                choice.text.append(event.text)
                choice.logprobs.extend(event.logprobs)
            case ToolCallStarted():
                choice.calls.append((event, []))
            case ToolCallDelta():
                choice.calls[-1][1].append(event.arguments)
            case Finished():
                choice.finished = event
            case Failed():
                raise ServingError.from_info(event.error)
            case _:
                assert_never(event)

    def result(self) -> Completion:
        choices: list[Choice] = []
        ends: list[Finished] = []
        for index, choice in enumerate(self._choices):
            end = choice.finished
            if end is None:
                raise IllegalEvent(f"the stream ended before choice {index} finished")
            ends.append(end)
            choices.append(
                Choice(
                    index=index,
                    text="".join(choice.text),
                    reasoning="".join(choice.reasoning),
                    tool_calls=tuple(ToolCall(s.id, s.name, "".join(a)) for s, a in choice.calls),
                    logprobs=tuple(choice.logprobs),
                    reason=end.reason,
                    stop_sequence=end.stop_sequence,
                    tokens=tuple(choice.tokens),
                    started=self._started,
                    finished=end,
                )
            )
        return Completion(tuple(choices), total_usage([end.usage for end in ends]), first_timings(ends))


class BatchCollector:
    """The same for a call of several requests, whose choices are counted through; `counts` is how many each has."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._parts = [Collector(n) for n in counts]
        self._of_choice = [(part, n) for part, count in zip(self._parts, counts, strict=True) for n in range(count)]

    def feed(self, event: Event) -> None:
        part, choice = self._of_choice[event.choice]
        part.feed(event if choice == event.choice else msgspec.structs.replace(event, choice=choice))

    def feed_frame(self, frame: Frame) -> None:
        for event in frame.events:
            self.feed(event)
        part, choice = self._of_choice[frame.choice]
        part.add_tokens(frame.tokens, choice)

    def result(self) -> Completion:
        """Without timings where there are several requests: they ran side by side."""
        parts = [part.result() for part in self._parts]
        if len(parts) == 1:
            return parts[0]
        choices = [choice for part in parts for choice in part.choices]
        return Completion(
            tuple(msgspec.structs.replace(choice, index=index) for index, choice in enumerate(choices)),
            summed_usage([part.usage for part in parts]),
            None,
        )
