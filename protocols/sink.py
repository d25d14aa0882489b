"""The short way of a frame: from where it arrives to where it is written, without waking who reads its stream.

Waking a task for every token costs more than what the task then does. So whoever reads a stream may hand down a `Sink`
with the request. While the reader waits for its next frame, one of the middle of the answer may be given to the sink in
its stead, by the code that has just got it. The order stays: what the sink does not take, and all that comes while the
reader is busy, are frames of the stream. Beginnings and ends always are.
"""

from __future__ import annotations

from collections.abc import Callable

from protocols.events import Frame, ReasoningDelta, TextDelta, ToolCallDelta

Sink = Callable[[Frame], bool]
"""Takes a frame at once, or says that it cannot. What it raises, its stream raises."""

_PIECES = frozenset({TextDelta, ReasoningDelta, ToolCallDelta})


def is_middle(frame: Frame) -> bool:
    """Whether it is one more piece of an answer, as nearly all frames are: it neither begins nor ends anything."""
    events = frame.events
    return len(events) == 1 and type(events[0]) in _PIECES


class _Watched:
    __slots__ = ("_sink", "_watch")

    def __init__(self, sink: Sink, watch: Callable[[Frame], object]) -> None:
        self._sink = sink
        self._watch = watch

    def take(self, frame: Frame) -> bool:
        if not self._sink(frame):
            return False
        self._watch(frame)
        return True


def watched(sink: Sink | None, watch: Callable[[Frame], object]) -> Sink | None:
    """`sink`, and `watch` is told of what it took: whoever looks at a stream's frames has to hand on such a one."""
    return None if sink is None else _Watched(sink, watch).take
