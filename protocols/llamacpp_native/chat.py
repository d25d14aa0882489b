"""Chat Completions in the manner of llama.cpp, at `/chat/completions`: a model is optional, its role chunk is null."""

from __future__ import annotations

from typing import ClassVar

from protocols.codec import Call
from protocols.errors import ErrorInfo
from protocols.llamacpp_native.errors import error_body
from protocols.openai_chat.decode import ChatOptions, decode
from protocols.openai_chat.encode import ChatEncoder
from protocols.openai_chat.wire import Body


class _ChatBody(Body):
    model: str = ""


def decode_chat(body: bytes, request_id: str) -> Call[ChatOptions]:
    return decode(body, request_id, _ChatBody)


class NativeChatEncoder(ChatEncoder):
    ROLE: ClassVar[bytes] = b'{"role":"assistant","content":null}'

    def _error(self, error: ErrorInfo) -> bytes:
        return error_body(error)
