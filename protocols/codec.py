"""What a dialect provides. `http.py` speaks to all of them through these two interfaces and knows none by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from protocols.calls import AnswerT, Question
from protocols.collect import Completion
from protocols.errors import ServingError
from protocols.events import Event, Frame
from protocols.request import Request

OptionsT = TypeVar("OptionsT")


class Stamp(msgspec.Struct, frozen=True):
    """What a dialect may not make up itself: the answer's bare id (no prefix) and its Unix times in seconds.

    `ended` is asked once the answer is complete, and says the same whenever it is asked again.
    """

    id: str
    created: int
    ended: Callable[[], int] | None = None


class Call(msgspec.Struct, Generic[OptionsT], frozen=True):
    """A decoded body: its requests, whether the answer is streamed, and what only this dialect's encoder needs.

    Where a body holds several prompts there is a request for each, and the choices of all of them are counted through:
    those of the second follow those of the first.

    `keepalive_s`: the silence, in seconds, after which a stream is to show a sign of life; None leaves it to the
    operator, infinity is never.
    """

    requests: tuple[Request, ...]
    stream: bool
    options: OptionsT  # a request whose `model` is "" goes to the only one there is
    keepalive_s: float | None = None

    @property
    def request(self) -> Request:
        """The only request of a dialect that has one prompt."""
        (request,) = self.requests
        return request


class Encoder(Protocol):
    """Events of one stream -> wire bytes of one stream."""

    def feed(self, event: Event) -> bytes:
        """The bytes to send for `event`, possibly none. `Failed` becomes the dialect's own error event."""

    def keepalive(self) -> bytes:
        """Bytes that every client of this dialect ignores, legal at any point of the stream."""


def frame_feed(encoder: Encoder) -> Callable[[Frame], bytes]:
    """Frames of one stream -> wire bytes of one stream.

    An encoder that wants more of a frame than its events, the tokens behind them, has a `feed_frame`.
    """
    feed_frame: Callable[[Frame], bytes] | None = getattr(encoder, "feed_frame", None)
    if feed_frame is not None:
        return feed_frame
    feed = encoder.feed

    def feed_events(frame: Frame) -> bytes:
        events = frame.events
        return feed(events[0]) if len(events) == 1 else b"".join(map(feed, events))

    return feed_events


class Ask(msgspec.Struct, Generic[AnswerT], frozen=True):
    """A decoded body that asks a model one question: the question, and the body of its answer.

    `render` also takes the model's id, which the question may have left open.
    """

    question: Question[AnswerT]
    render: Callable[[AnswerT, str], bytes]


Reader = Callable[[bytes, str], Ask[Any]]
"""Body and request id -> `Ask`. Raises `InvalidRequest`. A question whose `model` is "" goes to the only one."""


class Codec(Protocol[OptionsT]):
    name: str

    def decode(self, body: bytes, request_id: str) -> Call[OptionsT]:
        """Raises `InvalidRequest` whose message and `param` name the offending JSON path."""

    def encoder(self, call: Call[OptionsT], stamp: Stamp) -> Encoder: ...

    def render(self, call: Call[OptionsT], stamp: Stamp, completion: Completion) -> bytes:
        """The body of a non-streamed answer."""

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        """The body of an error answer; its status is the error's own."""
