"""Chat bodies: what is accepted and as what, and that every fault is an `InvalidRequest` naming its path."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import InvalidRequest
from protocols.openai_chat import CODEC
from protocols.request import ChatPrompt, ImagePart, Message, Request, Sampling, TextPart, ToolCall

USER = {"role": "user", "content": "Hi"}


def decode(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    return CODEC.decode(json.dumps(body).encode(), "r1").request


def messages(*wire: dict[str, Any]) -> tuple[Message, ...]:
    prompt = decode(messages=list(wire)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(body, "r1")
    return caught.value


# --- accepted ------------------------------------------------------------


def test_minimal() -> None:
    call = CODEC.decode(json.dumps({"model": "m", "messages": [USER]}).encode(), "r1")
    assert call.request == Request("r1", "m", ChatPrompt((Message("user", (TextPart("Hi"),)),)))
    assert call.stream is False
    assert call.options.include_usage is False


def test_everything() -> None:
    request = decode(
        temperature=1,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repeat_penalty=1.1,
        seed=-1,
        stop=["a", "", "b"],
        max_tokens=7,
        ignore_eos=True,
        n=1,
    )
    assert request.sampling == Sampling(
        temperature=1.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repeat_penalty=1.1,
        seed=-1,
    )
    assert isinstance(request.sampling.temperature, float)
    assert request.stop == ("a", "b")
    assert request.max_tokens == 7
    assert request.ignore_eos


@pytest.mark.parametrize(
    ("stream_options", "include_usage"), [(None, False), ({}, False), ({"include_usage": True}, True)]
)
def test_stream(stream_options: dict[str, Any] | None, include_usage: bool) -> None:
    body = {"model": "m", "messages": [USER], "stream": True, "stream_options": stream_options}
    call = CODEC.decode(json.dumps(body).encode(), "r1")
    assert call.stream
    assert call.options.include_usage is include_usage


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "seed", "stop", "max_tokens", "n", "stream", "stream_options", "tools", "tool_choice"]
        + ["response_format", "logprobs", "top_logprobs", "logit_bias", "audio", "modalities", "ignore_eos"]
    )
    assert decode(**nulls) == decode()


def test_what_asks_for_nothing_is_fine() -> None:
    assert decode(
        tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False, top_logprobs=0, logit_bias={},
        modalities=["text"],
    ) == decode()  # fmt: skip


def test_unknown_keys_are_ignored() -> None:
    assert decode(user="u", metadata={"a": "b"}, store=True, parallel_tool_calls=True, from_2030=[1]) == decode()


@pytest.mark.parametrize(
    ("stop", "expected"), [("x", ("x",)), ("", ()), ([], ()), ([""], ()), (["x", "y"], ("x", "y"))]
)
def test_stop(stop: Any, expected: tuple[str, ...]) -> None:
    assert decode(stop=stop).stop == expected


def test_max_completion_tokens_wins() -> None:
    assert decode(max_tokens=5).max_tokens == 5
    assert decode(max_completion_tokens=6).max_tokens == 6
    assert decode(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_roles_and_a_tool_turn() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert messages(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "No lists."}]},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "call_1"},
        {"role": "assistant", "content": "Seven."},
    ) == (
        Message("system", (TextPart("Be brief."),)),
        Message("developer", (TextPart("No lists."),)),
        Message("user", (TextPart("Hi"),), name="ann"),
        Message("assistant", (), reasoning="Hm.", tool_calls=(ToolCall("call_1", "f", '{"a":1}'),)),
        Message("tool", (TextPart("7"),), tool_call_id="call_1"),
        Message("assistant", (TextPart("Seven."),)),
    )


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_assistant_message_may_be_empty(content: Any) -> None:
    assert messages(USER, {"role": "assistant", "content": content})[1] == Message("assistant")
    assert messages(USER, {"role": "assistant"})[1] == Message("assistant")


def test_a_string_and_one_text_part_are_the_same() -> None:
    for role in ("system", "user", "assistant"):
        string = messages({"role": role, "content": "same"})
        assert messages({"role": role, "content": [{"type": "text", "text": "same"}]}) == string


def test_images() -> None:
    url = "data:image/png;base64,AAAA"
    (message,) = messages(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            ],
        }
    )
    assert message.content == (TextPart("What is this?"), ImagePart(url))


def test_refusals_are_replayed_as_text() -> None:
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    field = {"role": "assistant", "content": None, "refusal": "No."}
    assert messages(part) == messages(field) == (Message("assistant", (TextPart("No."),)),)


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
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"model": ""}, "model", "a string that is not empty"),
        ({"model": None}, "model", "expected a string, got null"),
        ({"messages": []}, "messages", "expected at least 1 item(s), got a list of 0"),
        ({"messages": "Hi"}, "messages", "expected a list, got a string"),
        ({"messages": ["Hi"]}, "messages[0]", "expected an object, got a string"),
        ({"n": 2}, "n", "'n' must be 1"),
        ({"n": 0}, "n", "at least 1"),
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
    ],
)
def test_wrong_messages(message: dict[str, Any], param: str, words: str) -> None:
    error = refused(json.dumps({"model": "m", "messages": [USER, message]}).encode())
    assert error.param == f"messages[1].{param}"
    assert error.param in error.message
    assert words in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", "text"),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("logit_bias", {"5": 1}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x", "format": "wav"}),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {}),
    ],
)
def test_not_supported_yet(name: str, value: Any) -> None:
    error = refused(json.dumps({"model": "m", "messages": [USER], name: value}).encode())
    assert error.param == name
    assert f"'{name}' is not supported yet" in error.message


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
        (b"[" * 100_000, "recursion limit"),
        (b'{"a":' * 100_000, "recursion limit"),
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
    "temperature max_tokens stream stream_options include_usage tools response_format logprobs top_k".split()
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
        assert call.request.n == 1
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
