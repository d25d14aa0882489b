"""OpenAI Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Final

from protocols.codec import Call, Codec, Encoder, Stamp
from protocols.collect import Completion
from protocols.errors import ServingError
from protocols.openai_chat.decode import ChatOptions, decode
from protocols.openai_chat.encode import ChatEncoder, render
from protocols.openai_errors import error_body


class _ChatCodec:
    name = "openai_chat"

    def decode(self, body: bytes, request_id: str) -> Call[ChatOptions]:
        return decode(body, request_id)

    def encoder(self, call: Call[ChatOptions], stamp: Stamp) -> Encoder:
        return ChatEncoder(call, stamp)

    def render(self, call: Call[ChatOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render(call, stamp, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info, prompt_param="messages")


CODEC: Final[Codec[ChatOptions]] = _ChatCodec()

__all__ = ["CODEC", "ChatOptions"]
