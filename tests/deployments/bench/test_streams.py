"""What is read of streams: ours, and what other servers write."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from deployments.bench.dialects import Dialect, body, headers
from deployments.bench.prompts import Prompt, Turn
from deployments.bench.streams import MalformedEvent, Reading, error_of, reader
from protocols.sse import ServerSentEvent

PROMPT = Prompt((Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", "Why?")))


def read(dialect: Dialect, *events: object) -> Reading:
    reading = Reading()
    for event in events:
        reader(dialect)(reading, ServerSentEvent(event if isinstance(event, str) else json.dumps(event)))
    return reading


def chat(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_whatever_a_model_says_is_output_and_the_rest_is_not():
    found = read(
        "chat",
        chat(role="assistant", content=""),
        chat(reasoning_content="hm"),
        chat(reasoning="hm"),  # vLLM's name for it
        chat(content="a"),
        chat(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        chat(refusal="no"),
        chat(content=None, unheard_of=1),
    )
    assert (found.outputs, found.ended, found.error) == (5, False, None)


@pytest.mark.parametrize("end", ["[DONE]", {"choices": [{"delta": {}, "finish_reason": "stop"}]}])
def test_a_chat_ends_with_its_reason_or_with_the_marker(end):
    assert read("chat", chat(content="a"), end).ended


def test_usage_of_chat_may_come_in_a_chunk_of_its_own():
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 7}}
    found = read("chat", {"choices": [], "usage": usage})
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 4, 7)


def test_a_completion_is_text():
    found = read("completions", {"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]})
    assert (found.outputs, found.ended) == (1, True)


def test_the_events_of_a_response():
    usage = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 7}}
    found = read(
        "responses",
        {"type": "response.created", "response": {"id": "r", "usage": None}},
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.function_call_arguments.delta", "delta": ""},
        {"type": "response.output_text.done", "text": "a"},
        {"type": "response.incomplete", "response": {"usage": usage}},
    )
    assert (found.outputs, found.ended) == (2, True)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 4, 7)


def test_a_failed_response_is_told_once_in_the_words_of_its_error():
    error = {"code": "rate_limit_exceeded", "message": "slowly"}
    both = [
        {"type": "error", **error},
        {"type": "response.failed", "response": {"error": {"code": "other", "message": "x"}}},
    ]
    assert read("responses", *both).error is not None
    assert read("responses", both[1]).error == ("other", "x")


def test_the_events_of_a_message():
    found = read(
        "messages",
        {"type": "message_start", "message": {"usage": {"input_tokens": 2, "cache_read_input_tokens": 7}}},
        {"type": "ping"},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}},
    )
    assert (found.outputs, found.ended) == (3, False)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 4, 7)
    assert read("messages", {"type": "message_stop"}).ended


def test_llama_cpp_counts_for_itself():
    end = {"content": "", "stop": True, "tokens_predicted": 4, "tokens_evaluated": 9}
    found = read("native", {"content": "a", "stop": False}, end)
    assert (found.outputs, found.ended, found.prompt_tokens, found.output_tokens) == (1, True, 9, 4)


@pytest.mark.parametrize(
    ("dialect", "event", "error"),
    [
        ("chat", {"error": {"message": "m", "type": "t"}}, ("t", "m")),
        ("chat", {"error": "words"}, ("error", "words")),
        ("completions", {"error": {"message": "m", "code": 500}}, ("500", "m")),
        (
            "messages",
            {"type": "error", "error": {"type": "overloaded_error", "message": "m"}},
            ("overloaded_error", "m"),
        ),
        ("native", {"error": {"code": 500, "message": "m", "type": "server_error"}}, ("server_error", "m")),
    ],
)
def test_an_error_in_a_stream(dialect, event, error):
    assert read(dialect, event).error == error


def test_an_error_of_a_stream_without_words_is_an_error():
    assert read("chat", {"error": 7}).error == ("error", "7")
    assert error_of(b"<html>") is None


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_what_is_no_event_of_a_dialect_is_said(dialect):
    with pytest.raises(MalformedEvent, match="half"):
        read(dialect, '{"half')


def test_messages_takes_the_system_prompt_apart():
    found = json.loads(body("messages", "m", PROMPT, 5))
    assert found["system"] == "Be brief."
    assert [turn["role"] for turn in found["messages"]] == ["user", "assistant", "user"]


def test_prompts_without_messages_name_who_speaks_unless_it_is_one():
    assert json.loads(body("completions", "m", PROMPT, 5))["prompt"].startswith("system: Be brief.\n\nuser: Hi")
    assert json.loads(body("native", "m", Prompt((Turn("user", "Hi"),)), 5))["prompt"] == "Hi"


def test_extra_fields_go_over_ours():
    found = json.loads(body("chat", "m", PROMPT, 5, {"max_tokens": 7, "ignore_eos": True}))
    assert (found["max_tokens"], found["ignore_eos"]) == (7, True)


def test_a_key_goes_where_the_dialect_has_it():
    assert headers("chat", "k")["authorization"] == "Bearer k"
    assert headers("messages", "k")["x-api-key"] == "k"
    assert "authorization" not in headers("chat", None) | headers("messages", None)
