"""What a config says of a backend without a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from protocols.errors import ErrorInfo, ServingError


class FakeFault(BaseModel):
    """One failure, injected into every request (or the first `times` of them) after `after_tokens` tokens of its own.

    0 tokens is before the first frame. `fail` raises the error of `kind`; `hang` keeps the slot and says nothing more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    after_tokens: int = Field(0, ge=0)
    action: Literal["fail", "hang"] = "fail"
    kind: str = "internal"
    times: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _known_kind(self) -> Self:
        if self.error.kind != self.kind:
            raise ValueError(f"there is no error of kind {self.kind!r}")
        return self

    @property
    def error(self) -> ServingError:
        return ServingError.from_info(ErrorInfo(self.kind, f"Injected error of kind {self.kind}"))


class FakeCall(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, JsonValue] = {}


class FakeAgent(BaseModel):
    """What is written in place of made-up tokens, a word for each.

    A request that offers tools of `calls`, and has no result of any tool yet, is answered with those calls; every other
    one with `text`. Either comes after `reasoning`, unless the request turns thinking off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    reasoning: str = ""
    calls: tuple[FakeCall, ...] = ()


class FakeSettings(BaseModel):
    """`tokens` is the length of an answer whose request does not set `max_tokens`; a request that does gets that many.

    With `prefix_cache` a slot keeps the words of its last prompt, and a request gets the free slot that shares most
    with it; without, nothing is ever found cached.

    The text of a token is `piece` and its id. `inter_token_s` 0 means as fast as the event loop turns. `adapters` are
    paths of which only the names matter: an answer with other scales has other tokens.

    An input's vector has `embedding_length` numbers and the Euclidean norm 1, whatever norm was asked for. A document's
    score is the share of the query's words that it has.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["fake"] = "fake"
    slots: int = Field(512, ge=1)
    context_length: int = Field(32_768, ge=2)
    ttft_s: float = Field(0.0, ge=0)
    inter_token_s: float = Field(0.0, ge=0)
    tokens: int = Field(16, ge=0)
    piece: str = " token"
    adapters: tuple[str, ...] = ()
    tasks: tuple[Literal["generate", "embed", "rerank"], ...] = ("generate", "embed", "rerank")
    embedding_length: int = Field(8, ge=1)
    agent: FakeAgent | None = None
    prefix_cache: bool = False
    fail_at: FakeFault | None = None
