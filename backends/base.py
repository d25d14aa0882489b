"""The interface every engine is reached through.

A backend owns one loaded model. The contract, in the order of a backend's life:

* `start()` loads the model, off the event loop, and returns its card. Called once, before anything else. A model that
  cannot be loaded raises `BackendStartError` with one line that says what is wrong.
* `generate(request)` may be called any number of times at once. It yields frames in the legal order of
  `protocols.events.LEGAL`, the first with `Started`, the last with the `Finished` of the last choice. The tokens of
  all frames of a choice, concatenated, are exactly the ids the engine sampled (end-of-generation tokens included), and
  as many as `usage.completion_tokens`. A request the engine cannot run raises a `ServingError`, before the first frame
  if it can be known before. Backends raise; they never yield `Failed`. One request's error never fails another.
* A request with `resume` goes on after those tokens: frames carry only new tokens and only text not yet emitted for
  the old ones (what their end held back comes now), while `max_tokens` and `usage` count old and new together.
* Closing the iterator, at any point and also before the first frame, frees the request's slot and its share of the KV
  cache within one engine step. `stats()` shows it.
* `count_tokens(request)` is the prompt length `generate` would report for the same request.
* `stats()` is cheap and never waits for the engine.
* `check_health()` raises when the engine can no longer serve.
* `aclose()` ends running requests with `Unavailable` and frees the model. No call is legal afterwards.

All methods belong to one event loop and none of them blocks it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from protocols.events import Frame
from protocols.request import Request


class BackendStartError(Exception):
    """The model cannot be loaded; the message is one line for the operator."""


class ModelCard(msgspec.Struct, frozen=True):
    """A loaded model. `context_length` is the room of one request, in tokens; `slots` is how many run at once."""

    context_length: int
    slots: int
    engine: str
    vocab_size: int = 0
    parameters: int = 0
    file_bytes: int = 0
    chat_template: str = ""


class BackendStats(msgspec.Struct, frozen=True):
    """A snapshot for routing, scaling and tests. Counts are requests unless they say tokens; totals only ever grow."""

    slots: int
    running: int
    waiting: int
    queued_prompt_tokens: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    steps_total: int = 0
    prefill_tokens_per_s: float = 0.0


class Backend(Protocol):
    async def start(self) -> ModelCard: ...

    def generate(self, request: Request) -> AsyncGenerator[Frame, None]: ...

    async def count_tokens(self, request: Request) -> int: ...

    def stats(self) -> BackendStats: ...

    async def check_health(self) -> None: ...

    async def aclose(self) -> None: ...
