"""OpenAI Completions, the legacy dialect: `POST /v1/completions`."""

from __future__ import annotations

from typing import Final

from protocols.codec import Call, Codec, Encoder, Stamp
from protocols.collect import Completion
from protocols.errors import ServingError
from protocols.openai_completions.decode import CompletionOptions, decode
from protocols.openai_completions.encode import CompletionEncoder, render
from protocols.openai_errors import error_body


class _CompletionCodec:
    name = "openai_completions"

    def decode(self, body: bytes, request_id: str) -> Call[CompletionOptions]:
        return decode(body, request_id)

    def encoder(self, call: Call[CompletionOptions], stamp: Stamp) -> Encoder:
        return CompletionEncoder(call, stamp)

    def render(self, call: Call[CompletionOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render(call, stamp, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info, prompt_param="prompt")


CODEC: Final[Codec[CompletionOptions]] = _CompletionCodec()

__all__ = ["CODEC", "CompletionOptions"]
