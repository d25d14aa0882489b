"""Chat bodies: every fault is an `InvalidRequest` naming its path, whatever the bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import InvalidRequest
from protocols.openai_chat import CODEC
from protocols.request import (
    Request,
)
from tests.protocols.openai_chat.bodies import USER, refused, refused_fields

# --- refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "expected a number, got a string"),
        ({"temperature": True}, "temperature", "expected a number, got true"),
        ({"temperature": 2.1}, "temperature", "expected at most 2.0, got 2.1"),
        ({"temperature": -1}, "temperature", "expected at least 0.0, got -1"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"seed": 1.5}, "seed", "expected an integer, got 1.5"),
        ({"seed": 10**40}, "seed", "at most 9223372036854775807"),
        ({"temperature": 10**400}, "temperature", "got a number"),
        ({"max_tokens": 0}, "max_tokens", "expected at least 1, got 0"),
        ({"max_tokens": 1.0}, "max_tokens", "expected an integer, got 1.0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "expected at least 1, got -1"),
        ({"max_tokens": 10**30}, "max_tokens", "at most 2147483647"),
        ({"stream": "yes"}, "stream", "expected true or false, got a string"),
        ({"stream_options": []}, "stream_options", "expected an object, got a list of 0"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "expected true or false, got 1"),
        ({"stop": 5}, "stop", "expected a string or a list, got 5"),
        ({"stop": ["a", 5]}, "stop[1]", "expected a string, got 5"),
        ({"stop": ["x"] * 129}, "stop", "at most 128 items"),
        ({"model": ""}, "model", "a string that is not empty"),
        ({"model": None}, "model", "expected a string, got null"),
        ({"messages": []}, "messages", "expected at least 1 item(s), got a list of 0"),
        ({"messages": "Hi"}, "messages", "expected a list, got a string"),
        ({"messages": ["Hi"]}, "messages[0]", "expected an object, got a string"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"logprobs": 1}, "logprobs", "expected true or false, got 1"),
        ({"top_logprobs": 5}, "top_logprobs", "needs 'logprobs'"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "a number, or false"),
        ({"dry_multiplier": "x"}, "dry_multiplier", "a number"),
    ],
)
def test_wrong_values(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(json.dumps({"model": "m", "messages": [USER], **fields}).encode())
    assert error.param == param
    assert param in error.message
    assert words in error.message


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({}, "role", "Missing required parameter"),
        (
            {"role": "robot", "content": "x"},
            "role",
            "expected one of 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        ({"role": "user"}, "content", "expected a string or a list of parts"),
        ({"role": "user", "content": None}, "content", "expected a string or a list of parts"),
        ({"role": "user", "content": 5}, "content", "expected a string or a list, got 5"),
        ({"role": "user", "content": {"type": "text"}}, "content", "expected a string or a list, got an object"),
        ({"role": "user", "content": ["x"]}, "content[0]", "expected an object, got a string"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type", "Missing"),
        ({"role": "user", "content": [{"type": "video"}]}, "content[0].type", "expected one of 'text', 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "needs it"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "content[0].text", "expected a string, got 5"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].image_url", "needs it"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].image_url.url", "Missing"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
            "content[0].image_url.url",
            "https: or data:",
        ),
        (
            {"role": "system", "content": [{"type": "image_url", "image_url": {"url": "https://x"}}]},
            "content[0].type",
            "a user or tool message",
        ),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0].type", "an assistant message"),
        ({"role": "tool", "content": "x"}, "tool_call_id", "needs the id of the call"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}, "tool_calls[0].function", "Missing"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]},
            "tool_calls[0].function.arguments",
            "expected a string, got an object",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]},
            "tool_calls",
            "only an assistant message",
        ),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "function_call", "not supported"),
        ({"role": "function", "name": "f", "content": "7"}, "role", "expected one of"),
    ],
)
def test_wrong_messages(message: dict[str, Any], param: str, words: str) -> None:
    error = refused(json.dumps({"model": "m", "messages": [USER, message]}).encode())
    assert error.param == f"messages[1].{param}"
    assert error.param in error.message
    assert words in error.message


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("functions", [{"name": "f"}], "use those"),
        ("function_call", {"name": "f"}, "use that"),
        ("modalities", ["text", "audio"], "answers are text"),
        ("audio", {"voice": "x", "format": "wav"}, "answers are text"),
        ("web_search_options", {}, "do not search"),
        ("moderation", {"model": "x"}, "not moderated"),
        ("echo", True, "does not repeat"),
        ("reasoning_budget_message", "Enough.", "without one"),
    ],
)
def test_not_supported(name: str, value: Any, why: str) -> None:
    error = refused_fields(**{name: value})
    assert error.param == name
    assert f"'{name}' is not supported: " in error.message
    assert why in error.message


def test_the_prompt_is_not_in_the_message() -> None:
    for fields in ({"messages": "top secret"}, {"messages": [{"role": "user", "content": [{"text": "top secret"}]}]}):
        assert "secret" not in refused(json.dumps({"model": "m", **fields}).encode()).message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"{", "line 1 column 1"),
        (b'{"model": "m",\n  oops}', "line 2 column 3"),
        (b"[]", "the body is a list of 0"),
        (b'"text"', "the body is a string"),
        (b"null", "the body is null"),
        (b"5", "the body is 5"),
        (b'{"temperature": NaN}', "column 17"),
        (b'{"temperature": -Infinity}', "not valid JSON"),
        (b'{"model": "\xff"}', "invalid unicode"),
        (b"\xff\xfe{\x00}\x00", "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"model": "\xed\xa0\x80"}', "invalid unicode"),
        (b"[" * 50_000, "recursion limit"),
        (b'{"a":' * 50_000, "recursion limit"),
        (b'{"a":' * 1_000 + b"1" + b"}" * 1_000, "recursion limit"),
        (b'{"max_tokens": ' + b"9" * 5_000 + b"}", "out of range"),
        (b"{} {}", "trailing characters"),
        (b'{"model": "a\x00b"}', "control character"),
    ],
)
def test_not_a_json_object(body: bytes, words: str) -> None:
    error = refused(body)
    assert words in error.message
    assert error.param is None


def test_infinite_numbers() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}],"repeat_penalty":1e999}'
    assert refused(body).param == "repeat_penalty"


# --- fuzzing: a call or an `InvalidRequest`, never another exception ------------------------------

_KEYS = st.sampled_from(
    "model messages role content type text image_url url refusal tool_calls id function name arguments stop seed n "
    "temperature max_tokens stream stream_options include_usage tools response_format logprobs top_k parameters schema "
    "json_schema tool_choice logit_bias reasoning_effort chat_template_kwargs enable_thinking grammar".split()
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**100)
    | st.floats()
    | st.sampled_from(
        ["", "m", "user", "assistant", "tool", "text", "image_url", "function", "https://x", "<list>", "\ud800"]
    )
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5), max_leaves=20
)


def survive(body: bytes) -> None:
    try:
        call = CODEC.decode(body, "r1")
    except InvalidRequest as error:
        assert error.message
        json.loads(CODEC.error(error))
    else:
        assert 1 <= call.request.n <= 128
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(call.request), type=Request) == call.request
        assert all(value is None or math.isfinite(value) for value in [call.request.sampling.temperature])


@given(st.binary(max_size=64))
def test_any_bytes(body: bytes) -> None:
    survive(body)


@given(_VALUES)
def test_any_json(value: Any) -> None:
    survive(json.dumps(value).encode())


@given(st.dictionaries(_KEYS, _VALUES, max_size=6), st.lists(st.dictionaries(_KEYS, _VALUES, max_size=6), max_size=3))
def test_nearly_right_bodies(fields: dict[str, Any], extra: list[dict[str, Any]]) -> None:
    survive(json.dumps({"model": "m", "messages": [USER, *extra]} | fields).encode())


@given(st.data())
def test_a_good_body_with_bad_bytes(data: st.DataObject) -> None:
    body = bytearray(json.dumps({"model": "m", "messages": [USER], "seed": 5, "stop": ["ü"]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    survive(bytes(body[: data.draw(st.integers(0, len(body)))]))
