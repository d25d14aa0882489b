"""What goes out: goldens, and the properties that hold for every legal stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sse
from protocols.codec import Call
from protocols.errors import ContextOverflow, InternalError
from protocols.events import (
    Event,
    Failed,
    Finished,
    IllegalEvent,
    Progress,
    Started,
    TextDelta,
    Timings,
    TokenLogprob,
    Usage,
)
from protocols.openai_completions import CODEC, CompletionOptions
from protocols.sse import SseParser
from tests.protocols.goldens import answers
from tests.protocols.openai import LOGPROB_LISTS, check_numbers, chunks, text_choices
from tests.protocols.scripts import (
    LOGPROBS,
    SCRIPTS,
    STAMP,
    START,
    TIMED,
    TWO_CHOICES,
    collected,
    encoded,
    legal_scripts,
)

TWO_PROMPTS: tuple[Event, ...] = (
    START,
    Started(7, 1, 1),
    TextDelta("b", choice=1),
    TextDelta("a"),
    Finished("stop", Usage(7, 3, 1), None, Timings(1, 6, 2.0, 3, 4.0), 1),
    Finished("length", Usage(10, 5, 2, 1), None, Timings(2, 8, 2.0, 5, 4.0)),
)


def call(prompt: Any = "Once ", **fields: Any) -> Call[CompletionOptions]:
    return CODEC.decode(json.dumps({"model": 'mo"del/ü', "prompt": prompt, **fields}).encode(), "r1")


def stream(script: tuple[Event, ...], **fields: Any) -> bytes:
    return encoded(CODEC.encoder(call(**fields), STAMP), script)


def body(script: tuple[Event, ...], **fields: Any) -> bytes:
    wanted = call(**fields)
    return CODEC.render(wanted, STAMP, collected(script, *(request.n for request in wanted.requests)))


USAGE = {"stream_options": {"include_usage": True}}


def goldens() -> dict[str, bytes]:
    files = answers(stream, body)
    files |= {f"{name}.usage.sse": stream(script, **USAGE) for name, script in SCRIPTS.items()}
    for name, script, fields in (
        ("logprobs", LOGPROBS, {"logprobs": 2}),
        ("two_choices", TWO_CHOICES, {"n": 2}),
        ("two_prompts", TWO_PROMPTS, {"prompt": ["One", "Two"], "echo": True, **USAGE}),
    ):
        files[f"{name}.sse"] = stream(script, **fields)
        files[f"{name}.json"] = body(script, **fields)
    files["progress.sse"] = stream(SCRIPTS["reasoning_then_text"], return_progress=True)
    files["timings.sse"] = stream(TIMED)
    files["error.context_overflow.json"] = CODEC.error(ContextOverflow.of(9000, 8192))
    return files


# --- streams ------------------------------------------------------------


@st.composite
def _batches(draw: st.DrawFn) -> tuple[int, int, tuple[Event, ...]]:
    """Prompts, choices of each, and their events, one prompt's script after the other's or interleaved."""
    prompts, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    scripts = [list(draw(legal_scripts(n, logprobs=True, max_size=6))) for _ in range(prompts)]
    events: list[Event] = []
    while any(scripts):
        index = draw(st.sampled_from([i for i, script in enumerate(scripts) if script]))
        event = scripts[index].pop(0)
        events.append(msgspec.structs.replace(event, choice=event.choice + index * n))
    return prompts, n, tuple(events)


@given(_batches(), st.booleans(), st.booleans(), st.booleans())
def test_concatenated_chunks_are_the_body(
    batch: tuple[int, int, tuple[Event, ...]], include_usage: bool, logprobs: bool, echo: bool
) -> None:
    prompts, n, script = batch
    fields: dict[str, Any] = {"prompt": [f"Prompt {i}: " for i in range(prompts)], "n": n}
    fields |= {"stream_options": {"include_usage": include_usage}}
    if logprobs:
        fields["logprobs"] = 2
    elif echo:
        fields["echo"] = True
    parts = chunks(stream(script, **fields))
    whole = msgspec.json.decode(body(script, **fields))
    for index, (choice, expected) in enumerate(zip(text_choices(parts, prompts * n), whole["choices"], strict=True)):
        assert expected["index"] == index
        assert choice["text"] == expected["text"]
        assert choice["text"].startswith(f"Prompt {index // n}: ") == (echo and not logprobs)
        assert choice["finish_reason"] == expected["finish_reason"]
        assert (expected["logprobs"] is not None) == logprobs
        assert all(choice[name] == (expected["logprobs"] or {name: []})[name] for name in LOGPROB_LISTS)
    check_numbers(parts, whole, include_usage)
    assert {(part["id"], part["created"], part["model"], part["object"]) for part in parts} == {
        ("cmpl-0123456789abcdef", 1_700_000_000, 'mo"del/ü', "text_completion")
    }


@given(legal_scripts(), st.data())
def test_a_failure_ends_the_stream_wherever_it_comes(script: tuple[Event, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(script) - 1))
    *_, last = chunks(stream((*script[:cut], Failed(InternalError("secret").info))))
    assert last == msgspec.json.decode(CODEC.error(InternalError("secret")))
    assert "secret" not in last["error"]["message"]


def test_B61_usage_is_one_chunk_of_its_own_and_only_where_asked_for() -> None:
    with_usage = chunks(stream(SCRIPTS["text"], **USAGE))
    assert [part["usage"] is None for part in with_usage] == [True] * (len(with_usage) - 1) + [False]
    assert not any("usage" in part for part in chunks(stream(SCRIPTS["text"])))


def test_usage_counts_all_prompts() -> None:
    assert chunks(stream(TWO_PROMPTS, prompt=["One", "Two"], **USAGE))[-1]["usage"] == {
        "prompt_tokens": 17,
        "completion_tokens": 8,
        "total_tokens": 25,
        "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 14},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_calls_and_reasoning_are_no_text() -> None:
    assert text_choices(chunks(stream(SCRIPTS["tool_call"])), 1)[0]["text"] == "Let me look."
    assert text_choices(chunks(stream(SCRIPTS["reasoning_then_text"])), 1)[0]["text"] == "42"
    assert text_choices(chunks(stream(SCRIPTS["tool_call"])), 1)[0]["finish_reason"] == "stop"


def test_B64_logprobs_are_in_the_legacy_shape() -> None:
    (choice,) = msgspec.json.decode(body(LOGPROBS, logprobs=2))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Z", "bytes:\\xc3", "bytes:\\xbc", "rich", ""],
        "token_logprobs": [-0.25, -0.5, -0.001, -2.0, -0.75],
        "top_logprobs": [
            {"Z": -0.25, "B": -1.5},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xbc": -0.001},
            {"rich": -2.0, "ri": -0.125, "bytes:\\xff": -3.0},
            {"": -0.75},
        ],
        "text_offset": [0, 1, 1, 2, 6],
    }


def test_of_two_alternatives_with_one_text_the_likelier_is_listed() -> None:
    top = (TokenLogprob(1, b"a", -0.5), TokenLogprob(2, b"b", -1.0), TokenLogprob(3, b"a", -2.0))
    script = (START, TextDelta("a", (TokenLogprob(3, b"a", -2.0, top),)), Finished("stop", Usage(1, 1)))
    (choice,) = msgspec.json.decode(body(script, logprobs=3))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
    assert choice["logprobs"]["token_logprobs"] == [-2.0]


def test_the_echo_comes_once_however_many_starts_there_are() -> None:
    encoder = CODEC.encoder(call(["One", "Two"], echo=True), STAMP)
    first, second = (encoder.feed(event) for event in TWO_PROMPTS[:2])
    assert [json.loads(event.data)["choices"][0]["text"] for event in SseParser().feed(first)] == ["One", "Two"]
    assert second == b""


def test_progress_begins_with_what_each_prompt_had_cached() -> None:
    script = (*TWO_PROMPTS[:2], Progress(10, 2, 10, 5.0), Progress(7, 1, 7, 6.0, 1), *TWO_PROMPTS[2:])
    told = [
        (part["choices"][0]["index"], part["prompt_progress"]["processed"])
        for part in chunks(stream(script, prompt=["One", "Two"], return_progress=True))
        if "prompt_progress" in part
    ]
    assert told == [(0, 2), (1, 1), (0, 10), (1, 7)]
    assert not any("prompt_progress" in part for part in chunks(stream(script, prompt=["One", "Two"])))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}])
def test_timings_stand_in_every_chunk_of_text(fields: dict[str, Any]) -> None:
    parts = chunks(stream(TIMED, **fields))
    assert [part["timings"]["predicted_n"] for part in parts if "timings" in part] == [2, 5], "text, and the end"


def test_the_end_comes_once() -> None:
    for end in (Finished("stop", Usage(1, 1)), Failed(InternalError("x").info)):
        encoder = CODEC.encoder(call(), STAMP)
        encoder.feed(START)
        encoder.feed(Finished("stop", Usage(1, 1)))
        with pytest.raises(IllegalEvent):
            encoder.feed(end)


def test_keepalives_are_invisible() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    raw = b"".join(encoder.keepalive() + encoder.feed(event) + encoder.keepalive() for event in SCRIPTS["unicode"])
    assert chunks(raw) == chunks(stream(SCRIPTS["unicode"]))
    assert encoder.keepalive() == sse.KEEPALIVE
