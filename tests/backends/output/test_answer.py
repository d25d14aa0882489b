"""What an engine's tokens come to, and where an answer ends, whatever engine draws them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backends.output.answer import Answer, Budget
from backends.output.assembler import Assembler
from protocols.events import Event, Finished, TextDelta, Timings

END = 0


class Letters(Answer):
    """Tokens are characters. A clock that stands still until it is moved."""

    def __init__(self, budget: Budget, resume: Sequence[int] = (), stop: tuple[str, ...] = ()) -> None:
        self.clock = 0.0
        super().__init__(
            Assembler(stop),
            lambda token: chr(token).encode(),
            budget,
            lambda: self.clock,
            choice=0,
            prompt_tokens=7,
            resume=resume,
            end_tokens=frozenset({END}),
            with_timings=False,
        )

    def draw(self, text: str) -> tuple[Event, ...]:
        frame = self._frame((ord(char), None) for char in text)
        self.taken = frame.tokens
        return frame.events

    def _timings(self) -> Timings:
        return Timings(0, self._prompt_tokens, 0.0, self._answered - self._resumed, self._elapsed_ms)


def said(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finished(events: Sequence[Event]) -> Finished:
    (end,) = [event for event in events if isinstance(event, Finished)]
    return end


@pytest.mark.parametrize(("budget", "truncated"), [(Budget(9, 3), False), (Budget(3), True), (Budget(3, 9), True)])
def test_the_budget_ends_an_answer(budget: Budget, truncated: bool) -> None:
    answer = Letters(budget)
    assert not any(isinstance(event, Finished) for event in answer.draw("ab"))
    events = answer.draw("cd")
    assert (said(events), answer.taken) == ("c", (ord("c"),)), "what was drawn behind the end is left out"
    end = finished(events)
    assert (end.reason, end.truncated) == ("length", truncated)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (7, 3)


def test_an_end_token_ends_it_and_has_no_text() -> None:
    answer = Letters(Budget(9))
    events = answer.draw("ab\0c")
    assert said(events) == "ab"
    assert (finished(events).reason, finished(events).usage.completion_tokens) == ("stop", 3)


def test_what_is_resumed_counts_and_is_not_said() -> None:
    answer = Letters(Budget(9, 4), resume=[ord("a"), ord("b")], stop=("bc",))
    assert answer.answered == 2
    events = answer.draw("cd")
    assert said(events) == "", "the stop string began in what was resumed"
    end = finished(events)
    assert (end.stop_sequence, end.usage.completion_tokens) == ("bc", 3)
    assert end.timings is not None
    assert end.timings.predicted_n == 1


@pytest.mark.parametrize(("resume", "reason"), [("ab", "length"), ("a\0b", "stop")])
def test_what_is_resumed_may_be_complete(resume: str, reason: str) -> None:
    answer = Letters(Budget(2), resume=[ord(char) for char in resume])
    assert answer.reason == reason
    assert finished(answer.end("stop").events).reason == reason


def test_a_late_answer_ends_with_its_line() -> None:
    answer = Letters(Budget(99, max_predict_ms=10))
    assert said(answer.draw("a\nb")) == "a\nb"
    answer.clock = 0.02
    assert finished(answer.draw("c\nd")).reason == "length"
