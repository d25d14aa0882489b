"""What the tests of OpenAI's two completion dialects share."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.sse import SseParser


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of all chunks, of a stream that ends as it must."""
    events = SseParser().feed(raw)
    assert [event.data for event in events].count("[DONE]") == 1
    assert events[-1].data == "[DONE]"
    return [msgspec.json.decode(event.data) for event in events[:-1]]


def check_numbers(parts: list[dict[str, Any]], whole: dict[str, Any], include_usage: bool) -> None:
    """Usage and timings of a stream are those of the body, and in the last chunk only."""
    if include_usage:
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"] == whole["usage"]
        assert all(part["usage"] is None for part in parts[:-1])
    else:
        assert not any("usage" in part for part in parts)
    assert parts[-1].get("timings") == whole.get("timings")
    assert not any("timings" in part for part in parts[:-1])
