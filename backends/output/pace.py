"""What an answer's time decides: where it is cut off for taking too long, and how long its pieces took."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocols.events import Event, ReasoningDelta, TextDelta, Timings, ToolCallDelta


def is_late(events: Sequence[Event], elapsed_ms: float, limit_ms: float | None) -> bool:
    """Whether a new line came after the time there was. Code is cut off between its lines."""
    if limit_ms is None or limit_ms <= 0 or elapsed_ms <= limit_ms:
        return False
    return any(isinstance(event, TextDelta) and "\n" in event.text for event in events)


def timed(event: Event, timings: Timings) -> Event:
    """`event`, with the `timings` so far if it has a place for them."""
    if not isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
        return event
    return msgspec.structs.replace(event, timings=timings)
