"""What goes out: goldens, and the properties that hold for every legal stream."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import errors
from protocols.anthropic_messages import CODEC, MessagesOptions
from protocols.codec import Call
from protocols.errors import ContextOverflow, ErrorInfo, InternalError, ServingError
from protocols.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    IllegalEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from protocols.request import ChatPrompt, Message, Request, TextPart
from tests.protocols.anthropic_messages import checker
from tests.protocols.goldens import answers, error_bodies
from tests.protocols.scripts import SCRIPTS, STAMP, START, collected, encoded, legal_scripts

Thinking = Literal["shown", "omitted", "none"]

THINKING: tuple[Thinking, ...] = ("shown", "omitted", "none")


def call(thinking: Thinking = "shown") -> Call[MessagesOptions]:
    prompt = ChatPrompt((Message("user", (TextPart("Hi"),)),))
    return Call((Request("r1", 'mo"del/ü', prompt),), stream=True, options=MessagesOptions(thinking))


def stream(script: tuple[Event, ...], thinking: Thinking = "shown") -> bytes:
    return encoded(CODEC.encoder(call(thinking), STAMP), script)


def body(script: tuple[Event, ...], thinking: Thinking = "shown") -> bytes:
    return CODEC.render(call(thinking), STAMP, collected(script))


def answer(*events: Event, thinking: Thinking = "shown", reason: FinishReason = "stop", **end: Any) -> dict[str, Any]:
    """The message of a stream and of a body, which are the same."""
    script = (START, *events, Finished(reason, Usage(10, 5, 2, 3), **end))
    streamed = checker.message(stream(script, thinking))
    assert streamed == json.loads(body(script, thinking))
    return streamed


def goldens() -> dict[str, bytes]:
    files = answers(stream, body)
    for thinking in THINKING[1:]:
        files[f"reasoning_then_text.{thinking}.sse"] = stream(SCRIPTS["reasoning_then_text"], thinking)
        files[f"reasoning_then_text.{thinking}.json"] = body(SCRIPTS["reasoning_then_text"], thinking)
    return files | error_bodies(CODEC)


# --- every legal stream ------------------------------------------------------------


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """A body has one block of text and one of thinking, where a stream may have several."""
    blocks = message["content"]
    return {
        **message,
        "content": [block for block in blocks if block["type"] == "tool_use"],
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "thinking": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "kinds": {block["type"] for block in blocks},
    }


@given(legal_scripts(), st.sampled_from(THINKING))
def test_a_stream_builds_up_the_body(script: tuple[Event, ...], thinking: Thinking) -> None:
    assert flat(checker.message(stream(script, thinking))) == flat(json.loads(body(script, thinking)))


@given(legal_scripts(complete=False), st.sampled_from(THINKING))
def test_a_stream_may_fail_anywhere(script: tuple[Event, ...], thinking: Thinking) -> None:
    if isinstance(script[-1], Finished):
        return
    failed = Failed(ErrorInfo("backend_lost", "The replica was lost"))
    _, error = checker.begun(stream((*script, failed), thinking))
    assert error == {
        "type": "error",
        "error": {"type": "api_error", "message": "The replica was lost"},
        "request_id": "r1",
    }


@given(legal_scripts(), st.lists(st.integers(0, 12)))
def test_pings_may_come_anywhere(script: tuple[Event, ...], places: list[int]) -> None:
    encoder = CODEC.encoder(call(), STAMP)
    raw = b"".join(
        encoder.keepalive() * places.count(i) + encoder.feed(event) for i, event in enumerate(script)
    )  # fmt: skip
    assert checker.message(raw) == checker.message(stream(script))


def test_a_stream_begins_and_ends_once() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    encoder.feed(START)
    with pytest.raises(IllegalEvent):
        encoder.feed(START)
    encoder.feed(Finished("stop", Usage(10, 0)))
    with pytest.raises(IllegalEvent):
        encoder.feed(Finished("stop", Usage(10, 0)))


def test_a_failure_before_anything_is_an_error_event_alone() -> None:
    assert checker.begun(stream((Failed(ErrorInfo("unavailable", "Try later")),))) == (
        [],
        {"type": "error", "error": {"type": "overloaded_error", "message": "Try later"}, "request_id": "r1"},
    )


# --- blocks ------------------------------------------------------------

CALL: tuple[Event, ...] = (ToolCallStarted(0, "call_a", "f"), ToolCallDelta(0, '{"a": 1}'), ToolCallEnded(0))
TOOL_USE = {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"a": 1}}
SIGNATURE = "dG9rZW55YXJkLzE6MDEyMzQ1Njc4OWFiY2RlZg=="


def test_B01_thinking_text_and_a_call_are_blocks_0_1_2() -> None:
    said = answer(ReasoningDelta("Hm."), TextDelta("One moment."), *CALL, reason="tool_calls")
    assert said["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
        {"type": "text", "text": "One moment."},
        TOOL_USE,
    ]


def test_B02_blocks_have_indices_of_their_own_whatever_the_call_has() -> None:
    """A call of index 0 behind reasoning and text, and one of index 1 behind more text: deltas go where they belong."""
    second = (ToolCallStarted(1, "call_b", "g"), ToolCallDelta(1, "{}"), ToolCallEnded(1))
    script = (START, ReasoningDelta("Hm."), TextDelta("So"), *CALL, TextDelta("and"), *second)
    found = checker.events(stream((*script, Finished("tool_calls", Usage(10, 5)))))
    placed = [(e["index"], e["content_block"]["type"]) for e in found if e["type"] == "content_block_start"]
    assert placed == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "text"), (4, "tool_use")]
    fitting = {
        "thinking_delta": {0}, "signature_delta": {0}, "text_delta": {1, 3}, "input_json_delta": {2, 4},
    }  # fmt: skip
    deltas: dict[str, set[int]] = {}
    for event in found:
        if event["type"] == "content_block_delta":
            deltas.setdefault(event["delta"]["type"], set()).add(event["index"])
    assert deltas == fitting


def test_B03_late_thinking_closes_the_text_and_opens_its_own_block() -> None:
    script = (START, TextDelta("So"), ReasoningDelta("Hm."), *CALL, Finished("tool_calls", Usage(10, 5)))
    kinds = [block["type"] for block in checker.message(stream(script))["content"]]
    assert kinds == ["text", "thinking", "tool_use"]


def test_B04_a_call_behind_text_is_a_tool_use_and_no_block_is_empty() -> None:
    said = answer(TextDelta(""), TextDelta("Word."), TextDelta(""), *CALL, reason="tool_calls")
    assert said["stop_reason"] == "tool_use"
    assert said["content"] == [{"type": "text", "text": "Word."}, TOOL_USE]
    assert answer(*CALL, reason="tool_calls")["content"] == [TOOL_USE]


def test_B04_a_limit_wins_over_a_call() -> None:
    assert answer(*CALL, reason="length")["stop_reason"] == "max_tokens"


def test_B05_cached_tokens_are_told_at_the_start() -> None:
    (first, *_) = checker.events(stream((START, Finished("stop", Usage(10, 5, 2)))))
    assert first["message"]["usage"]["input_tokens"] == 8
    assert first["message"]["usage"]["cache_read_input_tokens"] == 2


@given(legal_scripts(), st.sampled_from(THINKING))
def test_B06_every_start_and_end_tells_its_usage(script: tuple[Event, ...], thinking: Thinking) -> None:
    found = checker.events(stream(script, thinking))
    (start,) = [e["message"]["usage"] for e in found if e["type"] == "message_start"]
    (end,) = [e["usage"] for e in found if e["type"] == "message_delta"]
    for usage in (start, end):
        assert type(usage["input_tokens"]) is int and type(usage["output_tokens"]) is int


def test_B07_thinking_is_sealed_once_just_before_it_ends() -> None:
    found = checker.events(stream((START, ReasoningDelta("Hm."), TextDelta("42"), Finished("stop", Usage(10, 5)))))
    kinds = [e["delta"]["type"] if e["type"] == "content_block_delta" else e["type"] for e in found[1:5]]
    assert kinds == ["content_block_start", "thinking_delta", "signature_delta", "content_block_stop"]
    assert answer(ReasoningDelta("Hm."))["content"][0]["signature"] == SIGNATURE


def test_B08_omitted_thinking_is_a_signature_that_brings_it_back() -> None:
    said = answer(ReasoningDelta("Let me"), ReasoningDelta(" think."), TextDelta("42"), thinking="omitted")
    thinking, text = said["content"]
    assert (thinking["thinking"], text["text"]) == ("", "42")
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said["content"]}]
    raw = json.dumps({"model": "m", "messages": [*history, {"role": "user", "content": "And?"}]}).encode()
    prompt = CODEC.decode(raw, "r1").request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == Message("assistant", (TextPart("42"),), reasoning="Let me think.")


@pytest.mark.parametrize("arguments", ["", "{}", " "])
def test_B09_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    script = (
        (START, ToolCallStarted(0, "call_a", "f"), ToolCallDelta(0, arguments), ToolCallEnded(0))
        + (Finished("tool_calls", Usage(10, 5)),)
    )  # fmt: skip
    assert checker.message(stream(script)) == json.loads(body(script))
    deltas = [e["delta"] for e in checker.events(stream(script)) if e["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == "{}"


def test_B10_arguments_that_come_at_once_are_a_delta_too() -> None:
    events = checker.events(stream((START, *CALL, Finished("tool_calls", Usage(10, 5)))))
    start, delta = (e for e in events if e["type"] in ("content_block_start", "content_block_delta"))
    assert start["content_block"]["input"] == {}
    assert json.loads(delta["delta"]["partial_json"]) == {"a": 1}


def test_B11_a_stop_sequence_is_named() -> None:
    said = answer(TextDelta("One"), stop_sequence="STOP")
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "STOP")
    said = answer(TextDelta("One"))
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)


def test_a_stop_sequence_behind_a_call_does_not_hide_it() -> None:
    said = answer(TextDelta("So"), *CALL, stop_sequence="STOP")
    assert (said["stop_reason"], said["stop_sequence"]) == ("tool_use", None)


def test_B12_thinking_is_counted_in_the_output_and_beside_it() -> None:
    usage = answer(ReasoningDelta("Hm."), thinking="none")["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (5, {"thinking_tokens": 3})


def test_B15_thinking_nobody_asked_for_is_no_block() -> None:
    assert answer(ReasoningDelta("Hm."), TextDelta("42"), thinking="none")["content"] == [
        {"type": "text", "text": "42"}
    ]


@pytest.mark.parametrize("thinking", THINKING)
def test_an_empty_answer_is_an_empty_text(thinking: Thinking) -> None:
    empty = {"type": "text", "text": ""}
    assert answer(thinking=thinking)["content"] == [empty]
    assert answer(ReasoningDelta("Hm."), thinking=thinking)["content"][-1] == empty


def test_a_call_that_was_cut_or_is_no_json_is_an_object_in_both_modes() -> None:
    for arguments, value in (('{"a": "b', {"a": "b"}), ('{"a": 1, b}', {"a": 1}), ("no", {})):
        call = (ToolCallStarted(0, "call_a", "f"), ToolCallDelta(0, arguments), ToolCallEnded(0))
        assert answer(*call, reason="length")["content"] == [{**TOOL_USE, "input": value}]


@pytest.mark.parametrize(
    ("given", "sent"),
    [("", "toolu_0123456789abcdef01"), ("call_x", "toolu_x"), ("toolu_x", "toolu_x"), ("9chars123", "9chars123")],
)
def test_ids_of_calls(given: str, sent: str) -> None:
    second = (ToolCallStarted(1, given, "f"), ToolCallEnded(1))
    assert answer(*CALL, *second, reason="tool_calls")["content"][1]["id"] == sent


# --- errors ------------------------------------------------------------


def every_error() -> list[type[ServingError]]:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ServingError)]
    return [kind for kind in kinds if kind is not ServingError]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.kind)
def test_every_error_has_a_type_that_fits_its_status(kind: type[ServingError]) -> None:
    error = json.loads(CODEC.error(kind("Said.")))
    assert set(error) == {"type", "error"}
    assert error["type"] == "error"
    fitting = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        429: "rate_limit_error",
        431: "request_too_large",
        504: "timeout_error",
    }
    if kind.status == 503:
        assert error["error"]["type"] in ("api_error", "overloaded_error")
    else:
        assert error["error"]["type"] == fitting.get(kind.status, "api_error")
    if kind is not ContextOverflow:
        assert error["error"]["message"] == (InternalError.PUBLIC_MESSAGE if kind is InternalError else "Said.")


def test_B79_an_overflow_is_in_the_words_claude_code_knows() -> None:
    assert json.loads(CODEC.error(ContextOverflow.of(9000, 8192)))["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 9000 tokens > 8192 maximum",
        "n_prompt_tokens": 9000,
        "n_ctx": 8192,
    }


def test_an_error_of_another_version_is_internal() -> None:
    _, error = checker.begun(stream((Started(1, 0), Failed(ErrorInfo("from_2030", "secret")))))
    assert error["error"] == {"type": "api_error", "message": InternalError.PUBLIC_MESSAGE}
