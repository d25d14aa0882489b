"""What goes out: goldens, and the properties that hold for every legal stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sse
from protocols.codec import Call
from protocols.errors import ContextOverflow, InternalError, ServingError
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
    ToolCallEnded,
    Usage,
)
from protocols.openai_chat import CODEC, ChatOptions
from protocols.request import ChatPrompt, Extras, LogprobOptions, Message, Request, TextPart, ToolChoice
from protocols.sse import SseParser
from protocols.token_logprobs import LOWEST_LOGPROB
from tests.protocols.goldens import answers, error_bodies
from tests.protocols.openai import chat_choices, check_numbers, chunks
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

AUTO = ToolChoice()


def call(
    include_usage: bool = False,
    n: int = 1,
    logprobs: bool = False,
    progress: bool = False,
    tool_choice: ToolChoice = AUTO,
) -> Call[ChatOptions]:
    prompt = ChatPrompt((Message("user", (TextPart("Hi"),)),), tool_choice=tool_choice)
    request = Request(
        "r1",
        'mo"del/ü',
        prompt,
        n=n,
        logprobs=LogprobOptions(2) if logprobs else None,
        extras=Extras(progress=progress),
    )
    return Call((request,), stream=True, options=ChatOptions(include_usage))


def stream(script: tuple[Event, ...], include_usage: bool = False, n: int = 1, **options: Any) -> bytes:
    return encoded(CODEC.encoder(call(include_usage, n, **options), STAMP), script)


def body(script: tuple[Event, ...], n: int = 1, **options: Any) -> bytes:
    return CODEC.render(call(n=n, **options), STAMP, collected(script, n))


def goldens() -> dict[str, bytes]:
    files = answers(stream, body)
    files |= {f"{name}.usage.sse": stream(script, include_usage=True) for name, script in SCRIPTS.items()}
    for name, script, options in (
        ("logprobs", LOGPROBS, {"logprobs": True}),
        ("two_choices", TWO_CHOICES, {"n": 2}),
        ("named_tool", SCRIPTS["tool_call"], {"tool_choice": ToolChoice("required", "get_weather")}),
    ):
        files[f"{name}.sse"] = stream(script, **options)
        files[f"{name}.json"] = body(script, **options)
    files["progress.sse"] = stream(SCRIPTS["reasoning_then_text"], progress=True)
    files["timings.sse"] = stream(TIMED)
    return files | error_bodies(CODEC)


# --- streams ------------------------------------------------------------


_CASES = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), legal_scripts(n, logprobs=True), st.booleans()))


@given(_CASES, st.booleans(), st.booleans(), st.sampled_from((ToolChoice(), ToolChoice("required", "f"))))
def test_concatenated_deltas_are_the_body(
    case: tuple[int, tuple[Event, ...], bool], logprobs: bool, progress: bool, tool_choice: ToolChoice
) -> None:
    n, script, include_usage = case
    parts = chunks(stream(script, include_usage, n, logprobs=logprobs, progress=progress, tool_choice=tool_choice))
    whole = msgspec.json.decode(body(script, n, logprobs=logprobs, tool_choice=tool_choice))
    for index, choice in enumerate(chat_choices(parts, n)):
        expected = whole["choices"][index]
        message = expected["message"]
        assert choice["role"] == message["role"] == "assistant"
        assert choice["content"] == (message["content"] or "")
        assert choice["reasoning_content"] == message.get("reasoning_content", "")
        assert choice["finish_reason"] == expected["finish_reason"]
        calls = [{"id": c["id"], "type": c["type"], **c["function"]} for c in message.get("tool_calls", [])]
        assert choice["tool_calls"] == calls
        assert (expected["logprobs"] is not None) == logprobs
        assert choice["logprobs"] == (expected["logprobs"] or {"content": []})["content"]
        assert (message["content"] is None) == (bool(calls) and not choice["content"])
    check_numbers(parts, whole, include_usage)


@given(_CASES)
def test_every_chunk_is_of_one_answer(case: tuple[int, tuple[Event, ...], bool]) -> None:
    n, script, include_usage = case
    for part in chunks(stream(script, include_usage, n)):
        assert part["id"] == "chatcmpl-0123456789abcdef"
        assert part["created"] == 1_700_000_000
        assert part["model"] == 'mo"del/ü'
        assert part["object"] == "chat.completion.chunk"
        assert part["system_fingerprint"].startswith("b")


@given(legal_scripts(), st.data())
def test_a_failure_ends_the_stream_wherever_it_comes(script: tuple[Event, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(script) - 1))
    failed = Failed(ServingError.from_info(InternalError("secret").info).info)
    *_, last = chunks(stream((*script[:cut], failed)))
    assert last == msgspec.json.decode(CODEC.error(InternalError("secret")))
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in last["error"]["message"]


def test_the_role_comes_with_started_not_with_the_first_text() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    (event,) = SseParser().feed(encoder.feed(START))
    assert msgspec.json.decode(event.data)["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert encoder.feed(TextDelta("")) == b""
    assert encoder.feed(Progress(1, 0, 10, 0.5)) == b""


def test_B64_logprobs_are_in_the_official_shape() -> None:
    first, second, *_, last = chat_choices(chunks(stream(LOGPROBS, logprobs=True)), 1)[0]["logprobs"]
    assert first == {
        "token": "Z",
        "bytes": [90],
        "logprob": -0.25,
        "top_logprobs": [
            {"token": "Z", "bytes": [90], "logprob": -0.25},
            {"token": "B", "bytes": [66], "logprob": -1.5},
        ],
    }
    assert second == {"token": "", "bytes": [0xC3], "logprob": -0.5, "top_logprobs": []}
    assert last == {"token": "", "bytes": [], "logprob": -0.75, "top_logprobs": []}


def test_a_probability_of_zero_is_the_lowest_there_is() -> None:
    script = (START, TextDelta("a", (TokenLogprob(1, b"a", float("-inf")),)), Finished("stop", Usage(1, 1)))
    (entry,) = chat_choices(chunks(stream(script, logprobs=True)), 1)[0]["logprobs"]
    assert entry["logprob"] == LOWEST_LOGPROB


def test_a_probability_without_text_has_a_delta_without_content() -> None:
    *_, last, end = chunks(stream(LOGPROBS, logprobs=True))
    assert last["choices"][0]["delta"] == {}
    assert len(last["choices"][0]["logprobs"]["content"]) == 1
    assert end["choices"][0]["finish_reason"] == "stop"
    assert all(part["choices"][0]["logprobs"] is None for part in chunks(stream(LOGPROBS)))


def test_calls_without_an_id_get_one_each() -> None:
    calls = chat_choices(chunks(stream(TWO_CHOICES, n=2)), 2)[0]["tool_calls"]
    assert [call["id"] for call in calls] == ["call_0123456789abcdef0000", "call_0123456789abcdef0001"]


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [
        (ToolChoice(), "tool_calls"),
        (ToolChoice("required"), "tool_calls"),
        (ToolChoice("required", "get_weather"), "stop"),
    ],
)
def test_B45_the_finish_reason_is_the_same_in_both_modes(tool_choice: ToolChoice, reason: str) -> None:
    script = SCRIPTS["tool_call"]
    assert chat_choices(chunks(stream(script, tool_choice=tool_choice)), 1)[0]["finish_reason"] == reason
    assert msgspec.json.decode(body(script, tool_choice=tool_choice))["choices"][0]["finish_reason"] == reason


def test_B40_a_cut_call_ends_with_length() -> None:
    script = (*SCRIPTS["tool_call"][:-1], Finished("length", Usage(10, 5)))
    for tool_choice in (ToolChoice(), ToolChoice("required", "get_weather")):
        assert chat_choices(chunks(stream(script, tool_choice=tool_choice)), 1)[0]["finish_reason"] == "length"


def test_B38_each_call_has_its_own_index() -> None:
    fragments = [
        fragment
        for part in chunks(stream(SCRIPTS["two_tool_calls"]))
        for choice in part["choices"]
        for fragment in choice["delta"].get("tool_calls", [])
    ]
    assert [fragment["index"] for fragment in fragments] == [0, 0, 1, 1]
    assert [fragment["index"] for fragment in fragments if "id" in fragment] == [0, 1]


def test_B47_B48_the_first_fragment_of_a_call_has_all_and_the_others_only_arguments() -> None:
    parts = chunks(stream(SCRIPTS["tool_call"]))
    deltas = [part["choices"][0]["delta"] for part in parts]
    first, *others = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    function = {"name": "get_weather", "arguments": ""}
    assert first == [{"index": 0, "id": "call_a", "type": "function", "function": function}]
    for (fragment,) in others:
        assert set(fragment) == {"index", "function"}
        assert set(fragment["function"]) == {"arguments"}
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]


def test_B60_no_delta_while_reasoning_is_null_or_empty() -> None:
    first, *others = [part["choices"][0]["delta"] for part in chunks(stream(SCRIPTS["reasoning_then_text"]))]
    assert first == {"role": "assistant", "content": ""}
    assert others[:2] == [{"reasoning_content": "Let me"}, {"reasoning_content": " think."}]


def test_B61_usage_is_one_chunk_of_its_own_and_only_where_asked_for() -> None:
    with_usage = chunks(stream(SCRIPTS["text"], include_usage=True))
    assert [part["usage"] is None for part in with_usage] == [True] * (len(with_usage) - 1) + [False]
    assert with_usage[-1]["choices"] == []
    assert not any("usage" in part for part in chunks(stream(SCRIPTS["text"])))


def test_B63_the_index_says_whose_delta_it_is() -> None:
    texts = ["", ""]
    for part in chunks(stream(TWO_CHOICES, n=2)):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["A", "B"]


def test_prompt_progress_is_a_chunk_where_asked_for() -> None:
    parts = chunks(stream(SCRIPTS["reasoning_then_text"], progress=True))
    assert [part["prompt_progress"] for part in parts if "prompt_progress" in part] == [
        {"total": 10, "cache": 2, "processed": 2, "time_ms": 0.0},
        {"total": 10, "cache": 2, "processed": 10, "time_ms": 16.0},
    ]
    assert "role" in parts[0]["choices"][0]["delta"]
    assert not any("prompt_progress" in part for part in chunks(stream(SCRIPTS["reasoning_then_text"])))


@pytest.mark.parametrize(("event", "told"), [(Progress(10, 2, 10, 16.0), [2, 10]), (Progress(2, 2, 10, 0.0), [2])])
def test_progress_begins_with_what_was_cached_and_tells_nothing_twice(event: Progress, told: list[int]) -> None:
    """ "First report has processed == cache" """
    parts = chunks(stream((START, event, *SCRIPTS["text"][1:]), progress=True))
    assert [part["prompt_progress"]["processed"] for part in parts if "prompt_progress" in part] == told


@pytest.mark.parametrize("logprobs", [False, True])
def test_timings_stand_in_every_chunk_that_has_something_to_say(logprobs: bool) -> None:
    """ "`timings_per_token`: every partial result carries `timings`" """
    parts = chunks(stream(TIMED, logprobs=logprobs))
    told = [part["timings"]["predicted_n"] for part in parts if "timings" in part]
    assert told == [1, 2, 3, 5], "reasoning, text, arguments, and the end"
    assert not any("timings" in part for part in chunks(stream(SCRIPTS["tool_call"]))[:-1])


def test_the_end_comes_once() -> None:
    for end in (Finished("stop", Usage(1, 1)), Failed(InternalError("x").info)):
        encoder = CODEC.encoder(call(), STAMP)
        encoder.feed(START)
        encoder.feed(Finished("stop", Usage(1, 1)))
        with pytest.raises(IllegalEvent):
            encoder.feed(end)
    encoder = CODEC.encoder(call(), STAMP)
    encoder.feed(START)
    with pytest.raises(IllegalEvent):
        encoder.feed(Started(1, 0))


def test_keepalives_are_invisible() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    raw = b"".join(encoder.keepalive() + encoder.feed(event) + encoder.keepalive() for event in SCRIPTS["unicode"])
    assert chunks(raw) == chunks(stream(SCRIPTS["unicode"]))
    assert encoder.keepalive() == sse.KEEPALIVE


def test_a_call_without_arguments_has_an_empty_object() -> None:
    *_, call_b = chat_choices(chunks(stream(SCRIPTS["two_tool_calls"])), 1)[0]["tool_calls"]
    assert call_b == {"id": "call_b", "type": "function", "name": "get_time", "arguments": "{}"}
    encoder = CODEC.encoder(call(), STAMP)
    for event in SCRIPTS["tool_call"][:-2]:
        encoder.feed(event)
    assert encoder.feed(ToolCallEnded(0)) == b""


def test_a_client_that_stops_reading_a_failed_stream_still_gets_the_overflow_counts() -> None:
    (part,) = chunks(stream((Failed(ContextOverflow.of(9, 8).info),)))
    assert part["error"]["code"] == "context_length_exceeded"
    assert (part["error"]["param"], part["error"]["n_prompt_tokens"], part["error"]["n_ctx"]) == ("messages", 9, 8)


# --- numbers ------------------------------------------------------------


def numbers(usage: Usage, timings: Timings | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    whole = msgspec.json.decode(body((START, Finished("stop", usage, None, timings))))
    return whole["usage"], whole.get("timings")


def test_usage() -> None:
    usage, timings = numbers(Usage(10, 5, 4, 3), None)
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert timings is None


def test_timings() -> None:
    _, timings = numbers(Usage(10, 5), Timings(2, 8, 16.0, 5, 40.0))
    assert timings == {
        "cache_n": 2,
        "prompt_n": 8,
        "prompt_ms": 16.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 5,
        "predicted_ms": 40.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
    }


def test_guesses_are_counted_where_there_were_any() -> None:
    _, timings = numbers(Usage(10, 5), Timings(2, 8, 16.0, 5, 40.0, draft_n=7, draft_n_accepted=0))
    assert timings is not None
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 0)


@pytest.mark.parametrize("predicted_n", [0, 1])
def test_rates_of_nothing_are_zero(predicted_n: int) -> None:
    _, timings = numbers(Usage(10, 1), Timings(10, 0, 0.0, predicted_n, 0.5))
    assert timings is not None
    assert {key: value for key, value in timings.items() if "per" in key} == {
        "prompt_per_token_ms": 0,
        "prompt_per_second": 0,
        "predicted_per_token_ms": 0,
        "predicted_per_second": 0,
    }
