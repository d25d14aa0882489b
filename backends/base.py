"""The interface every engine is reached through.

A backend owns one loaded model. The contract, in the order of a backend's life:

* `start()` loads the model, off the event loop, and returns its card. Called once, before anything else. A model that
  cannot be loaded raises `BackendStartError` with one line that says what is wrong.
* `generate(request)` may be called any number of times at once. It yields frames in the legal order of
  `protocols.events.LEGAL`, the first with `Started`, the last with the `Finished` of the last choice. The tokens of
  all frames of a choice, concatenated, are exactly the ids the engine sampled (end-of-generation tokens included), and
  as many as `usage.completion_tokens`. A request the engine cannot run raises a `ServingError`, before the first frame
  if it can be known before. Backends raise; they never yield `Failed`. One request's error never fails another.
  A backend may give frames to `sink` in its reader's stead (`protocols/sink.py`), and need not.
* A request with `resume` goes on after those tokens: frames carry only new tokens and only text not yet emitted for
  the old ones (what their end held back comes now), while `max_tokens` and `usage` count old and new together.
* Closing the iterator, at any point and also before the first frame, frees the request's slot and its share of the KV
  cache within one engine step. `stats()` shows it.
* What follows `count_tokens` in `Backend` is one question and one answer each. What a model or its engine cannot do
  raises `NotSupported`, which says why; `Unsupported` is a base for backends that do none of it.
* `count_tokens(request)` is the prompt length `generate` would report for the same request.
* `stats()` is cheap and never waits for the engine.
* `check_health()` raises when the engine can no longer serve.
* `aclose()` ends running requests with `Unavailable` and frees the model. No call is legal afterwards.

All methods belong to one event loop and none of them blocks it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from protocols.calls import (
    Adapter,
    Embedding,
    EmbeddingRequest,
    Piece,
    Relevance,
    RerankRequest,
    SlotFile,
    SlotState,
)
from protocols.card import BackendStats as BackendStats
from protocols.card import ModelCard as ModelCard
from protocols.errors import NotSupported
from protocols.events import Frame
from protocols.request import ChatPrompt, LoraScale, Request
from protocols.sink import Sink


class BackendStartError(Exception):
    """The model cannot be loaded; the message is one line for the operator."""


class Backend(Protocol):
    async def start(self) -> ModelCard: ...

    def card(self) -> ModelCard:
        """What `start` returned."""
        ...

    def generate(self, request: Request, sink: Sink | None = None) -> AsyncGenerator[Frame, None]: ...

    async def count_tokens(self, request: Request) -> int: ...

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        """One for each input, in their order."""
        ...

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        """One for each document, in their order."""
        ...

    async def tokenize(self, *parts: str | int, add_special: bool = False, parse_special: bool = True) -> list[Piece]:
        """Of `parts`, text or tokens, one behind the other.

        `add_special`: the first of them, if it is text, with the tokens that begin and end a text. `parse_special`:
        `<|name|>` is a control token.
        """
        ...

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, control tokens by their name."""
        ...

    async def apply_template(self, prompt: ChatPrompt) -> str:
        """The text that `generate` would tokenise for `prompt`."""
        ...

    def adapters(self) -> list[Adapter]: ...

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        """For requests that bring no scales of their own, from here on. Adapters that are not named get 0."""
        ...

    async def slots(self) -> list[SlotState]: ...

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        """Writes what an idle slot holds into the operator's folder. A busy slot is waited for."""
        ...

    async def restore_slot(self, slot: int, filename: str) -> SlotFile: ...

    async def erase_slot(self, slot: int) -> int:
        """How many tokens were forgotten."""
        ...

    def stats(self) -> BackendStats: ...

    async def check_health(self) -> None: ...

    async def aclose(self) -> None: ...


class Unsupported:
    """A base for backends: all that not every engine can do, refused."""

    async def embed(self, request: EmbeddingRequest) -> list[Embedding]:
        raise NotSupported("This model does not make embeddings")

    async def rerank(self, request: RerankRequest) -> list[Relevance]:
        raise NotSupported("This model does not rank documents")

    async def tokenize(self, *parts: str | int, add_special: bool = False, parse_special: bool = True) -> list[Piece]:
        raise NotSupported("This model's engine does not give its tokens away")

    async def detokenize(self, tokens: Sequence[int]) -> str:
        raise NotSupported("This model's engine does not give its tokens away")

    async def apply_template(self, prompt: ChatPrompt) -> str:
        raise NotSupported("This model's engine does not show its chat template")

    def adapters(self) -> list[Adapter]:
        return []

    async def set_adapters(self, scales: Sequence[LoraScale]) -> None:
        raise NotSupported("This model has no LoRA adapters")

    async def slots(self) -> list[SlotState]:
        raise NotSupported("This model's engine has no slots")

    async def save_slot(self, slot: int, filename: str) -> SlotFile:
        raise NotSupported("This model's engine has no slots")

    async def restore_slot(self, slot: int, filename: str) -> SlotFile:
        raise NotSupported("This model's engine has no slots")

    async def erase_slot(self, slot: int) -> int:
        raise NotSupported("This model's engine has no slots")
