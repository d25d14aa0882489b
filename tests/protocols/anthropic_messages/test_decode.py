"""Messages bodies: what is accepted and as what, and that every fault is an `InvalidRequest` naming its path."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.anthropic_messages import CODEC, strict_codec
from protocols.anthropic_messages.signature import carried, carrying, signature
from protocols.errors import InvalidRequest
from protocols.request import (
    ChatPrompt,
    ImagePart,
    JsonSchemaConstraint,
    Message,
    Reasoning,
    Request,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
F = {"name": "f", "description": "Does it.", "input_schema": SCHEMA}
G = {"name": "g", "input_schema": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Body."}}


def decode(**fields: Any) -> Request:
    body = {"model": "m", "messages": [USER], **fields}
    return CODEC.decode(json.dumps(body).encode(), "r1").request


def prompt(**fields: Any) -> ChatPrompt:
    prompt = decode(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages(*wire: dict[str, Any], system: Any = None) -> tuple[Message, ...]:
    return prompt(messages=list(wire), system=system).messages


def text(text: str, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **extra}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(**fields)
    return caught.value


# --- parameters ------------------------------------------------------------


def test_minimal() -> None:
    call = CODEC.decode(json.dumps({"model": "m", "messages": [USER]}).encode(), "r1")
    expected = ChatPrompt((Message("user", (TextPart("Hi"),)),), reasoning=Reasoning(enabled=False))
    assert call.request == Request("r1", "m", expected, max_tokens=4096)
    assert call.stream is False
    assert call.options.thinking == "none"


def test_everything() -> None:
    request = decode(
        max_tokens=7, temperature=1, top_p=0.5, top_k=40, min_p=0.1, repeat_penalty=1.1, seed=-1, ignore_eos=True,
        stop_sequences=["a", "", "b"], output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )  # fmt: skip
    assert request.sampling == Sampling(
        temperature=1.0, top_p=0.5, top_k=40, min_p=0.1, repeat_penalty=1.1, seed=-1
    )  # fmt: skip
    assert request.max_tokens == 7
    assert request.stop == ("a", "b")
    assert request.ignore_eos
    assert request.constraint == JsonSchemaConstraint(SCHEMA)


def test_a_stop_may_have_llamacpps_name_and_anthropics_goes_before_it() -> None:
    assert decode(stop=["a"]).stop == ("a",)
    assert decode(stop=["a"], stop_sequences=["b"]).stop == ("b",)
    assert refused(stop="a").param == "stop"


def test_a_schema_may_be_empty() -> None:
    form = {"type": "json_schema", "schema": {}}
    assert decode(output_config={"format": form}).constraint == JsonSchemaConstraint({"type": "object"})


STRICT = [
    ({"temperature": 1}, "temperature"),
    ({"top_p": 0.5}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"messages": [USER, assistant(text("a"), DOCUMENT)]}, "messages[1].content[1].type"),
    ({"messages": [user(text("a", citations=[{"type": "char_location"}]))]}, "messages[0].content[0].citations"),
]


@pytest.mark.parametrize(("fields", "param"), STRICT)
def test_what_the_newest_version_refuses(fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    with pytest.raises(InvalidRequest) as caught:
        strict_codec("2026-10-21").decode(body, "r1")
    assert caught.value.param == param
    assert "2026-10-21" in caught.value.message
    for lenient in (strict_codec("2023-06-01"), strict_codec(""), CODEC):
        assert lenient.decode(body, "r1").request.model == "m"


def test_what_the_newest_version_takes() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [DOCUMENT, text("a", citations=[{}])]}
    body = {
        "model": "m",
        "min_p": 0.1,  # of which it knows nothing
        "messages": [
            user(DOCUMENT, text("a", citations=[]), text("b", citations=None)),
            assistant(text("c", citations=[{"type": "char_location"}])),
            user(result),
            {"role": "system", "content": "Be brief."},
        ],
    }
    raw = json.dumps(body).encode()
    assert strict_codec("2026-10-21").decode(raw, "r1") == CODEC.decode(raw, "r1")


def test_the_older_place_of_a_format() -> None:
    request = decode(output_format={"type": "json_schema", "schema": SCHEMA})
    assert request.constraint == JsonSchemaConstraint(SCHEMA)


def test_what_does_not_change_the_answer_is_accepted_and_not_read() -> None:
    assert decode(
        metadata={}, service_tier="auto", container=None, mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, betas=["x"],
        cache_control={"type": "ephemeral"}, inference_geo="eu", speed="fast", from_2030=[1],
    ) == decode()  # fmt: skip


def test_null_is_absent() -> None:
    nulls = ["max_tokens", "temperature", "system", "stop_sequences", "tools", "tool_choice", "thinking", "stream"]
    assert decode(**dict.fromkeys([*nulls, "output_config", "output_format", "mcp_servers", "top_k"])) == decode()


@pytest.mark.parametrize(
    ("thinking", "expected", "shown"),
    [
        (None, Reasoning(enabled=False), "none"),
        ({"type": "disabled"}, Reasoning(enabled=False), "none"),
        ({"type": "adaptive"}, Reasoning(enabled=True), "shown"),
        ({"type": "adaptive", "display": "summarized"}, Reasoning(enabled=True), "shown"),
        ({"type": "adaptive", "display": "omitted"}, Reasoning(enabled=True), "omitted"),
        ({"type": "enabled", "budget_tokens": 2048}, Reasoning(enabled=True, budget_tokens=2048), "shown"),
        ({"type": "enabled"}, Reasoning(enabled=True, budget_tokens=10_000), "shown"),
        ({"type": "between_tools"}, Reasoning(enabled=False), "none"),
    ],
)
def test_B15_thinking_is_off_unless_asked_for(thinking: Any, expected: Reasoning, shown: str) -> None:
    call = CODEC.decode(json.dumps({"model": "m", "messages": [USER], "thinking": thinking}).encode(), "r1")
    assert isinstance(call.request.prompt, ChatPrompt)
    assert call.request.prompt.reasoning == expected
    assert call.options.thinking == shown


def test_thinking_between_tools_is_on_behind_a_result() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "7"}
    asked = {"type": "between_tools"}
    assert prompt(thinking=asked, messages=[USER, user(result)]).reasoning == Reasoning(enabled=True)
    assert prompt(thinking=asked, messages=[user(result), USER]).reasoning == Reasoning(enabled=False)


def test_effort_is_the_templates_word() -> None:
    reasoning = prompt(thinking={"type": "adaptive"}, output_config={"effort": "high"}).reasoning
    assert reasoning == Reasoning(enabled=True, effort="high")


# --- messages ------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_string_and_one_text_block_are_the_same(role: str) -> None:
    cached = text("same", cache_control={"type": "ephemeral"})
    string = messages(USER, {"role": role, "content": "same"})
    assert messages(USER, {"role": role, "content": [cached]}) == string
    assert messages(USER, system="same") == messages(USER, system=[cached])


def test_the_system_prompt_comes_first_and_its_blocks_apart() -> None:
    assert messages(USER, system=[text("You are X."), text(""), text("Be brief.")]) == (
        Message("system", (TextPart("You are X.\n\nBe brief."),)),
        Message("user", (TextPart("Hi"),)),
    )


@pytest.mark.parametrize("content", ["Be brief.", [text("Be brief.", cache_control={"type": "ephemeral"})]])
def test_B13_system_messages_stay_where_they_are(content: Any) -> None:
    system = {"role": "system", "content": content}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "7"}
    told = Message("system", (TextPart("Be brief."),))
    assert messages(USER, system, assistant(use), user(result), system) == (
        Message("user", (TextPart("Hi"),)),
        told,
        Message("assistant", tool_calls=(ToolCall("t1", "f", "{}"),)),
        Message("tool", (TextPart("7"),), tool_call_id="t1"),
        told,
    )


def test_a_system_message_may_last_for_one_turn() -> None:
    system: dict[str, object] = {"role": "system", "content": "12 tokens left", "clear_at": "next_user_message"}
    assert len(messages(USER, system)) == 2
    assert messages(USER, system, USER) == messages(USER, USER)
    addition = [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}]
    asked = prompt(messages=[USER, {**system, "content": addition}, USER], tools=[{**F, "defer_loading": True}, G])
    assert (len(asked.messages), [tool.name for tool in asked.tools]) == (2, ["g", "f"])


def test_B14_the_billing_header_is_dropped() -> None:
    def asked(system: Any) -> tuple[Message, ...]:
        return messages(USER, system=system)

    header = "x-anthropic-billing-header: cc_version=2.1.{}; cch={};"
    assert asked([text(header.format(1, "a")), text("You are X.")]) == asked([text("You are X.")])
    assert asked([text(header.format(1, "a")), text("You are X.")]) == asked(
        [text(header.format(2, "b")), text("You are X.")]
    )
    assert asked(header.format(1, "a") + "\nYou are X.") == asked("You are X.")
    assert asked([text(header.format(1, "a"))]) == asked(None)
    assert asked("Never say x-anthropic-billing-header: please")[0].text.startswith("Never say x-anthropic")


def test_a_tool_turn() -> None:
    turn = messages(
        USER,
        assistant(
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
            text("One moment."),
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, None, "é"]}, "caller": {}},
            {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
        ),
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7", "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True,
             "content": [text("no such"), text(" file")]},
            text("Go on."),
        ),
    )  # fmt: skip
    assert turn[1:] == (
        Message(
            "assistant",
            (TextPart("One moment."),),
            reasoning="Hm.",
            tool_calls=(ToolCall("toolu_1", "f", '{"a": [1, null, "é"]}'), ToolCall("toolu_2", "g", "{}")),
        ),
        Message("tool", (TextPart("7"),), tool_call_id="toolu_1"),
        Message("tool", (TextPart("Error: "), TextPart("no such"), TextPart(" file")), tool_call_id="toolu_2"),
        Message("user", (TextPart("Go on."),)),
    )


def test_results_and_words_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1"}
    assert [message.role for message in messages(user(text("a"), result, text("b"), text("c"), result))] == [
        "user", "tool", "user", "tool",
    ]  # fmt: skip


def test_B07_signatures_of_anybody_are_accepted() -> None:
    for theirs in ("c2lnLXRlc3Q=", "not base64!", signature("abc"), carrying("é") + "=", None, ""):
        block = {"type": "thinking", "thinking": "Hm.", "signature": theirs}
        assert messages(USER, assistant(block, text("42")))[1].reasoning == "Hm."


def test_B08_a_block_without_text_brings_it_in_our_signature_or_not_at_all() -> None:
    def said(signature: str) -> Message:
        return messages(USER, assistant({"type": "thinking", "thinking": "", "signature": signature}, text("42")))[1]

    assert said(carrying("Hm. é")).reasoning == "Hm. é"
    assert said("c2lnLXRlc3Q=") == said(signature("abc")) == Message("assistant", (TextPart("42"),))


@given(st.text())
def test_signatures_carry_any_text(thinking: str) -> None:
    assert carried(carrying(thinking)) == thinking
    assert base64.b64decode(carrying(thinking), validate=True)
    assert carried(thinking) is None


def test_redacted_thinking_is_left_out() -> None:
    assert messages(USER, assistant({"type": "redacted_thinking", "data": "xyz"}, text("42")))[1] == Message(
        "assistant", (TextPart("42"),)
    )


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_messages_may_be_empty(content: Any) -> None:
    assert messages({"role": "user", "content": content}) == (Message("user"),)
    assert messages(USER, {"role": "assistant", "content": content})[1] == Message("assistant")
    assert messages(USER, {"role": "system", "content": content}) == messages(USER)


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (USER, False),
        ({"role": "assistant", "content": "The answer is ("}, True),
        (assistant(text("The answer is (")), True),
        (assistant(text("")), False),
        (assistant(text("So"), {"type": "tool_use", "id": "t", "name": "f", "input": {}}), False),
    ],
)
def test_the_beginning_of_an_answer_is_continued(last: dict[str, Any], continues: bool) -> None:
    assert prompt(messages=[USER, last]).continues is continues
    assert prompt(messages=[USER, last, {"role": "system", "content": "x"}]).continues is False


def test_images() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    assert messages(user(text("What?"), IMAGE, url))[0].content == (
        TextPart("What?"),
        ImagePart("data:image/png;base64,AAAA"),
        ImagePart("https://example.com/a.png"),
    )


def test_B17_images_in_results_are_kept() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("See:"), IMAGE]}
    assert messages(user(result))[0].content == (TextPart("See:"), ImagePart("data:image/png;base64,AAAA"))


@pytest.mark.parametrize("wrap", [lambda block: user(block), lambda block: user(
    {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
)])  # fmt: skip
def test_documents_and_search_results_are_text(wrap: Any) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Body."}
    document = {"type": "document", "source": plain, "title": "T", "context": "C", "citations": {"enabled": False}}
    assert messages(wrap(document))[0].text == (
        "<document>\n<title>T</title>\n<context>C</context>\nBody.\n</document>\n"
    )
    inner = {"type": "content", "content": [text("Body."), IMAGE]}
    message = messages(wrap({"type": "document", "source": inner}))[0]
    assert message.text == "<document>\nBody.\n</document>\n"
    assert message.content[2] == ImagePart("data:image/png;base64,AAAA")
    string = {"type": "document", "source": {"type": "content", "content": "Body."}}
    assert messages(wrap(string))[0].text == message.text
    found = {"type": "search_result", "source": "https://x", "title": "T", "content": [text("One."), text("Two.")]}
    assert messages(wrap(found))[0].text == (
        "<search_result>\n<title>T</title>\n<source>https://x</source>\nOne.Two.\n</search_result>\n"
    )


# --- tools ------------------------------------------------------------


def test_tools() -> None:
    assert prompt(tools=[F, {**G, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}]).tools == (
        Tool("f", "Does it.", SCHEMA),
        Tool("g", "", SCHEMA, strict=True),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "g"}, ToolChoice("required", "g")),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    assert prompt(tools=[F, G], tool_choice=choice).tool_choice == expected


def names(**fields: Any) -> list[str]:
    return [tool.name for tool in prompt(**fields).tools]


PLACEHOLDER = {"name": "DeferredToolPlaceholder", "input_schema": SCHEMA, "defer_loading": True}


def test_B16_deferred_tools_are_hidden_until_a_reference_names_them() -> None:
    tools = [{**F, "defer_loading": True}, PLACEHOLDER, {"name": "ToolSearch", "input_schema": SCHEMA}]
    use = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "select:f"}}
    found = [{"type": "tool_reference", "tool_name": "f"}, {"type": "tool_reference", "tool_name": "unknown"}]
    turn = [USER, assistant(use), user({"type": "tool_result", "tool_use_id": "t1", "content": found})]
    assert names(tools=tools) == ["ToolSearch"]
    assert names(tools=tools, messages=turn) == ["ToolSearch", "f"]
    assert messages(*turn)[-1].text == "Tool now available: f\nTool now available: unknown\n"


def test_a_deferred_tool_that_is_forced_is_there() -> None:
    tools = [{**F, "defer_loading": True}, G]
    assert names(tools=tools, tool_choice={"type": "tool", "name": "f"}) == ["g", "f"]


def test_tools_come_and_go_within_a_conversation() -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [text("Note."), {"type": f"tool_{kind}", "tool": tool}]}

    tools = [{**F, "defer_loading": True}, G]
    addition = change("addition", type="tool_reference", name="f")
    removal = change("removal", type="tool_reference", name="g")
    inline = change("addition", type="tool_definition", definition={"name": "h", "input_schema": SCHEMA})
    assert names(tools=tools, messages=[USER, addition]) == ["g", "f"]
    assert names(tools=tools, messages=[USER, addition, removal]) == ["f"]
    assert names(tools=tools, messages=[USER, inline]) == ["g", "h"]
    assert messages(USER, removal)[1].text == "Note.\n\nTool no longer available: g\n"


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def test_tools_that_run_at_anthropic_are_left_out_unless_forced() -> None:
    toolset = {"type": "mcp_toolset", "mcp_server_name": "x"}
    assert names(tools=[WEB_SEARCH, F, toolset]) == ["f"]
    assert prompt(tools=[WEB_SEARCH], tool_choice={"type": "auto"}).tools == ()
    error = refused(tools=[WEB_SEARCH, F], tool_choice={"type": "tool", "name": "web_search"})
    assert error.param == "tool_choice.name"
    assert "'web_search' runs on Anthropic's servers" in error.message


def test_without_its_search_nothing_is_deferred() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert names(tools=[search, {**F, "defer_loading": True}, G]) == ["f", "g"]


def test_a_foreign_type_with_a_schema_is_a_tool_like_any_other() -> None:
    assert names(tools=[{**F, "type": "from_2030"}]) == ["f"]


# --- refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "expected at least 1 item(s)"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages", "expected at least one that has content"),
        ({"model": None}, "model", "expected a string, got null"),
        ({"max_tokens": 0}, "max_tokens", "expected at least 1, got 0"),
        ({"n_probs": 1}, "n_probs", "no place for probabilities"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id", "expected a string, got 5"),
        ({"max_tokens": "5"}, "max_tokens", "expected an integer, got a string"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"stop_sequences": "x"}, "stop_sequences", "expected a list, got a string"),
        ({"system": 5}, "system", "expected a string or a list, got 5"),
        ({"system": [IMAGE]}, "system[0].type", "expected one of 'text'"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "does not connect to any"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "expected one of 'enabled', 'adaptive'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "at least 1"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "Missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", "Missing"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "Missing"),
        ({"tools": [{"name": "f", "input_schema": {"a": 2**64}}]}, "tools[0].input_schema", "more than 64 bits"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": 2**64}}}},
            "output_config.format.schema",
            "more than 64 bits",
        ),
        ({"tools": [F, F]}, "tools[1].name", "another tool has this name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "known to Anthropic's models only"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "needs 'tools'"),
        ({"tool_choice": {"type": "any"}, "tools": [WEB_SEARCH]}, "tool_choice.type", "needs 'tools'"),
        ({"tool_choice": {"type": "tool"}, "tools": [F]}, "tool_choice.name", "Missing"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [F]}, "tool_choice.name", "no such tool"),
    ],
)
def test_wrong_values(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in error.message
    assert words in error.message


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "tool", "content": "x"}, "role", "expected one of 'user', 'assistant' or 'system'"),
        ({"role": "user"}, "content", "Missing"),
        ({"role": "user", "content": 5}, "content", "expected a string or a list, got 5"),
        (user("x"), "content[0]", "expected an object, got a string"),
        (user({"text": "x"}), "content[0].type", "Missing"),
        (user({"type": "text"}), "content[0].text", "Missing"),
        (user({"type": "video"}), "content[0].type", "'video' cannot be part of a user message"),
        (user({"type": ["text"]}), "content[0].type", "expected a string"),
        (user({"type": "thinking", "thinking": "x"}), "content[0].type", "part of a user message"),
        (assistant({"type": "server_tool_use"}), "content[0].type", "part of an assistant message"),
        (assistant(IMAGE), "content[0].type", "part of an assistant message"),
        (assistant({"type": "tool_use", "id": "", "name": "f", "input": {}}), "content[0].id", "not empty"),
        (assistant({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}), "content[0].input", "got a string"),
        ({"role": "system", "content": [IMAGE]}, "content[0].type", "part of a system message"),
        (user({"type": "tool_result"}), "content[0].tool_use_id", "Missing"),
        (user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_use", "id": "a", "name": "f",
         "input": {}}]}), "content[0].content[0].type", "part of a tool's result"),
        (user({"type": "image", "source": {"type": "file", "file_id": "x"}}), "content[0].source.type", "'base64' or"),
        (user({"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": "x"}}),
         "content[0].source.media_type", "expected one of image/jpeg"),
        (user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
         "content[0].source.data", "Missing"),
        (user({"type": "image", "source": {"type": "url", "url": "http://x"}}), "content[0].source.url", "https:"),
        (user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}),
         "content[0].source.type", "such as PDF"),
        (user({"type": "document", "source": {"type": "text"}}), "content[0].source.data", "Missing"),
        (user({"type": "document", "source": {"type": "content", "content": [{"type": "tool_result",
         "tool_use_id": "t"}]}}), "content[0].source.content[0].type", "part of a document"),
        (user({"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}),
         "content[0].citations.enabled", "do not cite"),
        ({"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "mcp_tool_reference"}}]},
         "content[0].tool.type", "expected one of 'tool_reference'"),
        ({"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference"}}]},
         "content[0].tool.name", "Missing"),
    ],
)  # fmt: skip
def test_wrong_messages(message: dict[str, Any], param: str, words: str) -> None:
    error = refused(messages=[USER, message])
    assert error.param == f"messages[1].{param}"
    assert error.param in error.message
    assert words in error.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("type", "text", "content", "source", "tool", "name", "role", "id")), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(("messages", "system", "tools", "tool_choice", "thinking")), _JSON))
def test_no_body_is_worse_than_invalid(fields: dict[str, Any]) -> None:
    try:
        decode(**fields)
    except InvalidRequest as error:
        assert error.param is not None


@given(
    st.lists(
        st.builds(
            lambda role, type_, rest: {"role": role, "content": [{"type": type_, **rest}]},
            st.sampled_from(("user", "assistant", "system")),
            st.sampled_from(("text", "image", "document", "tool_use", "tool_result", "tool_addition", "thinking", "x")),
            st.dictionaries(st.sampled_from(("text", "source", "content", "thinking", "id", "input", "tool")), _JSON),
        ),
        min_size=1,
    )
)  # fmt: skip
def test_no_message_is_worse_than_invalid(wire: list[dict[str, Any]]) -> None:
    try:
        decode(messages=wire)
    except InvalidRequest as error:
        assert error.param is not None
        assert error.param.startswith("messages")
