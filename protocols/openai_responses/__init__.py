"""OpenAI Responses: `POST /v1/responses`, and what is stored of it."""

from __future__ import annotations

from typing import Final

from protocols.codec import Call, Codec, Encoder, Stamp
from protocols.collect import Completion
from protocols.errors import ServingError
from protocols.openai_errors import error_body
from protocols.openai_responses.decode import Draft, ResponsesOptions, ancestors, decode, read
from protocols.openai_responses.encode import Recorder, ResponsesEncoder, render
from protocols.openai_responses.stored import RESPONSE_PREFIX, StoredResponse, page


class _ResponsesCodec:
    name = "openai_responses"

    def decode(self, body: bytes, request_id: str) -> Call[ResponsesOptions]:
        """Where nothing is stored: a body that builds on an earlier response is a `NotFound`."""
        return decode(read(body), request_id, {})

    def encoder(self, call: Call[ResponsesOptions], stamp: Stamp) -> Encoder:
        return ResponsesEncoder(call, stamp)

    def render(self, call: Call[ResponsesOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render(call, stamp, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info, prompt_param="input")


CODEC: Final[Codec[ResponsesOptions]] = _ResponsesCodec()

__all__ = [
    "CODEC",
    "RESPONSE_PREFIX",
    "Draft",
    "Recorder",
    "ResponsesOptions",
    "StoredResponse",
    "ancestors",
    "decode",
    "page",
    "read",
]
