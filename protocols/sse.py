"""Server-sent events: bytes out, and an incremental parser in.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import codecs

import msgspec

CONTENT_TYPE = "text/event-stream; charset=utf-8"


def message(data: bytes, event: bytes | None = None) -> bytes:
    """One event. `data` must hold no line break (JSON text never does)."""
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event + b"\ndata: " + data + b"\n\n"


def comment(text: bytes = b"") -> bytes:
    """ "If the line starts with a U+003A COLON character (:), ignore the line": a keep-alive for every client."""
    return b":" + text + b"\n\n"


DONE = message(b"[DONE]")
KEEPALIVE = comment(b" keep-alive")


class ServerSentEvent(msgspec.Struct, frozen=True):
    data: str
    event: str = "message"


class SseParser:
    """Feed bytes as they come, split anywhere; get the events they complete."""

    def __init__(self) -> None:
        # -sig: the format's UTF-8 decoding "strips one leading UTF-8 Byte Order Mark (BOM), if any".
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._tail = ""
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        text = self._decode(chunk)
        if not text:
            return []
        # "a U+000D CARRIAGE RETURN U+000A LINE FEED (CRLF) character pair" is one line end, also where chunks part it.
        if self._after_cr and text[0] == "\n":
            text = text[1:]
        self._after_cr = text.endswith("\r")
        lines = (self._tail + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._tail = lines.pop()
        events = []
        for line in lines:
            if line:
                self._field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value

    def _dispatch(self) -> ServerSentEvent | None:
        data, name = self._data, self._event
        self._data, self._event = [], ""
        # "If the data buffer is an empty string, set the data buffer and the event type buffer to the empty string and
        # return." Every `data` field adds a line feed to that buffer, so one empty field is enough to dispatch.
        return ServerSentEvent("\n".join(data), name or "message") if data else None
