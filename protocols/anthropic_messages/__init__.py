"""Anthropic Messages: `POST /v1/messages`, `POST /v1/messages/count_tokens`, `GET /v1/models`."""

from __future__ import annotations

from typing import Final

import msgspec

from protocols.anthropic_messages.decode import MessagesOptions, decode
from protocols.anthropic_messages.encode import MessagesEncoder, render
from protocols.anthropic_messages.errors import error_body, status
from protocols.anthropic_messages.models import model_body, model_page
from protocols.anthropic_messages.version import STRICT_SINCE
from protocols.codec import Call, Codec, Encoder, Stamp
from protocols.collect import Completion
from protocols.errors import ServingError


class _MessagesCodec:
    name = "anthropic_messages"

    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def decode(self, body: bytes, request_id: str) -> Call[MessagesOptions]:
        return decode(body, request_id, strict=self._strict)

    def encoder(self, call: Call[MessagesOptions], stamp: Stamp) -> Encoder:
        return MessagesEncoder(call, stamp)

    def render(self, call: Call[MessagesOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render(call, stamp, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info, request_id)


CODEC: Final[Codec[MessagesOptions]] = _MessagesCodec(strict=False)
_STRICT: Final[Codec[MessagesOptions]] = _MessagesCodec(strict=True)


def strict_codec(version: str) -> Codec[MessagesOptions]:
    """The codec that refuses what `version`, the value of the header `anthropic-version`, refuses."""
    return _STRICT if version >= STRICT_SINCE else CODEC


def token_count(tokens: int) -> bytes:
    """The body of `count_tokens`."""
    return msgspec.json.encode({"input_tokens": tokens})


__all__ = ["CODEC", "MessagesOptions", "model_body", "model_page", "status", "strict_codec", "token_count"]
