"""Chat Completions in the manner of llama.cpp, at `/chat/completions`: a model is optional, its role chunk is null."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from protocols.body import ModelName
from protocols.codec import Call, Stamp
from protocols.collect import Completion
from protocols.errors import ErrorInfo
from protocols.events import Finished, Started
from protocols.llamacpp_native.encode import final_object
from protocols.llamacpp_native.errors import error_body
from protocols.openai_chat.decode import ChatOptions, decode
from protocols.openai_chat.encode import ChatEncoder, render
from protocols.openai_chat.wire import Body

_encode = msgspec.json.Encoder().encode


class _ChatBody(Body):
    model: ModelName = ""


def decode_chat(body: bytes, request_id: str) -> Call[ChatOptions]:
    return decode(body, request_id, _ChatBody)


class NativeChatEncoder(ChatEncoder):
    ROLE: ClassVar[bytes] = b'{"role":"assistant","content":null}'

    def __init__(self, call: Call[ChatOptions], stamp: Stamp) -> None:
        super().__init__(call, stamp)
        self._request = call.request
        self._first: Started | None = None

    def _error(self, error: ErrorInfo) -> bytes:
        return error_body(error)

    def _start(self, event: Started) -> bytes:
        self._first = event
        return super()._start(event)

    def _finish(self, event: Finished) -> bytes:
        """ "`__verbose` on the first object of the final batch" """
        ended = super()._finish(event)
        if self._first is None or self._first.echo is None:
            return ended
        first, rest = ended.split(b"\n\n", 1)
        final = _encode(final_object(self._request, self._first, event, has_new_line=False, stream=True))
        return b'%b,"__verbose":%b}\n\n%b' % (first.removesuffix(b"}"), final, rest)


def render_chat(call: Call[ChatOptions], stamp: Stamp, completion: Completion) -> bytes:
    """With `__verbose`, the native answer, where the engine was to say what it made of the request."""
    body = render(call, stamp, completion)
    choice = completion.choices[0]
    if choice.started is None or choice.started.echo is None:
        return body
    assert choice.finished is not None, "a collected choice has finished"
    text = choice.reasoning + choice.text
    final = final_object(call.request, choice.started, choice.finished, has_new_line="\n" in text, stream=False)
    return b'%b,"__verbose":%b}' % (body.removesuffix(b"}"), _encode(final | {"content": text}))
