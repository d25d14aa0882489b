"""The event-stream parser against the format's own examples, split everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sse
from protocols.sse import ServerSentEvent, SseParser

CASES: dict[str, tuple[bytes, list[ServerSentEvent]]] = {
    "one": (b"data: a\n\n", [ServerSentEvent("a")]),
    "multi-line data": (b"data: YHOO\ndata: +2\ndata: 10\n\n", [ServerSentEvent("YHOO\n+2\n10")]),
    "named": (b"event: add\ndata: 1\n\nevent: remove\ndata: 2\n\n", [
        ServerSentEvent("1", "add"), ServerSentEvent("2", "remove"),
    ]),
    "comments": (b": test\n:\n\ndata: a\n: in between\ndata: b\n\n", [ServerSentEvent("a\nb")]),
    "empty data": (b"data\n\ndata\ndata\n\ndata:", [ServerSentEvent(""), ServerSentEvent("\n")]),
    "one space is stripped": (b"data:test\n\ndata:  test\n\n", [ServerSentEvent("test"), ServerSentEvent(" test")]),
    "CRLF": (b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n", [ServerSentEvent("a\nb"), ServerSentEvent("c")]),
    "CR": (b"data: a\r\rdata: b\r\r", [ServerSentEvent("a"), ServerSentEvent("b")]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\n", [ServerSentEvent("a"), ServerSentEvent("b")]),
    "no data, no event": (b"event: ping\n\ndata: a\n\n", [ServerSentEvent("a")]),
    "unknown fields": (b"id: 1\nretry: 10\nfoo: bar\ndata: a\n\n", [ServerSentEvent("a")]),
    "unfinished": (b"data: a\n\ndata: b\n", [ServerSentEvent("a")]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [ServerSentEvent("a")]),
    "unicode": ("data: ü日👩‍👧\u2028x\n\n".encode(), [ServerSentEvent("ü日👩‍👧\u2028x")]),
    "invalid UTF-8": (b"data: \xff\n\n", [ServerSentEvent("\ufffd")]),
    "colons in data": (b'data: {"a":"b:c"}\n\n', [ServerSentEvent('{"a":"b:c"}')]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_whole(name: str) -> None:
    raw, events = CASES[name]
    assert SseParser().feed(raw) == events


@pytest.mark.parametrize("name", CASES)
def test_one_byte_at_a_time(name: str) -> None:
    raw, events = CASES[name]
    parser = SseParser()
    assert [event for byte in raw for event in parser.feed(bytes([byte]))] == events


@given(
    st.lists(
        st.sampled_from([b"data: a", b"data: \xc3\xbc", b"event: e", b":c", b"\n", b"\r\n", b"\r", b"x"]), max_size=20
    ),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_splits_do_not_matter(pieces: list[bytes], cuts: list[int]) -> None:
    raw = b"".join(pieces)
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    parser = SseParser()
    parts = [raw[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert [event for part in parts for event in parser.feed(part)] == SseParser().feed(raw)


def test_an_event_is_there_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\r") == [ServerSentEvent("a")]


def test_what_is_written_is_what_is_read() -> None:
    raw = sse.message(b'{"a":1}') + sse.KEEPALIVE + sse.message(b"{}", b"ping") + sse.comment() + sse.DONE
    assert SseParser().feed(raw) == [
        ServerSentEvent('{"a":1}'),
        ServerSentEvent("{}", "ping"),
        ServerSentEvent("[DONE]"),
    ]
