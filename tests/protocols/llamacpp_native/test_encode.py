"""What goes out: goldens, and what holds for every stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from protocols.codec import Call, frame_feed
from protocols.collect import BatchCollector
from protocols.errors import BackendLost, ContextOverflow, ErrorInfo, InternalError, ServingError
from protocols.events import (
    Echo,
    Failed,
    Finished,
    Frame,
    IllegalEvent,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    Timings,
    TokenLogprob,
    ToolCallStarted,
    Usage,
)
from protocols.llamacpp_native import CHAT, COMPLETION, NativeOptions
from protocols.request import Sampling, TokenBias
from protocols.sse import SseParser
from tests.protocols.scripts import STAMP

TIMINGS = Timings(2, 8, 16.0, 3, 40.0, draft_n=4, draft_n_accepted=1)
NO_BIAS = float("-inf")
ECHO = Echo("<s>Once ", Sampling(0.8, top_k=40, seed=-1, samplers=("top_k",), logit_bias=(TokenBias(2, NO_BIAS),)))
START = Frame((Started(10, 2, echo=ECHO),))
TOP = (TokenLogprob(7, b" up", -0.5), TokenLogprob(8, b"\xe6", -1.0))


def end(reason: Any = "stop", stop: str | None = None, choice: int = 0, **fields: Any) -> Frame:
    last = Finished(reason, Usage(10, 3, 2), stop, TIMINGS, choice, slot=1, slot_tokens=12, **fields)
    return Frame((last,), choice=choice)


def word(text: str, *tokens: int, choice: int = 0, **fields: Any) -> Frame:
    return Frame((TextDelta(text, choice=choice, **fields),), tokens, choice)


PLAIN = (START, word(" a", 5), Frame((), (6,)), word("\nü", 7), end())
FRAMES: dict[str, tuple[tuple[Frame, ...], dict[str, Any]]] = {
    "text": (PLAIN, {}),
    "tokens": (PLAIN, {"return_tokens": True}),
    "word": ((START, word(" a", 5), end(stop="b")), {"stop": ["b", ""]}),
    "limit": ((START, word(" a", 5), end("length", truncated=True)), {"n_predict": 1}),
    "probabilities": (
        (START, word(" up", 7, logprobs=(TokenLogprob(7, b" up", -0.5, TOP),)), end()),
        {"n_probs": 2},
    ),
    "probabilities_after": (
        (START, word(" up", 7, logprobs=(TokenLogprob(7, b" up", -0.5, TOP),)), end()),
        {"n_probs": 2, "post_sampling_probs": True},
    ),
    "progress": (
        (START, Frame((Progress(6, 2, 10, 5.0),)), Frame((Progress(10, 2, 10, 9.0),)), *PLAIN[1:]),
        {"return_progress": True},
    ),
    "timings": ((START, word(" a", 5, timings=TIMINGS), end()), {"timings_per_token": True}),
    "fields": (PLAIN, {"response_fields": ["content", "generation_settings/n_predict", "timings/cache_n", "no/such"]}),
    "settings": (
        PLAIN,
        {
            "n_predict": 7,
            "grammar": "root ::= [a-z]",
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 1, "value": "<t>"}],
            "preserved_tokens": ["<t>"],
            "lora": [{"id": 0, "scale": 0.5}],
            "n_keep": 3,
            "ignore_eos": True,
        },
    ),
    "schema": (
        (Frame((Started(10, 2, echo=Echo("Once ", Sampling(), 'root ::= "{}"', "ngram")),)), *PLAIN[1:]),
        {"json_schema": {"type": "object"}},
    ),
    "two_choices": (
        (START, word(" b", 6, choice=1), word(" a", 5), end(choice=1), end("length")),
        {"n_cmpl": 2},
    ),
    "two_prompts": (
        (
            START,
            Frame((Started(4, 0, choice=1),), choice=1),
            word(" b", 6, choice=1),
            word(" a", 5),
            end(choice=1),
            end("length"),
        ),
        {"prompt": ["Once ", [1, 2]]},
    ),
}
FAILED = (START, word(" a", 5), Frame((Failed(BackendLost("The model's replica was lost.").info),)))


def call(**fields: Any) -> Call[NativeOptions]:
    decoded = COMPLETION.decode(json.dumps({"prompt": "Once ", **fields}).encode(), "r1")
    requests = tuple(msgspec.structs.replace(request, model='mo"del/ü') for request in decoded.requests)
    return msgspec.structs.replace(decoded, requests=requests)


def stream(frames: tuple[Frame, ...], **fields: Any) -> bytes:
    feed = frame_feed(COMPLETION.encoder(call(**fields), STAMP))
    return b"".join(feed(frame) for frame in frames)


def body(frames: tuple[Frame, ...], **fields: Any) -> bytes:
    wanted = call(**fields)
    collector = BatchCollector([request.n for request in wanted.requests])
    for frame in frames:
        collector.feed_frame(frame)
    return COMPLETION.render(wanted, STAMP, collector.result())


def goldens() -> dict[str, bytes]:
    files = {}
    for name, (frames, fields) in FRAMES.items():
        files[f"{name}.sse"] = stream(frames, stream=True, **fields)
        files[f"{name}.json"] = body(frames, **fields)
    files["failed.sse"] = stream(FAILED, stream=True)
    files["error.context_overflow.json"] = COMPLETION.error(ContextOverflow.of(9000, 8192))
    files["error.internal.json"] = COMPLETION.error(InternalError("a secret"))
    return files


def objects(raw: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event.data) for event in SseParser().feed(raw)]


@pytest.mark.parametrize("name", [name for name in FRAMES if name not in ("fields", "progress")])
def test_a_stream_and_a_body_say_the_same(name: str) -> None:
    frames, fields = FRAMES[name]
    whole = msgspec.json.decode(body(frames, **fields))
    partials = [item for item in objects(stream(frames, stream=True, **fields)) if not item["stop"]]
    last = [item for item in objects(stream(frames, stream=True, **fields)) if item["stop"]]
    for index, expected in enumerate(whole if isinstance(whole, list) else [whole]):
        (final,) = [item for item in last if item["index"] == index]
        assert "".join(item["content"] for item in partials if item["index"] == index) == expected["content"]
        empty = {"content": "", "tokens": []}
        streamed = expected | empty | {"generation_settings": expected["generation_settings"] | {"stream": True}}
        streamed.pop("completion_probabilities", None)
        assert final == streamed


def test_every_token_is_told_once_in_order_and_counted() -> None:
    partials = [item for item in objects(stream(PLAIN, stream=True)) if not item["stop"]]
    assert [token for item in partials for token in item["tokens"]] == [5, 6, 7]
    assert [item["tokens_predicted"] for item in partials] == [1, 2, 3]


def test_a_stream_has_no_names_and_no_end_marker() -> None:
    events = SseParser().feed(stream(PLAIN, stream=True))
    assert {event.event for event in events} == {"message"}
    assert "[DONE]" not in [event.data for event in events]


def test_frames_that_came_together_are_the_same_stream() -> None:
    together = Frame(tuple(event for frame in PLAIN for event in frame.events), (5, 6, 7))
    partial, final = objects(stream((together,), stream=True))
    assert (partial["content"], partial["tokens"]) == (" a\nü", [5, 6, 7])
    assert final == objects(stream(PLAIN, stream=True))[-1]


def test_what_came_with_a_failure_is_sent_before_it() -> None:
    failure = Failed(BackendLost("lost").info)
    partial, error = objects(stream((START, Frame((TextDelta("a"), failure), (5,))), stream=True))
    assert partial["content"] == "a"
    assert error == {"error": {"code": 503, "message": "lost", "type": "unavailable_error"}}


def test_reasoning_is_content_where_a_prompt_is_raw() -> None:
    frames = (START, Frame((ReasoningDelta("a"),), (5,)), word("b", 6), end())
    assert msgspec.json.decode(body(frames))["content"] == "ab"


def test_a_tool_call_in_a_raw_answer_is_a_bug() -> None:
    with pytest.raises(IllegalEvent):
        stream((START, Frame((ToolCallStarted(0, "c", "f"),))), stream=True)


@pytest.mark.parametrize("kind", sorted(ServingError._by_kind))
def test_every_error_has_its_status_and_a_type(kind: str) -> None:
    error = ServingError.from_info(ErrorInfo(kind, "what went wrong"))
    words = msgspec.json.decode(COMPLETION.error(error))["error"]
    assert words["code"] == error.status
    assert words["type"].endswith("_error")
    assert words["message"] == (InternalError.PUBLIC_MESSAGE if kind == "internal" else "what went wrong")


def test_chat_begins_with_a_role_whose_content_is_null_and_errs_in_llama_cpps_words() -> None:
    """ "`content: null` on un-prefixed route" """
    chat = CHAT.decode(b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}', "r1")
    encoder = CHAT.encoder(chat, STAMP)
    first, error, done = SseParser().feed(
        encoder.feed(Started(3, 0)) + encoder.feed(Failed(ContextOverflow.of(9, 8).info))
    )
    assert msgspec.json.decode(first.data)["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert msgspec.json.decode(error.data)["error"]["type"] == "exceed_context_size_error"
    assert done.data == "[DONE]"
