"""Chat bodies: what is accepted and as what."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from protocols.openai_chat import CODEC
from protocols.request import (
    ChatPrompt,
    Extras,
    GbnfConstraint,
    ImagePart,
    JsonSchemaConstraint,
    LogprobOptions,
    LoraScale,
    Message,
    Reasoning,
    Request,
    Sampling,
    SlotOptions,
    TextPart,
    TokenBias,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.protocols.openai_chat.bodies import USER, chat, decode, messages, refused_fields

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


def test_B92_unknown_keys_are_ignored() -> None:
    assert decode(user="u", metadata={"a": "b"}, store=True, parallel_tool_calls=True, from_2030=[1]) == decode()


@pytest.mark.parametrize(
    ("stop", "expected"), [("x", ("x",)), ("", ()), ([], ()), ([""], ()), (["x", "y"], ("x", "y"))]
)
def test_stop(stop: Any, expected: tuple[str, ...]) -> None:
    assert decode(stop=stop).stop == expected


def test_B66_max_completion_tokens_wins() -> None:
    assert decode(max_tokens=5).max_tokens == 5
    assert decode(max_completion_tokens=6).max_tokens == 6
    assert decode(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_service_parameters_are_accepted() -> None:
    assert decode(
        user="u", safety_identifier="u", metadata={"a": "b"}, store=True, service_tier="flex",
        prompt_cache_retention="24h", verbosity="low", prediction={"type": "content", "content": "x"},
        stream_options={"include_obfuscation": False}, reasoning_control=True,
    ) == decode()  # fmt: skip


def test_llamacpp_parameters_reach_the_request() -> None:
    request = decode(
        n_predict=9, max_tokens=5, dry_multiplier=0.5, samplers=["top_k"], lora=[{"id": 0, "scale": 1}], id_slot=1
    )
    assert request.max_tokens == 9
    assert request.sampling == Sampling(dry_multiplier=0.5, samplers=("top_k",))
    assert request.lora == (LoraScale(0, 1.0),)
    assert request.slot == SlotOptions(1)


def test_B68_what_is_cached_need_not_be_used() -> None:
    """Sums in another order are other sums: only a prompt that is computed whole each time gives the same bits."""
    assert decode(cache_prompt=False, seed=1, temperature=0).slot == SlotOptions(reuse=False)
    assert decode(cache_prompt=True).slot == decode().slot == SlotOptions()


def test_progress_and_timings_are_asked_for() -> None:
    assert decode(return_progress=True).extras == Extras(progress=True)
    assert decode(timings_per_token=True).extras == Extras(timings=True)
    assert decode(timings_per_token=False, return_progress=None) == decode()


def test_several_choices() -> None:
    assert decode(n=3).n == 3


def test_logprobs() -> None:
    assert decode(logprobs=True).logprobs == LogprobOptions(0)
    assert decode(logprobs=True, top_logprobs=5).logprobs == LogprobOptions(5)
    assert decode(logprobs=True, n_probs=7, post_sampling_probs=True).logprobs == LogprobOptions(7, True)
    assert decode(n_probs=7).logprobs == LogprobOptions(7)
    assert decode(logprobs=False).logprobs is None


def test_logit_bias() -> None:
    assert decode(logit_bias={"5": -100, "7": 1.5}).sampling.logit_bias == (TokenBias(5, -100.0), TokenBias(7, 1.5))


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
def test_B72_an_assistant_message_may_be_empty(content: Any) -> None:
    assert messages(USER, {"role": "assistant", "content": content}, USER)[1] == Message("assistant")
    assert messages(USER, {"role": "assistant"}, USER)[1] == Message("assistant")


def test_B73_a_string_and_one_text_part_are_the_same() -> None:
    for role in ("system", "user", "assistant", "tool"):
        string = messages({"role": role, "content": "same", "tool_call_id": "c"})
        parts = [{"type": "text", "text": "same"}]
        assert messages({"role": role, "content": parts, "tool_call_id": "c"}) == string


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


# --- tools ------------------------------------------------------------

F: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
G: dict[str, Any] = {
    "type": "function",
    "function": {"name": "g", "description": "It is g.", "parameters": {"type": "object"}, "strict": True},
}


def test_tools() -> None:
    nulls = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    assert chat(tools=[F, G]).tools == (Tool("f"), Tool("g", "It is g.", {"type": "object"}, True))
    assert chat(tools=[nulls]) == chat(tools=[F])


@pytest.mark.parametrize(
    ("wire", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("required", "g")),
    ],
)
def test_tool_choice(wire: Any, choice: ToolChoice) -> None:
    prompt = chat(tools=[F, G], tool_choice=wire)
    assert prompt.tool_choice == choice
    assert len(prompt.tools) == 2
    sequential = chat(tools=[F, G], tool_choice=wire, parallel_tool_calls=False).tool_choice
    assert sequential == msgspec.structs.replace(choice, parallel=False)


def test_allowed_tools_are_the_only_ones() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F]}}
    prompt = chat(tools=[F, G], tool_choice=allowed)
    assert prompt.tools == (Tool("f"),)
    assert prompt.tool_choice == ToolChoice("required")


def test_without_tools_there_is_nothing_to_choose() -> None:
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        assert decode(**fields) == decode(tools=[], **fields) == decode()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "expected one of 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "Missing"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "not empty"),
        ({"tools": "f"}, "tools", "expected a list"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
            "expected an object, got a string",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]},
            "tools[0].function.parameters",
            "more than 64 bits",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "no 'tools'"),
        (
            {"tools": [F], "tool_choice": "any"},
            "tool_choice",
            "expected one of 'none', 'auto' or 'required', got 'any'",
        ),
        ({"tools": [F], "tool_choice": 5}, "tool_choice", "expected a string or an object, got 5"),
        ({"tools": [F], "tool_choice": {}}, "tool_choice.type", "Missing"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function", "Missing"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "tool_choice.type", "expected one of"),
        (
            {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "no such function",
        ),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "Missing"),
        (
            {
                "tools": [F],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F, G]}},
            },
            "tool_choice.allowed_tools.tools[1].function.name",
            "no such function",
        ),
    ],
)
def test_wrong_tools(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused_fields(**fields)
    assert error.param == param
    assert param in error.message
    assert words in error.message


# --- constraints ------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonSchemaConstraint({"type": "object"})),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JsonSchemaConstraint(SCHEMA)),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, JsonSchemaConstraint(SCHEMA)),
        ({"response_format": {"type": "text"}, "json_schema": SCHEMA}, JsonSchemaConstraint(SCHEMA)),
        ({"json_schema": SCHEMA}, JsonSchemaConstraint(SCHEMA)),
        ({"grammar": 'root ::= "a"'}, GbnfConstraint('root ::= "a"')),
        ({"grammar": 'root ::= "a"', "tools": [F], "tool_choice": "none"}, GbnfConstraint('root ::= "a"')),
        ({"grammar": "", "json_schema": SCHEMA}, JsonSchemaConstraint(SCHEMA)),
        ({"response_format": {"type": "json_object"}, "tools": [F]}, JsonSchemaConstraint({"type": "object"})),
    ],
)
def test_constraints(fields: dict[str, Any], constraint: Any) -> None:
    assert decode(**fields).constraint == constraint


def test_B70_a_json_schema_is_the_constraint() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": SCHEMA}}
    assert decode(response_format=form).constraint == JsonSchemaConstraint(SCHEMA)
    assert decode(response_format={"type": "json_schema", "json_schema": {"name": "p"}}).constraint == (
        JsonSchemaConstraint({"type": "object"})
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "expected an object, got a string"),
        ({"response_format": {}}, "response_format.type", "Missing"),
        ({"response_format": {"type": "sound"}}, "response_format.type", "expected one of"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema", "expected an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "expected an object",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}, "json_schema": SCHEMA},
            "json_schema",
            "give only one",
        ),
        ({"grammar": "g", "json_schema": SCHEMA}, "grammar", "give only one"),
        ({"grammar": "g", "response_format": {"type": "json_object"}}, "grammar", "give only one"),
        ({"grammar": "g", "tools": [F]}, "grammar", "exclude each other"),
    ],
)
def test_wrong_constraints(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused_fields(**fields)
    assert error.param == param
    assert words in error.message


# --- reasoning ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reasoning", "kwargs"),
    [
        ({"reasoning_effort": "high"}, Reasoning(effort="high"), {}),
        ({"reasoning_effort": ""}, Reasoning(), {}),
        ({"reasoning_effort": "none"}, Reasoning(enabled=False), {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Reasoning(enabled=False), {}),
        ({"chat_template_kwargs": {"enable_thinking": True, "a": [1]}}, Reasoning(enabled=True), {"a": [1]}),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, Reasoning(), {"reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
            Reasoning(effort="high"),
            {},
        ),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, Reasoning(False), {}),
        ({"reasoning_budget_tokens": 7, "thinking_budget_tokens": 9}, Reasoning(budget_tokens=7), {}),
        ({"thinking_budget_tokens": 0}, Reasoning(budget_tokens=0), {}),
        ({"thinking_budget_tokens": -1}, Reasoning(), {}),
        ({"reasoning_format": "auto"}, Reasoning(), {}),
        ({"reasoning_format": "deepseek"}, Reasoning(), {}),
    ],
)
def test_reasoning(fields: dict[str, Any], reasoning: Reasoning, kwargs: dict[str, Any]) -> None:
    prompt = chat(**fields)
    assert prompt.reasoning == reasoning
    assert prompt.template_kwargs == kwargs


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"reasoning_effort": 5}, "reasoning_effort", "expected a string"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "expected an object"),
        ({"chat_template_kwargs": {"a": 10**30}}, "chat_template_kwargs", "more than 64 bits"),
        (
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
            "expected true or false, got a string",
        ),
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens", "at least -1"),
        ({"reasoning_format": "none"}, "reasoning_format", "apart from the text"),
        ({"reasoning_format": "mine"}, "reasoning_format", "expected one of"),
    ],
)
def test_wrong_reasoning(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused_fields(**fields)
    assert error.param == param
    assert words in error.message


# --- an answer that goes on ------------------------------------------------------------

ANSWER = {"role": "assistant", "content": "It is"}
CALLING = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


def test_the_last_assistant_message_is_continued() -> None:
    assert chat(messages=[USER, ANSWER]).continues
    assert not chat(messages=[USER, ANSWER, USER]).continues
    assert chat(messages=[USER, {"role": "assistant", "reasoning_content": "Hm"}]).continues


def test_B74_parts_are_continued_like_a_string() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    assert chat(messages=[USER, parts]) == chat(messages=[USER, ANSWER])


def test_an_empty_beginning_is_none() -> None:
    for empty in ({"role": "assistant"}, {"role": "assistant", "content": ""}):
        assert chat(messages=[USER, empty]) == chat(messages=[USER])
    assert chat(messages=[{"role": "assistant"}]).messages == (Message("assistant"),)


@pytest.mark.parametrize(
    ("fields", "continues"),
    [
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": "content"}, True),
        ({"continue_final_message": False}, False),
        ({"continue_final_message": None, "add_generation_prompt": True}, True),
        ({"add_generation_prompt": False}, True),
    ],
)
def test_continue_final_message(fields: dict[str, Any], continues: bool) -> None:
    assert chat(messages=[USER, ANSWER], **fields).continues is continues


@pytest.mark.parametrize(
    ("messages", "fields", "opens"),
    [
        ([USER], {}, True),
        ([USER], {"add_generation_prompt": False}, False),
        ([USER, ANSWER], {"add_generation_prompt": False, "continue_final_message": False}, False),
        ([USER, ANSWER], {"add_generation_prompt": False}, True),  # it goes on
    ],
)
def test_add_generation_prompt(messages: list[Any], fields: dict[str, Any], opens: bool) -> None:
    assert chat(messages=messages, **fields).opens is opens


def test_reasoning_is_continued() -> None:
    half = {"role": "assistant", "reasoning_content": "Hm"}
    assert chat(messages=[USER, half], continue_final_message="reasoning_content").continues
    for message, wish in ((half, "content"), (ANSWER, "reasoning_content"), (ANSWER | half, "reasoning_content")):
        assert refused_fields(messages=[USER, message], continue_final_message=wish).param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [USER, ANSWER, ANSWER]}, "messages[2]", "two assistant messages"),
        ({"messages": [USER, CALLING]}, "messages[1].tool_calls", "cannot be continued"),
        (
            {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "give only one",
        ),
        ({"continue_final_message": True}, "continue_final_message", "'messages[0]' is no assistant message"),
        ({"messages": [USER, ANSWER], "continue_final_message": 1}, "continue_final_message", "expected true, false"),
        ({"messages": [USER, ANSWER], "continue_final_message": [1]}, "continue_final_message", "expected true"),
    ],
)
def test_wrong_continuations(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused_fields(**fields)
    assert error.param == param
    assert words in error.message
