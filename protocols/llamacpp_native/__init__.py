"""llama.cpp's own routes: `/completion`, `/infill`, un-prefixed `/chat/completions`, and its one-answer questions."""

from __future__ import annotations

from typing import Final

from protocols.codec import Call, Codec, Encoder, Stamp
from protocols.collect import Completion
from protocols.errors import ServingError
from protocols.llamacpp_native.chat import NativeChatEncoder, decode_chat, render_chat
from protocols.llamacpp_native.decode import NativeOptions, decode_completion, decode_infill
from protocols.llamacpp_native.encode import NativeEncoder, render
from protocols.llamacpp_native.errors import error_body
from protocols.openai_chat import ChatOptions


class _CompletionCodec:
    name = "llamacpp_native"

    def decode(self, body: bytes, request_id: str) -> Call[NativeOptions]:
        return decode_completion(body, request_id)

    def encoder(self, call: Call[NativeOptions], stamp: Stamp) -> Encoder:
        return NativeEncoder(call)

    def render(self, call: Call[NativeOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render(call, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info)


class _InfillCodec(_CompletionCodec):
    def decode(self, body: bytes, request_id: str) -> Call[NativeOptions]:
        return decode_infill(body, request_id)


class _ChatCodec:
    name = "llamacpp_native"

    def decode(self, body: bytes, request_id: str) -> Call[ChatOptions]:
        return decode_chat(body, request_id)

    def encoder(self, call: Call[ChatOptions], stamp: Stamp) -> Encoder:
        return NativeChatEncoder(call, stamp)

    def render(self, call: Call[ChatOptions], stamp: Stamp, completion: Completion) -> bytes:
        return render_chat(call, stamp, completion)

    def error(self, error: ServingError, request_id: str = "") -> bytes:
        return error_body(error.info)


COMPLETION: Final[Codec[NativeOptions]] = _CompletionCodec()
INFILL: Final[Codec[NativeOptions]] = _InfillCodec()
CHAT: Final[Codec[ChatOptions]] = _ChatCodec()

__all__ = ["CHAT", "COMPLETION", "INFILL", "NativeOptions"]
