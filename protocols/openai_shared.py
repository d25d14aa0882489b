"""What OpenAI's two completion dialects have in common: parameters, and what stands around the choices of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from protocols.body import Wire
from protocols.codec import Stamp
from protocols.collect import Completion
from protocols.events import Usage
from protocols.llamacpp_extras import OutTimings
from protocols.sampling_fields import Probability, SamplingFields, Temperature

FINGERPRINT = "b1-tokenyard"
"""Changes when the same request may get another answer: "`system_fingerprint` … emit, starting with `b`"."""

MAX_TOP_LOGPROBS = 20

NO_ARGUMENTS = "{}"
"""A call the model gave no arguments: clients parse them as JSON, which "" is not."""

_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Wire):
    include_usage: bool | None = None


class OpenAIFields(SamplingFields):
    """ "`/v1/*` speaks the official dialect strictly": its parameters have their official ranges here."""

    model: str = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> PromptDetails:
        # Every computed prompt token is kept for the next request: "cache_write | prompt − cached".
        return cls(usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens)


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> CompletionDetails:
        return cls(usage.reasoning_tokens)


class OutUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> OutUsage:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptDetails.of(usage),
            completion_tokens_details=CompletionDetails.of(usage),
        )


def input_token_count(tokens: int) -> bytes:
    """The answer to how many tokens a request's input is."""
    return _encode({"object": "response.input_tokens", "input_tokens": tokens})


ChoiceT = TypeVar("ChoiceT")

_encode = msgspec.json.Encoder().encode


class OutAnswer(msgspec.Struct, Generic[ChoiceT], frozen=True, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChoiceT, ...]
    usage: OutUsage
    timings: OutTimings | UnsetType = UNSET


def answer_body(
    id: str, object: str, stamp: Stamp, model: str, choices: Iterable[ChoiceT], completion: Completion
) -> bytes:
    return _encode(
        OutAnswer(
            id=id,
            object=object,
            created=stamp.created,
            model=model,
            system_fingerprint=FINGERPRINT,
            choices=tuple(choices),
            usage=OutUsage.of(completion.usage),
            timings=UNSET if completion.timings is None else OutTimings.of(completion.timings),
        )
    )
