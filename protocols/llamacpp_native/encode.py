"""Frames -> llama.cpp's partial objects, and the last object of each choice, in a stream or as a body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from protocols import sse
from protocols.codec import Call
from protocols.collect import Choice, Completion
from protocols.events import (
    Echo,
    Event,
    Failed,
    Finished,
    Frame,
    IllegalEvent,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from protocols.llamacpp_extras import OutProgress, OutTimings
from protocols.llamacpp_native.decode import NativeOptions
from protocols.llamacpp_native.errors import error_body
from protocols.llamacpp_native.settings import generation_settings
from protocols.request import Request, Sampling
from protocols.token_logprobs import token_text

_encode = msgspec.json.Encoder().encode


class _OpenChoice:
    """One choice of a stream so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started: Started | None = None
        self.predicted = 0
        self.has_new_line = False


class NativeEncoder:
    """A partial object for every frame that has tokens, though their text may be held back, and no end marker."""

    def __init__(self, call: Call[NativeOptions]) -> None:
        self._options = call.options
        self._choices = [_OpenChoice(request) for request in call.requests for _ in range(request.n)]

    def feed(self, event: Event) -> bytes:
        return self.feed_frame(Frame((event,), choice=event.choice))

    def feed_frame(self, frame: Frame) -> bytes:
        out = []
        texts: list[TextDelta | ReasoningDelta] = []
        end: Finished | None = None
        for event in frame.events:
            match event:
                case Started():
                    out.append(self._start(event))
                case Progress():
                    out.append(self._progress(event))
                case TextDelta() | ReasoningDelta():
                    texts.append(event)
                case Finished():
                    end = event
                case Failed():
                    return b"".join(out) + self._partial(frame, texts) + sse.message(error_body(event.error))
                case ToolCallStarted() | ToolCallDelta() | ToolCallEnded():
                    raise IllegalEvent("a tool call in an answer to a prompt without tools")
                case _:
                    assert_never(event)
        out.append(self._partial(frame, texts))
        if end is not None:
            out.append(self._final(end))
        return b"".join(out)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def _start(self, event: Started) -> bytes:
        request = self._choices[event.choice].request
        # "exactly once per stream", and a stream is one request: all its choices begin with it.
        for choice in self._choices[event.choice : event.choice + request.n]:
            choice.started = event
        return self._progress(event)

    def _progress(self, event: Started | Progress) -> bytes:
        extras = self._choices[event.choice].request.extras
        if not extras.progress or (progress := OutProgress.of(event)) is None:
            return b""
        timings = {"timings": OutTimings.so_far(event)} if extras.timings else {}
        return sse.message(_encode(self._head(event.choice, "", ()) | timings | {"prompt_progress": progress}))

    def _partial(self, frame: Frame, texts: Sequence[TextDelta | ReasoningDelta]) -> bytes:
        choice = self._choices[frame.choice]
        choice.predicted += len(frame.tokens)
        if not texts and not frame.tokens:
            return b""
        text = "".join(delta.text for delta in texts)
        choice.has_new_line = choice.has_new_line or "\n" in text
        partial = self._head(frame.choice, text, frame.tokens)
        if texts and (timings := texts[-1].timings) is not None:
            partial["timings"] = OutTimings.of(timings)
        if logprobs := [item for delta in texts if isinstance(delta, TextDelta) for item in delta.logprobs]:
            partial["completion_probabilities"] = _probabilities(logprobs, choice.request)
        return sse.message(_encode(partial))

    def _head(self, index: int, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": choice.predicted,
            "tokens_evaluated": 0 if choice.started is None else choice.started.prompt_tokens,
        }

    def _final(self, end: Finished) -> bytes:
        choice = self._choices[end.choice]
        # "stream mode sends it as last event and empties `content` and `tokens`"
        final = final_object(choice.request, choice.started, end, has_new_line=choice.has_new_line, stream=True)
        return sse.message(_encode(_selected(final, self._options.fields)))


def render(call: Call[NativeOptions], completion: Completion) -> bytes:
    """ "Several prompts (list) or n>1 → non-stream answer is a JSON array" """
    requests = [request for request in call.requests for _ in range(request.n)]
    bodies = [
        _selected(_whole(choice, request, call.options), call.options.fields)
        for choice, request in zip(completion.choices, requests, strict=True)
    ]
    return _encode(bodies[0] if len(bodies) == 1 else bodies)


def _whole(choice: Choice, request: Request, options: NativeOptions) -> dict[str, Any]:
    assert choice.finished is not None, "a collected choice has finished"
    text = choice.reasoning + choice.text
    end = msgspec.structs.replace(choice.finished, choice=choice.index)
    final = final_object(request, choice.started, end, has_new_line="\n" in text, stream=False)
    final["content"] = text
    if options.tokens:
        final["tokens"] = choice.tokens
    if choice.logprobs:
        final["completion_probabilities"] = _probabilities(choice.logprobs, request)
    return final


def final_object(
    request: Request,
    started: Started | None,
    end: Finished,
    *,
    has_new_line: bool,
    stream: bool,
) -> dict[str, Any]:
    """The last object of a choice, still without the text and the tokens of one that is not a stream."""
    echo = Echo("", request.sampling) if started is None or started.echo is None else started.echo
    echo = msgspec.structs.replace(echo, sampling=_seeded(echo.sampling))
    return {
        "index": end.choice,
        "content": "",
        "tokens": (),
        "id_slot": end.slot,
        "stop": True,
        "model": request.model,
        "tokens_predicted": end.usage.completion_tokens,
        "tokens_evaluated": end.usage.prompt_tokens,
        "generation_settings": generation_settings(request, echo, stream=stream),
        "prompt": echo.prompt,
        "has_new_line": has_new_line,
        "truncated": end.truncated,
        "stop_type": _stop_type(end),
        "stopping_word": end.stop_sequence or "",
        "tokens_cached": end.slot_tokens,
        "timings": None if end.timings is None else OutTimings.of(end.timings),
    }


def _seeded(sampling: Sampling) -> Sampling:
    """llama.cpp's seeds have 32 bits: -1 is the largest, and means a random one."""
    return sampling if sampling.seed is None else msgspec.structs.replace(sampling, seed=sampling.seed % 2**32)


def _stop_type(end: Finished) -> str:
    if end.reason == "length":
        return "limit"
    return "eos" if end.stop_sequence is None else "word"


def _selected(final: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """ "a path with `/` walks into objects; the output key is the *full path string*; unknown paths are dropped" """
    if not fields:
        return final
    plain = msgspec.to_builtins(final)
    selected = {}
    for path in fields:
        value = plain
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            selected[path] = value
    return selected


def _probabilities(items: Sequence[TokenLogprob], request: Request) -> list[dict[str, Any]]:
    after = request.logprobs is not None and request.logprobs.after_sampling
    alternatives = "top_probs" if after else "top_logprobs"
    return [_entry(item, after) | {alternatives: [_entry(top, after) for top in item.top]} for item in items]


def _entry(item: TokenLogprob, after: bool) -> dict[str, Any]:
    value = {"prob": math.exp(item.logprob)} if after else {"logprob": item.logprob}
    return {"id": item.token, "token": token_text(item.data), "bytes": list(item.data)} | value
