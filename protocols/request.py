"""The canonical request: what every dialect decodes into, and the only thing routing and backends ever read."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image by reference: an `https:` or `data:` URL."""

    url: str


ContentPart = TextPart | ImagePart


class ToolCall(msgspec.Struct, frozen=True):
    """A call the assistant made in an earlier turn. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Role
    content: tuple[ContentPart, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """All text parts joined: a string and a list with one text part are the same message."""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function the model may call. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat", omit_defaults=True):
    """Messages that the model's chat template turns into text."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, frozen=True, tag="raw_text"):
    """Text that goes to the tokenizer as it is."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `None` means the model's own default. `temperature` 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation. `id` names it in logs on every layer; `model` is the id the client asked for.

    `max_tokens` None means as many as the context holds. `ignore_eos` keeps generating past end-of-generation tokens.
    `resume` are tokens that were already generated, and delivered, by a replica that was lost: the backend continues
    after them and emits nothing for them.
    """

    id: str
    model: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    resume: tuple[int, ...] = ()
