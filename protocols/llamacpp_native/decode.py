"""Bodies of `/completion` and `/infill` -> `Call[NativeOptions]`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field

from protocols.body import ModelName, Wire, parse_object, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.llamacpp_native.prompts import prompts
from protocols.request import InfillFile, InfillPrompt, Prompt, Request
from protocols.sampling_fields import Natural, SamplingFields, choices, keepalive_s, request

MAX_ANSWERS = 2048
"""Choices of all prompts of a body."""


class NativeOptions(msgspec.Struct, frozen=True):
    """What only the encoder needs. `fields`: those of the last object to answer with; empty is all of them."""

    tokens: bool
    fields: tuple[str, ...]


class _Body(SamplingFields):
    model: ModelName = ""
    stream: bool | None = None
    logprobs: Natural | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=256)] | None = None


class _CompletionBody(_Body):
    prompt: Any = None


class _ExtraFile(Wire):
    text: str
    filename: str = "tmp"


class _InfillBody(_Body):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[_ExtraFile], Field(max_length=1024)] | None = None
    prompt: str = ""


def decode_completion(body: bytes, request_id: str) -> Call[NativeOptions]:
    wire = validated(_CompletionBody, parse_object(body))
    if wire.prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt")
    return _call(wire, prompts(wire.prompt, "prompt"), request_id)


def decode_infill(body: bytes, request_id: str) -> Call[NativeOptions]:
    wire = validated(_InfillBody, parse_object(body))
    files = tuple(InfillFile(file.filename, file.text) for file in wire.input_extra or ())
    return _call(wire, (InfillPrompt(wire.input_prefix, wire.input_suffix, wire.prompt, files),), request_id)


def _call(wire: _Body, asked: tuple[Prompt, ...], request_id: str) -> Call[NativeOptions]:
    if len(asked) * choices(wire) > MAX_ANSWERS:
        raise InvalidRequest(f"More than {MAX_ANSWERS} answers were asked for: send fewer prompts.", param="prompt")
    options = NativeOptions(
        tokens=bool(wire.return_tokens),
        fields=tuple(wire.response_fields or ()),
    )
    requests = tuple(
        _request(wire, prompt, request_id if len(asked) == 1 else f"{request_id}-{i}") for i, prompt in enumerate(asked)
    )
    return Call(requests, stream=bool(wire.stream), options=options, keepalive_s=keepalive_s(wire))


def _request(wire: _Body, prompt: Prompt, id: str) -> Request:
    # "`logprobs` alias of n_probs"
    if wire.n_probs is None and wire.logprobs is not None:
        wire = wire.model_copy(update={"n_probs": wire.logprobs})
    plain = request(wire, id=id, model=wire.model, prompt=prompt)
    return msgspec.structs.replace(
        plain,
        # "after ≥1 token …, so `n_predict: 0` still yields one token"
        max_tokens=None if plain.max_tokens is None else max(plain.max_tokens, 1),
        extras=msgspec.structs.replace(plain.extras, echo=True),
    )
