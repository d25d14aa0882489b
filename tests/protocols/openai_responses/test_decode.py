"""What comes in: items, tools and parameters, recorded bodies of real clients, and what is refused by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.codec import Stamp
from protocols.errors import InvalidRequest, NotFound
from protocols.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted, Usage
from protocols.openai_responses import CODEC, Recorder, StoredResponse, ancestors, decode, read
from protocols.openai_responses.conversation import seal, unseal
from protocols.request import (
    ChatPrompt,
    Extras,
    ImagePart,
    JsonSchemaConstraint,
    LogprobOptions,
    Message,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.protocols.openai_responses.support import AGENTS, FUNCTION, PATCH, SEARCH, call, prompt
from tests.protocols.scripts import STAMP, START

CAPTURES = Path(__file__).parents[4] / "shared" / "data" / "client-captures"


def text(value: str) -> tuple[TextPart, ...]:
    return (TextPart(value),)


def messages(input: object, **fields: Any) -> tuple[Message, ...]:
    return prompt(input=input, **fields).messages


USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def output(value: object, type_: str = "function_call_output") -> dict[str, Any]:
    return {"type": type_, "call_id": "c1", "output": value}


# --- input ------------------------------------------------------------


def test_a_string_is_a_user_message() -> None:
    assert messages("Hi") == messages([USER]) == (Message("user", text("Hi")),)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": "Hi", "id": "msg_1", "status": "completed"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_text", "text": ""}, {"type": "input_text", "text": "Hi"}]},
    ],
)
def test_B74_a_string_and_a_list_of_one_text_are_the_same_message(item: dict[str, Any]) -> None:
    assert messages([item]) == messages("Hi")


def test_B13_system_and_developer_messages_stay_where_they_are() -> None:
    roles = ("developer", "user", "system", "assistant", "developer")
    found = messages([{"role": role, "content": role} for role in roles])
    assert [(message.role, message.text) for message in found] == [(role, role) for role in roles]


def test_B29_instructions_come_first() -> None:
    found = messages([{"role": "developer", "content": "d"}, USER], instructions="i")
    assert [(message.role, message.text) for message in found] == [("system", "i"), ("developer", "d"), ("user", "Hi")]


def test_the_items_of_an_assistants_turn_are_one_message() -> None:
    found = messages(
        [
            USER,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
        ]
    )
    assert found[1:] == (
        Message("assistant", text("a"), "r", (ToolCall("c1", "f", '{"x":1}'), ToolCall("c2", "g", ""))),
        Message("tool", text("1"), tool_call_id="c1"),
        Message("tool", text("2"), tool_call_id="c2"),
    )


def test_what_comes_after_calls_is_the_next_message() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
    found = messages([USER, CALL, {"role": "assistant", "content": "a"}, reasoning, {**CALL, "call_id": "c2"}])
    assert [(m.text, m.reasoning, len(m.tool_calls)) for m in found[1:]] == [
        ("", None, 1),
        ("a", None, 0),
        ("", "s", 1),
    ]


@pytest.mark.parametrize("type_", ["function_call_output", "custom_tool_call_output"])
@pytest.mark.parametrize(
    "value", ["42", [{"type": "input_text", "text": "42"}], [{"type": "output_text", "text": "42"}]]
)
def test_B22_outputs_are_text_or_parts(value: object, type_: str) -> None:
    assert messages([USER, CALL, output(value, type_)])[-1] == Message("tool", text("42"), tool_call_id="c1")


def test_B17_an_image_in_an_output_is_kept() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    assert messages([USER, CALL, output([image])])[-1].content == (ImagePart("data:image/png;base64,AA"),)


def test_images_and_refusals() -> None:
    image = {"type": "input_image", "image_url": "https://x/y.png"}
    found = messages(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    )
    assert found[0].content == (TextPart("a"), ImagePart("https://x/y.png"))
    assert found[1].text == "No."


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"content": [{"text": "raw"}], "summary": [{"text": "short"}], "encrypted_content": seal("x")}, "raw"),
        ({"summary": [{"text": "short"}], "encrypted_content": seal("raw")}, "raw"),
        ({"summary": [{"text": "a"}, {"text": "b"}], "encrypted_content": "gAAAAABforeign"}, "a\n\nb"),
        ({"summary": [], "encrypted_content": None, "content": None}, None),
        ({"summary": [], "encrypted_content": "ty1.not base64"}, None),
    ],
)
def test_B33_reasoning_is_read_from_whatever_there_is(item: dict[str, Any], reasoning: str | None) -> None:
    found = messages([USER, {"type": "reasoning", "id": "rs_1", **item}, {"role": "assistant", "content": "a"}])
    assert found[-1] == Message("assistant", text("a"), reasoning)


def test_a_seal_opens_again() -> None:
    for value in ("", "a", "Ünï 👩 \n" * 100):
        assert unseal(seal(value)) == value
    assert unseal("ty1.//8=") is None
    assert unseal(seal("x")[:-1]) is None


def test_B23_additional_tools_are_added_and_unknown_items_skipped() -> None:
    found = prompt(
        input=[
            {"type": "additional_tools", "role": "developer", "tools": [AGENTS]},
            {"type": "tool_search_output", "call_id": None, "tools": [FUNCTION]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "from_the_future", "x": [1]},
            USER,
        ]
    )
    assert [tool.name for tool in found.tools] == ["agents__spawn", "get_weather"]
    assert found.messages == (Message("user", text("Hi")),)


# --- tools ------------------------------------------------------------


def test_B21_tools_of_all_types() -> None:
    found = prompt(tools=[FUNCTION, PATCH, AGENTS, SEARCH, {"type": "image_generation"}, {"type": "from_the_future"}])
    assert [tool.name for tool in found.tools] == ["get_weather", "apply_patch", "agents__spawn"]
    assert found.tools[1] == Tool(
        "apply_patch",
        "Edits files.",
        {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
        True,
    )
    assert found.tool_choice == ToolChoice()


def test_a_grammar_of_a_custom_tool_is_told_to_the_model() -> None:
    format_ = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    (tool,) = prompt(tools=[{**PATCH, "format": format_}]).tools
    assert tool.description == 'Edits files.\n\nThe input must match this lark grammar:\nstart: "x"'


@pytest.mark.parametrize(("given", "strict"), [({}, True), ({"strict": None}, True), ({"strict": False}, False)])
def test_strict_is_the_default(given: dict[str, Any], strict: bool) -> None:
    assert prompt(tools=[{**FUNCTION, **given}]).tools[0].strict is strict


def test_a_tool_that_is_sent_again_is_one_tool() -> None:
    found = prompt(tools=[FUNCTION, PATCH], input=[{"type": "additional_tools", "tools": [FUNCTION]}, USER])
    assert [tool.name for tool in found.tools] == ["get_weather", "apply_patch"]


def test_history_calls_have_the_names_the_model_knows() -> None:
    (_, found) = messages(
        [
            USER,
            {"type": "function_call", "call_id": "c1", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a"\n'},
        ]
    )
    assert found.tool_calls == (
        ToolCall("c1", "agents__spawn", "{}"),
        ToolCall("c2", "apply_patch", '{"input":"a\\"\\n"}'),
    )


TOOLS = [FUNCTION, PATCH, AGENTS, SEARCH]


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        (None, 3, ToolChoice()),
        ("auto", 3, ToolChoice()),
        ("none", 3, ToolChoice("none")),
        ("required", 3, ToolChoice("required")),
        ({"type": "function", "name": "get_weather"}, 3, ToolChoice("required", "get_weather")),
        ({"type": "function", "name": "spawn"}, 3, ToolChoice("required", "agents__spawn")),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, 3, ToolChoice("required", "agents__spawn")),
        ({"type": "custom", "name": "apply_patch"}, 3, ToolChoice("required", "apply_patch")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}, SEARCH]},
            1,
            ToolChoice("required"),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]},
            1,
            ToolChoice(),
        ),
    ],
)
def test_tool_choice(choice: object, names: int, expected: ToolChoice) -> None:
    found = prompt(tools=TOOLS, tool_choice=choice)
    assert (len(found.tools), found.tool_choice) == (names, expected)


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ("any", TOOLS, "tool_choice"),
        ("required", [SEARCH], "tool_choice"),
        ("required", [], "tool_choice"),
        ({"type": "web_search_preview"}, TOOLS, "tool_choice.type"),
        ({"type": "mcp", "server_label": "x"}, TOOLS, "tool_choice.type"),
        ({}, TOOLS, "tool_choice.type"),
        ({"type": 1}, TOOLS, "tool_choice.type"),
        ({"type": "function", "name": "nope"}, TOOLS, "tool_choice.name"),
        ({"type": "function", "name": "spawn", "namespace": "other"}, TOOLS, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "maybe", "tools": []}, TOOLS, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, TOOLS, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["x"]}, TOOLS, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}, TOOLS, "tool_choice.tools"),
        (5, TOOLS, "tool_choice"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(choice: object, tools: list[Any], param: str) -> None:
    assert refused(tools=tools, tool_choice=choice).param == param


def test_B50_parallel_calls_can_be_ruled_out() -> None:
    assert prompt(parallel_tool_calls=False, tools=[FUNCTION]).tool_choice == ToolChoice(parallel=False)


# --- parameters ------------------------------------------------------------


def test_parameters_reach_the_request() -> None:
    request = call(max_output_tokens=5, temperature=0, top_p=0.5, seed=7, stop="x", top_k=3, store=False).request
    assert (request.id, request.model, request.max_tokens, request.stop) == ("r1", 'mo"del/ü', 5, ("x",))
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, 0.5, 7)
    assert request.sampling.top_k == 3
    assert request.constraint is None and request.logprobs is None


def test_the_limit_may_have_chats_name() -> None:
    assert call(max_tokens=5).request.max_tokens == 5
    assert call(max_tokens=5, max_output_tokens=7).request.max_tokens == 7
    assert call(max_output_tokens=7).options.echo.max_output_tokens == 7
    assert refused(max_output_tokens=0).param == "max_output_tokens"


def test_what_the_stream_is_to_carry() -> None:
    assert call().request.extras == Extras()
    asked = call(return_progress=True, timings_per_token=True)
    assert asked.request.extras == Extras(progress=True, timings=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Reasoning()),
        ({}, Reasoning()),
        ({"summary": "auto"}, Reasoning()),
        ({"effort": "none"}, Reasoning(False, "none")),
        ({"effort": "high", "summary": None}, Reasoning(True, "high")),
    ],
)
def test_reasoning(given: object, expected: Reasoning) -> None:
    assert prompt(reasoning=given).reasoning == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"summary": "auto"}, True), ({"generate_summary": "detailed"}, True), ({"summary": None}, False), (None, False)],
)
def test_a_summary_is_made_where_it_is_asked_for(given: object, expected: bool) -> None:
    assert call(reasoning=given).options.summary is expected


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, JsonSchemaConstraint(SCHEMA)),
        ({"format": {"type": "json_schema", "name": "n", "schema": {}}}, JsonSchemaConstraint({"type": "object"})),
        ({"format": {"type": "json_object"}}, JsonSchemaConstraint({"type": "object"})),
        ({"format": {"type": "text"}}, None),
        ({"format": None}, None),
        ({}, None),
        ({"verbosity": "low"}, None),
    ],
)
def test_B28_B70_text_format(given: dict[str, Any], expected: JsonSchemaConstraint | None) -> None:
    assert call(text=given).request.constraint == expected
    echoed = call(text=given).options.echo.text
    assert echoed["format"] == (given.get("format") or {"type": "text"})
    assert echoed["verbosity"] == given.get("verbosity", "medium")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_logprobs": 3}, LogprobOptions(3)),
        ({"include": ["message.output_text.logprobs"]}, LogprobOptions(0)),
        ({"include": ["message.output_text.logprobs", "from_the_future"], "top_logprobs": 2}, LogprobOptions(2)),
        ({"top_logprobs": 0}, None),
    ],
)
def test_logprobs(given: dict[str, Any], expected: LogprobOptions | None) -> None:
    assert call(**given).request.logprobs == expected


def test_B92_what_is_unknown_or_has_no_say_is_ignored() -> None:
    plain = call()
    extra = call(
        client_metadata={"k": 1},
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        truncation="auto",
        background=False,
        context_management=[],
        conversation=None,
        safety_identifier="s",
        user="u",
    )
    assert extra.request == plain.request


# --- refused ------------------------------------------------------------


def parts(part: dict[str, Any], role: str = "user") -> list[Any]:
    return [{"role": role, "content": [part]}]


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(**fields)
    assert caught.value.param is not None
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "from_the_future"}]}, "input"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [USER, {"role": "tool", "content": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": parts({"type": "input_text"})}, "input[0].content[0].text"),
        ({"input": parts({"type": "input_audio"})}, "input[0].content[0].type"),
        ({"input": parts({"type": "input_file", "file_id": "f"})}, "input[0].content[0].type"),
        ({"input": parts({"type": "input_image", "file_id": "f"})}, "input[0].content[0].image_url"),
        ({"input": parts({"type": "input_image", "image_url": "file:///etc/passwd"})}, "input[0].content[0].image_url"),
        ({"input": parts({"type": "input_image", "image_url": "https://x"}, "system")}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [USER, output("x")]}, "input[1].call_id"),
        ({"input": [USER, CALL, {"type": "function_call_output", "call_id": "c1"}]}, "input[2].output"),
        ({"input": [USER, CALL, output([{"type": "input_file"}])]}, "input[2].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "input[0].tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**FUNCTION, "parameters": {"maximum": 2**64}}]}, "tools[0]"),
        ({"input": [{**USER, "x": 2**64}]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": [{"id": f"msg_{i}_0"} for i in range(129)]}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"maximum": 2**64}}}}, "text"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"moderation": {"model": "m"}}, "moderation"),
    ],
)
def test_B78_what_is_wrong_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_text_is_never_in_an_error() -> None:
    for fields in ({"input": [{"role": "user", "content": [{"type": "secret words"}]}], "seed": "secret"},):
        assert "secret" not in refused(**fields).message


# --- what is stored ------------------------------------------------------------


def stored(bare: str, input: object, *script: Any, **fields: Any) -> StoredResponse:
    """A response as it is kept, after the wire."""
    recorder = Recorder(call(input=input, **fields), Stamp(bare, 1))
    for event in (START, *script, Finished("stop", Usage(1, 1))):
        recorder.feed(event)
    assert recorder.record is not None
    return StoredResponse.decode(recorder.record.encode())


FIRST = stored(
    "aa",
    [{"role": "user", "content": "one"}],
    ReasoningDelta("r"),
    TextDelta("two"),
    ToolCallStarted(0, "c1", "apply_patch"),
    ToolCallDelta(0, '{"input":"p"}'),
    ToolCallEnded(0),
    tools=[PATCH],
    instructions="not inherited",
)


def continued(known: dict[str, StoredResponse], **fields: Any) -> Any:
    draft = read(json.dumps({"model": "m", **fields}).encode())
    return decode(draft, "r1", known)


def test_B27_a_response_goes_on_where_another_ended() -> None:
    answer = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    got = continued({"resp_aa": FIRST}, previous_response_id="resp_aa", input=[answer], instructions="new")
    assert got.request.prompt.messages == (
        Message("system", text("new")),
        Message("user", text("one")),
        Message("assistant", text("two"), "r", (ToolCall("c1", "apply_patch", '{"input":"p"}'),)),
        Message("tool", text("done"), tool_call_id="c1"),
    )
    assert got.options.ancestors == ("resp_aa",)
    assert got.options.input == (answer,)
    assert got.options.echo.previous_response_id == "resp_aa"


def test_a_chain_needs_all_its_responses() -> None:
    second = StoredResponse(
        "resp_bb", FIRST.response, ({"type": "message", "role": "user", "content": "three"},), ("resp_aa",)
    )
    draft = read(b'{"model": "m", "input": "four", "previous_response_id": "resp_bb"}')
    assert draft.references == {"resp_bb"}
    assert ancestors(draft, {"resp_bb": second}) == ("resp_aa", "resp_bb")
    got = decode(draft, "r1", {"resp_aa": FIRST, "resp_bb": second})
    prompt = got.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [m.text for m in prompt.messages] == ["one", "two", "three", "two", "four"]
    with pytest.raises(NotFound, match="'resp_aa' not found") as caught:
        decode(draft, "r1", {"resp_bb": second})
    assert caught.value.param == "previous_response_id"


def test_an_unknown_previous_response_is_not_found() -> None:
    for fields in ({"previous_response_id": "resp_zz"}, {"previous_response_id": "nonsense", "input": "x"}):
        with pytest.raises(NotFound, match="Previous response with id") as caught:
            call(**fields)
        assert caught.value.param == "previous_response_id"


def test_references_are_replaced_by_their_items() -> None:
    references = [{"type": "item_reference", "id": "rs_aa_0"}, {"id": "msg_aa_1"}, {"id": "msg_aa_i0"}]
    draft = read(json.dumps({"model": "m", "input": [USER, *references]}).encode())
    assert draft.references == {"resp_aa"}
    got = decode(draft, "r1", {"resp_aa": FIRST})
    assert [(m.role, m.text, m.reasoning) for m in got.request.prompt.messages] == [  # type: ignore[union-attr]
        ("user", "Hi", None),
        ("assistant", "two", "r"),
        ("user", "one", None),
    ]
    assert [item["type"] for item in got.options.input[1:]] == ["reasoning", "message", "message"]


@pytest.mark.parametrize("wanted", ["msg_aa_9", "msg_zz_0", "not ours"])
def test_an_unknown_reference_is_not_found(wanted: str) -> None:
    with pytest.raises(NotFound) as caught:
        continued({"resp_aa": FIRST}, input=[USER, {"type": "item_reference", "id": wanted}])
    assert caught.value.param == "input[1].id"


def test_input_is_listed_with_ids_and_parts() -> None:
    record = stored("cc", [USER, {"role": "assistant", "content": "a"}, {**CALL, "id": "mine"}, output("x")])
    assert record.input == (
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi"}],
            "id": "msg_cc_i0",
            "status": "completed",
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
            "id": "msg_cc_i1",
            "status": "completed",
        },
        {**CALL, "id": "mine", "status": "completed"},
        {**output("x"), "id": "fco_cc_i3", "status": "completed"},
    )


# --- real clients ------------------------------------------------------------


def capture(name: str) -> list[dict[str, Any]]:
    file = CAPTURES / name
    if not file.exists():
        pytest.skip(f"{file} is not there")
    return [entry["body"] for entry in json.loads(file.read_bytes()) if entry["path"] == "/v1/responses"]


@pytest.mark.parametrize("name", ["codex-0.171.0_tool_turn.json", "js_sdks_vercel.json", "python_sdks_langchain.json"])
def test_bodies_of_real_clients_are_understood(name: str) -> None:
    bodies = capture(name)
    assert bodies
    for body in bodies:
        found = CODEC.decode(json.dumps(body).encode(), "r1")
        prompt = found.request.prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages[0].role in ("user", "system", "developer")


def test_codex() -> None:
    first, second = (CODEC.decode(json.dumps(body).encode(), "r1") for body in capture("codex-0.171.0_tool_turn.json"))
    assert not first.options.store and first.options.summary and first.options.sealed and first.stream
    before, after = first.request.prompt, second.request.prompt
    assert isinstance(before, ChatPrompt) and isinstance(after, ChatPrompt)
    assert after.messages[: len(before.messages)] == before.messages
    assert [message.role for message in before.messages] == ["developer", "developer", "user", "user"]
    made, answered = after.messages[len(before.messages) :]
    assert made.tool_calls == (ToolCall("call_1", "exec_command", '{"cmd":"echo hi-there"}'),)
    assert (answered.role, answered.tool_call_id) == ("tool", "call_1")
    names = [tool.name for tool in before.tools]
    assert "multi_agent_v1__spawn_agent" in names and "exec_command" in names and "web_search" not in names
    assert before.tools == after.tools


def test_stamps_are_the_only_ids() -> None:
    assert STAMP.id not in json.dumps([item for item in FIRST.items])
