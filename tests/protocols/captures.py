"""What real clients sent: bodies recorded from them, with the long strings put back at their length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from protocols import anthropic_messages, openai_chat, openai_responses
from protocols.codec import Codec
from protocols.request import ChatPrompt

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "client-captures"
BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=sdk-cli; cch={};"
BILLING_CHARS = 74
"""How long Claude Code's first system block was."""

CODECS: dict[str, Codec[Any]] = {
    "/v1/messages": anthropic_messages.CODEC,
    "/v1/messages/count_tokens": anthropic_messages.CODEC,
    "/v1/chat/completions": openai_chat.CODEC,
    "/v1/responses": openai_responses.CODEC,
}
BODILESS = {"/", "/api/hello", "/v1/models"}


class Recorded(msgspec.Struct, frozen=True):
    """A request: the file it is in, its place there, its path without the query, and its body if it has one."""

    file: str
    number: int
    path: str
    body: dict[str, Any] | None

    def __str__(self) -> str:
        return f"{self.file}-{self.number}"

    @property
    def items(self) -> list[Any]:
        assert self.body is not None
        items = self.body.get("messages", self.body.get("input"))
        return items if isinstance(items, list) else [items]

    @property
    def prompt(self) -> ChatPrompt:
        prompt = CODECS[self.path].decode(json.dumps(self.body).encode(), "r1").request.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt


def requests(pattern: str = "*") -> list[Recorded]:
    """Of the files of that name, in order; none where the recordings are not at hand."""
    found = []
    for file in sorted(FOLDER.glob(f"{pattern}.json")):
        for number, call in enumerate(json.loads(file.read_text())):
            body = call["body"] and whole(call["body"], number)
            found.append(Recorded(file.stem, number, call["path"].split("?")[0], body))
    return found


def turns() -> list[tuple[Recorded, Recorded]]:
    """Requests that follow one another on one path, of which the later one has more to say: one conversation."""
    found = []
    last: dict[tuple[str, str], Recorded] = {}
    for request in requests():
        if request.body is None:
            continue
        before = last.get((request.file, request.path))
        if before is not None and len(request.items) > len(before.items):
            found.append((before, request))
        last[request.file, request.path] = request
    return found


def whole(value: Any, turn: int) -> Any:
    match value:
        case {"<keys>": keys}:
            return {key: _SCHEMA.get(key, key) for key in keys}
        case dict():
            return {key: whole(inner, turn) for key, inner in value.items()}
        case list():
            return [whole(inner, turn) for inner in value]
        case str() if value.startswith("<str "):
            length = int(value[5:-1])
            if length == BILLING_CHARS:
                return BILLING.format(turn)
            return (f"<reminder>{length}</reminder>\n" * length)[:length]
    return value


_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"type": "string", "pattern": "^/"}, "n": {"anyOf": [{"type": "integer"}, {"const": 0}]}},
    "required": ["path"],
    "additionalProperties": False,
}  # fmt: skip
