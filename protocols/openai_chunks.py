"""What stands around the choices of a chunk in OpenAI's two completion dialects, and how their streams end."""

from __future__ import annotations

import msgspec

from protocols import sse
from protocols.codec import Stamp
from protocols.events import IllegalEvent, Timings, Usage
from protocols.llamacpp_extras import OutTimings
from protocols.openai_shared import FINGERPRINT, OutUsage

_encode = msgspec.json.Encoder().encode


def timings_part(timings: Timings | None) -> bytes:
    """What a chunk that has `timings` has behind its choices."""
    return b"" if timings is None else b',"timings":' + _encode(OutTimings.of(timings))


class Chunks:
    """`head` begins every chunk of a stream and `usage` ends its choices; the rest is what happens once.

    "include_usage → all other chunks carry `usage:null`"
    """

    def __init__(self, id: str, object: str, stamp: Stamp, model: str, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._ended = False
        self.usage = b',"usage":null' if include_usage else b""
        self.head = (
            b'data: {"id":' + _encode(id) + b',"object":' + _encode(object)
            + b',"created":' + _encode(stamp.created) + b',"model":' + _encode(model)
            + b',"system_fingerprint":' + _encode(FINGERPRINT) + b',"choices":['
        )  # fmt: skip

    def last(self, chunk: bytes, usage: Usage, timings: Timings | None) -> bytes:
        """The end of a stream whose last choice ends with `chunk`, which is not closed yet."""
        self._end()
        extra = timings_part(timings)
        if not self._include_usage:
            return chunk + extra + b"}\n\n" + sse.DONE
        totals = _encode(OutUsage.of(usage))
        return chunk + b"}\n\n" + self.head + b'],"usage":' + totals + extra + b"}\n\n" + sse.DONE

    def failed(self, error: bytes) -> bytes:
        """`error` is the body of an answer that had failed before it began."""
        self._end()
        return sse.message(error) + sse.DONE

    def _end(self) -> None:
        if self._ended:
            raise IllegalEvent("a second end of the stream")
        self._ended = True
