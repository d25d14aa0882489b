"""What goes out: goldens, and the properties that hold for every legal stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sse
from protocols.codec import Stamp
from protocols.errors import BackendLost, ContextOverflow, InternalError, InvalidRequest, Overloaded
from protocols.events import (
    Event,
    Failed,
    Finished,
    IllegalEvent,
    Progress,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from protocols.llamacpp_extras import OutTimings
from protocols.openai_responses import CODEC, Recorder
from protocols.openai_responses.conversation import unseal
from tests.protocols.goldens import answers, error_bodies
from tests.protocols.openai_responses.support import (
    AGENTS,
    FUNCTION,
    PATCH,
    SEARCH,
    body,
    call,
    events,
    read,
    stream,
    untimed,
    visible,
)
from tests.protocols.scripts import SCRIPTS, STAMP, START, TIMINGS, legal_scripts

SUMMARY: dict[str, Any] = {
    "reasoning": {"summary": "auto", "effort": "low"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "store": False,
    "tools": [FUNCTION, PATCH, AGENTS, SEARCH],
    "metadata": {"k": "v"},
    "instructions": "Be brief.",
}
CUSTOM: tuple[Event, ...] = (
    START,
    ToolCallStarted(0, "call_a", "apply_patch"),
    ToolCallDelta(0, '{"input": "*** Be'),
    ToolCallDelta(0, "gin\\n+\\u00"),
    ToolCallDelta(0, 'e9 \\"x\\""}'),
    ToolCallEnded(0),
    ToolCallStarted(1, "call_b", "agents__spawn"),
    ToolCallDelta(1, '{"task":1}'),
    ToolCallEnded(1),
    Finished("tool_calls", Usage(10, 5, 2)),
)


def goldens() -> dict[str, bytes]:
    files = answers(stream, body)
    files["reasoning_then_text.summary.sse"] = stream(SCRIPTS["reasoning_then_text"], **SUMMARY)
    files["reasoning_then_text.summary.json"] = body(SCRIPTS["reasoning_then_text"], **SUMMARY)
    files["progress.sse"] = stream(SCRIPTS["reasoning_then_text"], return_progress=True)
    files["custom.sse"] = stream(CUSTOM, tools=[PATCH, AGENTS])
    files["custom.json"] = body(CUSTOM, tools=[PATCH, AGENTS])
    return files | error_bodies(CODEC)


# --- streams ------------------------------------------------------------

_OPTIONS = st.sampled_from(
    [{}, SUMMARY, {"tools": [{"type": "custom", "name": "f"}]}, {"reasoning": {"summary": "auto"}}]
)


@given(legal_scripts(), _OPTIONS)
def test_concatenated_deltas_are_the_body(script: tuple[Event, ...], options: dict[str, Any]) -> None:
    streamed = read(stream(script, **options))
    whole = untimed(body(script, **options))
    assert visible(streamed) == visible(whole)
    assert {**streamed, "output": None} == {**whole, "output": None}


@given(legal_scripts(), _OPTIONS)
def test_ids_are_unique_and_say_what_they_are_of(script: tuple[Event, ...], options: dict[str, Any]) -> None:
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
    final = read(stream(script, **options))
    assert final["id"] == f"resp_{STAMP.id}"
    ids = [item["id"] for item in final["output"]]
    assert len(set(ids)) == len(ids)
    assert all(item["id"].startswith(prefixes[item["type"]]) for item in final["output"])


@given(legal_scripts(), st.data())
def test_B25_a_failure_ends_the_stream_wherever_it_comes(script: tuple[Event, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(script) - 1))
    raw = stream((*script[:cut], Failed(InternalError("secret").info)))
    final = read(raw)
    assert final["status"] == "failed"
    assert final["error"] == {"code": "server_error", "message": InternalError.PUBLIC_MESSAGE}
    assert b"secret" not in raw


@pytest.mark.parametrize(
    ("error", "code", "event_code"),
    [
        (ContextOverflow.of(9, 8), "context_length_exceeded", "context_length_exceeded"),
        (Overloaded("Full"), "rate_limit_exceeded", "rate_limit_exceeded"),
        (InvalidRequest("No", param="input[0]"), "invalid_prompt", "invalid_request_error"),
        (BackendLost("Lost"), "server_error", "backend_lost"),
    ],
)
def test_B102_a_failure_has_its_words_in_both_events(error: Any, code: str, event_code: str) -> None:
    *_, event, failed = events(stream((START, TextDelta("a"), Failed(error.info))))
    assert (event["type"], event["code"], event["message"]) == ("error", event_code, error.message)
    assert event["param"] == ("input" if isinstance(error, ContextOverflow) else error.param)
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert failed["response"]["output"][0]["status"] == "incomplete"


def test_the_start_comes_with_started_not_with_the_first_text() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    kinds = [event["type"] for event in events(encoder.feed(START))]
    assert kinds == ["response.created", "response.in_progress"]
    assert encoder.feed(TextDelta("")) == b""
    assert encoder.feed(ReasoningDelta("")) == b""


@pytest.mark.parametrize(
    "script",
    [(TextDelta("a"),), (START, Started(1, 0)), (START, Finished("stop", Usage(1, 1)), TextDelta("a"))],
    ids=["before", "twice", "after"],
)
def test_events_out_of_order_are_refused(script: tuple[Event, ...]) -> None:
    with pytest.raises(IllegalEvent):
        stream(script)


def test_keepalives_are_invisible() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    raw = b"".join(encoder.keepalive() + encoder.feed(event) + encoder.keepalive() for event in SCRIPTS["unicode"])
    assert events(raw) == events(stream(SCRIPTS["unicode"]))
    assert encoder.keepalive() == sse.KEEPALIVE


def test_B31_text_has_all_its_events_in_the_official_order() -> None:
    kinds = [event["type"].removeprefix("response.") for event in events(stream(SCRIPTS["length"]))]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]


def test_B26_an_answer_that_was_cut_is_incomplete_and_no_error() -> None:
    streamed = read(stream(SCRIPTS["length"], max_output_tokens=5))
    assert streamed["status"] == "incomplete"
    assert streamed["incomplete_details"] == {"reason": "max_output_tokens"}
    assert streamed["output"][0]["status"] == "incomplete"
    assert streamed["error"] is None
    assert untimed(body(SCRIPTS["length"], max_output_tokens=5)) == streamed


@pytest.mark.parametrize(("last", "status"), [('"x"}', "completed"), ('"x', "incomplete")])
@pytest.mark.parametrize("tool", ["get_weather", "apply_patch"])
def test_B40_a_call_that_was_cut_is_incomplete_and_one_before_the_cut_is_not(tool: str, last: str, status: str) -> None:
    script = (
        START,
        ToolCallStarted(0, "call_a", tool),
        ToolCallDelta(0, '{"input":'),
        ToolCallDelta(0, last),
        ToolCallEnded(0),
        Finished("length", Usage(1, 1)),
    )
    final = read(stream(script, tools=[FUNCTION, PATCH]))
    assert final["status"] == "incomplete"
    assert final["output"][0]["status"] == status
    assert msgspec.json.decode(body(script, tools=[FUNCTION, PATCH])) == final


def test_B24_items_are_the_same_in_every_event() -> None:
    """`read` compares the added, the done and the final item; call ids are the backend's, item ids are not."""
    final = read(stream(SCRIPTS["tool_call"]))
    item = final["output"][1]
    assert (item["id"], item["call_id"]) == (f"fc_{STAMP.id}_1", "call_a")


def test_B30_parallel_calls_are_told_apart() -> None:
    deltas = [e for e in events(stream(CUSTOM, tools=[PATCH, AGENTS])) if e["type"].endswith(".delta")]
    assert {(event["output_index"], event["item_id"]) for event in deltas} == {
        (0, f"ctc_{STAMP.id}_0"),
        (1, f"fc_{STAMP.id}_1"),
    }


def test_B10_a_call_without_arguments_has_an_empty_object() -> None:
    final = read(stream(SCRIPTS["two_tool_calls"]))
    assert [item["arguments"] for item in final["output"]] == ['{"city":"Bern"}', "{}"]


def test_B21_custom_and_namespaced_calls_come_back_as_they_were_declared() -> None:
    patch, spawn = read(stream(CUSTOM, tools=[PATCH, AGENTS]))["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", '*** Begin\n+é "x"')
    assert "namespace" not in patch
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert spawn["arguments"] == '{"task":1}'


def test_B32_nested_responses_are_whole_and_usage_has_its_details() -> None:
    created = events(stream(SCRIPTS["text"], tools=[FUNCTION]))[0]["response"]
    assert created["tools"] == [{**FUNCTION, "description": None, "strict": True}]
    for name in ("tool_choice", "parallel_tool_calls", "metadata", "instructions", "text", "temperature", "top_p"):
        assert name in created
    usage = read(stream(SCRIPTS["reasoning_then_text"]))["usage"]
    assert usage == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 8},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 15,
    }


def test_B33_reasoning_is_sealed_for_clients_that_keep_nothing_else() -> None:
    (done,) = [
        event["item"]
        for event in events(stream(SCRIPTS["reasoning_then_text"], include=["reasoning.encrypted_content"]))
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "reasoning"
    ]
    assert unseal(done["encrypted_content"]) == "Let me think."
    assert read(stream(SCRIPTS["reasoning_then_text"]))["output"][0]["encrypted_content"] is None


def test_late_reasoning_is_an_item_of_its_own() -> None:
    script = (START, TextDelta("a"), ReasoningDelta("b"), TextDelta("c"), Finished("stop", Usage(1, 3)))
    assert [item["type"] for item in read(stream(script))["output"]] == ["message", "reasoning", "message"]


def test_logprobs() -> None:
    top = TokenLogprob(2, b"\xe9", float("-inf"))
    script = (
        START,
        TextDelta("é", (TokenLogprob(1, "é".encode(), -0.5, (top,)),)),
        Finished("stop", Usage(1, 1)),
    )
    entry = {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [{"token": "", "bytes": [233], "logprob": -3.4028234663852886e38}],
    }
    found = events(stream(script, top_logprobs=1))
    assert [e["logprobs"] for e in found if e["type"].startswith("response.output_text.")] == [[entry], [entry]]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]
    assert msgspec.json.decode(body(script, top_logprobs=1))["output"] == found[-1]["response"]["output"]


def test_the_end_is_known_of_what_was_completed() -> None:
    for name, at in (("text", 1_700_000_009), ("length", None), ("failed_mid_stream", None)):
        assert read(stream(SCRIPTS[name]))["completed_at"] == at
    assert msgspec.json.decode(body(SCRIPTS["text"]))["completed_at"] == 1_700_000_009
    without_clock = CODEC.encoder(call(), Stamp("a", 1))
    raw = b"".join(without_clock.feed(event) for event in SCRIPTS["text"])
    assert events(raw)[-1]["response"]["completed_at"] is None


def test_timings_are_in_a_body_and_beside_the_response_of_a_stream() -> None:
    timings = msgspec.json.decode(msgspec.json.encode(OutTimings.of(TIMINGS)))
    assert msgspec.json.decode(body(SCRIPTS["length"]))["timings"] == timings
    last = events(stream(SCRIPTS["length"]))[-1]
    assert last["timings"] == timings
    assert "timings" not in last["response"]
    script = (START, Finished("stop", Usage(1, 0)))
    assert "timings" not in events(stream(script))[-1]
    assert b"timings" not in body(script)


def test_timings_per_token_come_with_the_deltas() -> None:
    call_ = (ToolCallStarted(0, "a", "f"), ToolCallDelta(0, "{}", timings=TIMINGS), ToolCallEnded(0))
    script = (START, ReasoningDelta("r", timings=TIMINGS), TextDelta("a", timings=TIMINGS), TextDelta("b"), *call_)
    deltas = [e for e in events(stream(script)) if e["type"].endswith(".delta")]
    timings = msgspec.json.decode(msgspec.json.encode(OutTimings.of(TIMINGS)))
    assert [e.get("timings") for e in deltas] == [timings, timings, None, timings]


def test_progress_is_told_where_it_was_asked_for() -> None:
    told = (Progress(2, 2, 10, 0.5), Progress(4, 2, 10, 1.5), Progress(10, 2, 10, 2.5))
    script = (START, *told, TextDelta("a"), Finished("stop", Usage(10, 1)))
    asked = events(stream(script, return_progress=True))
    assert [e["prompt_progress"] for e in asked if "prompt_progress" in e] == [
        {"total": 10, "cache": 2, "processed": 2, "time_ms": 0.0},
        {"total": 10, "cache": 2, "processed": 4, "time_ms": 1.5},
        {"total": 10, "cache": 2, "processed": 10, "time_ms": 2.5},
    ]
    assert read(stream(script, return_progress=True)) == read(stream(script))
    assert sum(e["type"] == "response.in_progress" for e in events(stream(script))) == 1


# --- what is stored ------------------------------------------------------------


@given(legal_scripts(), st.booleans())
def test_the_record_is_what_the_client_got(script: tuple[Event, ...], streamed: bool) -> None:
    recorder = Recorder(call(stream=streamed), STAMP)
    for event in script:
        assert recorder.record is None
        recorder.feed(event)
    assert recorder.record is not None
    got = read(stream(script)) if streamed else json.loads(body(script))
    assert json.loads(bytes(recorder.record.response)) == got
    assert recorder.record.id == got["id"]


def test_a_failed_stream_has_a_record_too() -> None:
    recorder = Recorder(call(), STAMP)
    for event in SCRIPTS["failed_mid_stream"]:
        recorder.feed(event)
    assert recorder.record is not None
    assert json.loads(bytes(recorder.record.response)) == read(stream(SCRIPTS["failed_mid_stream"]))
