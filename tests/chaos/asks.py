"""What is asked of the system, in every dialect, streamed and not, and how the text is read out of what comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx2
import msgspec

from protocols.sse import ServerSentEvent, SseParser


class BrokenAnswer(Exception):
    """A response that is not what its dialect says: an error, or a stream without its end."""


class GatewayGone(Exception):
    """What HAProxy says of a gateway that died before it answered: a 5xx in no dialect's words."""


class Ask(msgspec.Struct, frozen=True):
    """One request. Those of a kind are equal, so their answers have to be."""

    dialect: str
    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def name(self) -> str:
        return f"{self.dialect}{', streamed' if self.streamed else ''}, {self.body['model']}"


PROMPTS = (
    "Tell me a story about a fox and a well.",
    "List the rivers of Europe, with their lengths.",
    "Explain how a bicycle stays upright when it moves.",
)


def asks(model: str, tokens: int) -> list[Ask]:
    """Greedy answers of `tokens` tokens each: every dialect, streamed and not, for every prompt."""
    made = []
    for prompt, streamed in itertools.product(PROMPTS, (True, False)):
        common: dict[str, Any] = {"model": model, "stream": streamed, "temperature": 0, "ignore_eos": True}
        messages = [{"role": "user", "content": prompt}]
        made += [
            Ask("chat", "/v1/chat/completions", {**common, "messages": messages, "max_tokens": tokens}),
            Ask("completions", "/v1/completions", {**common, "prompt": prompt, "max_tokens": tokens}),
            Ask("responses", "/v1/responses", {**common, "input": prompt, "max_output_tokens": tokens, "store": False}),
            Ask("messages", "/v1/messages", {**common, "messages": messages, "max_tokens": tokens}),
            Ask("native", "/completion", {**common, "prompt": prompt, "n_predict": tokens}),
        ]
    return made


async def answer(client: httpx2.AsyncClient, ask: Ask, gaps: list[float] | None = None, clock: Any = None) -> str:
    """The text of the answer. Raises `BrokenAnswer` or httpx's errors. `gaps`: seconds between pieces of text."""
    async with client.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code >= 500 and "json" not in response.headers.get("content-type", ""):
            raise GatewayGone(f"{response.status_code}: {(await response.aread())[:100]!r}")
        if response.status_code != 200:
            raise BrokenAnswer(f"{response.status_code}: {(await response.aread())[:300]!r}")
        if not ask.streamed:
            return "".join(_whole(ask.dialect, json.loads(await response.aread())))
        pieces: list[str] = []
        last = clock() if clock is not None else 0.0
        async for piece in _pieces(ask.dialect, response):
            pieces.append(piece)
            if clock is not None and gaps is not None:
                now = clock()
                gaps.append(now - last)
                last = now
        return "".join(pieces)


def _whole(dialect: str, body: Any) -> Iterable[str]:
    match dialect:
        case "chat":
            yield body["choices"][0]["message"]["content"]
        case "completions":
            yield body["choices"][0]["text"]
        case "responses":
            for item in body["output"]:
                for part in item.get("content", ()):
                    yield part.get("text", "")
        case "messages":
            for block in body["content"]:
                yield block.get("text", "")
        case "native":
            yield body["content"]


async def _pieces(dialect: str, response: httpx2.Response) -> AsyncIterator[str]:
    parser, ended, last = SseParser(), False, b""
    async for chunk in response.aiter_bytes():
        last = chunk
        for event in parser.feed(chunk):
            if event.data == "[DONE]":
                continue
            body = json.loads(event.data)
            # In Responses the error of a stream that has begun is inside of the response.
            if body.get("error") is not None or (body.get("response") or {}).get("error") is not None:
                raise BrokenAnswer(event.data[:300])
            text, end = _piece(dialect, event, body)
            ended = ended or end
            if text:
                yield text
    if not ended:
        raise BrokenAnswer(f"the stream stopped before its end, behind {last[-100:]!r}")


def _piece(dialect: str, event: ServerSentEvent, body: Any) -> tuple[str, bool]:
    """The text in one event, and whether it is the end of the answer."""
    match dialect:
        case "chat":
            choice = body["choices"][0] if body["choices"] else {"delta": {}, "finish_reason": None}
            return choice["delta"].get("content") or "", choice["finish_reason"] is not None
        case "completions":
            choice = body["choices"][0] if body["choices"] else {"text": "", "finish_reason": None}
            return choice["text"], choice["finish_reason"] is not None
        case "responses":
            delta = body["delta"] if event.event == "response.output_text.delta" else ""
            return delta, event.event in ("response.completed", "response.incomplete")
        case "messages":
            delta = body.get("delta", {}).get("text", "") if event.event == "content_block_delta" else ""
            return delta, event.event == "message_stop"
        case _:
            return body["content"], bool(body["stop"])
