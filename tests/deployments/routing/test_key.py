"""The ladder: what is shared is shared, what differs differs, whatever dialect and process a request came through."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.routing.key import HASHED_BYTES, MAX_RUNGS, PrefixKey, bare_key, prefix_key
from protocols.anthropic_messages.decode import decode as decode_anthropic
from protocols.openai_chat.decode import decode as decode_openai
from protocols.openai_responses.decode import decode as decode_responses
from protocols.openai_responses.decode import read
from protocols.request import (
    ChatPrompt,
    ImagePart,
    InfillFile,
    InfillPrompt,
    LoraScale,
    Message,
    MixedPrompt,
    Prompt,
    Request,
    Role,
    TextPart,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)


def message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


def chat(*messages: Message, **fields: Any) -> PrefixKey:
    return prefix_key(Request("r", "m", ChatPrompt(messages), **fields))


def keyed(prompt: Prompt, **fields: Any) -> PrefixKey:
    return prefix_key(Request("r", "m", prompt, **fields))


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
MESSAGES = st.lists(
    st.builds(message, ROLES, st.text(max_size=40).map(lambda text: text * 40) | st.text(max_size=10)), max_size=30
)
SYSTEM = message("system", "You are helpful. " * 100)
USER = message("user", "What is a rung? " * 20)
ANSWER = message("assistant", "A step of a ladder. " * 30)


@given(MESSAGES)
def test_a_ladder_is_ordered_and_bounded(messages: list[Message]) -> None:
    made = chat(*messages)
    assert len(made.rungs) == len(made.ends) <= MAX_RUNGS
    assert list(made.ends) == sorted(made.ends)
    assert len(set(made.ends)) == len(made.ends)
    assert set(made.trunk) <= set(range(len(made.rungs)))
    assert bool(made.rungs) == bool(messages)


@given(MESSAGES, st.lists(st.builds(message, ROLES, st.text(max_size=2000)), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_conversation_that_grows_keeps_its_trunk_and_its_last_turns(
    messages: list[Message], more: list[Message]
) -> None:
    before, after = chat(*messages), chat(*messages, *more)
    trunk = {before.rungs[index] for index in before.trunk}
    merged = bool(messages) and messages[-1].role == more[0].role == "assistant"
    kept = trunk & set(after.rungs)
    assert len(trunk - kept) <= merged, "an answer that goes on has no end any more where it was"
    assert {after.rungs[index] for index in after.trunk} >= kept
    if messages and not merged:
        assert before.rungs[-1] in after.rungs, "the last turn's end is how the next turn finds it"
    positions = dict(zip(before.rungs, before.ends, strict=True))
    for rung, end in zip(after.rungs, after.ends, strict=True):
        assert positions.get(rung, end) == end


@given(MESSAGES.filter(bool), st.data())
@settings(deadline=None)
def test_a_change_changes_every_rung_behind_it(messages: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(messages) - 1))
    changed = [*messages[:at], message(messages[at].role, "!" + messages[at].text), *messages[at + 1 :]]
    before, after = chat(*messages), chat(*changed)
    headers = 3 * (at + 1)
    begins = sum(len(m.text.encode()) for m in messages[:at])
    common = set(before.rungs) & set(after.rungs)
    ends = {rung: end for rung, end in zip(before.rungs, before.ends, strict=True)}
    assert all(ends[rung] <= begins + headers for rung in common)


def test_the_model_the_adapters_and_the_tools_are_part_of_every_rung() -> None:
    plain = ChatPrompt((SYSTEM, USER))
    tools = ChatPrompt((SYSTEM, USER), tools=(Tool("f", "Does it.", {"type": "object"}),))
    ladders = [
        prefix_key(request).rungs
        for request in (
            Request("r", "m", plain),
            Request("r", "other", plain),
            Request("r", "m", plain, lora=(LoraScale(1, 0.5),)),
            Request("r", "m", plain, lora=(LoraScale(1, 1.0),)),
            Request("r", "m", tools),
        )
    ]
    assert len(set().union(*ladders)) == sum(map(len, ladders))


def test_an_adapter_that_is_off_is_none() -> None:
    assert chat(USER, lora=(LoraScale(1, 0.0),)) == chat(USER)
    assert chat(USER, lora=(LoraScale(2, 1.0), LoraScale(1, 1.0))) == chat(
        USER, lora=(LoraScale(1, 1.0), LoraScale(2, 1.0))
    )
    assert chat(USER, lora=(LoraScale(1, 1.0),)).adapter


def test_a_schema_is_the_same_in_any_order_of_its_keys() -> None:
    def tools(parameters: dict[str, Any]) -> PrefixKey:
        return keyed(ChatPrompt((USER,), tools=(Tool("f", "", parameters),)))

    assert tools({"type": "object", "properties": {"a": {}, "b": {}}}) == tools(
        {"properties": {"b": {}, "a": {}}, "type": "object"}
    )
    assert tools({"type": "object"}) != tools({"type": "array"})


def test_tools_count_in_the_size_and_lie_before_the_first_rung() -> None:
    with_tools = keyed(ChatPrompt((USER,), tools=(Tool("f", "x" * 5000),)))
    without = chat(USER)
    assert with_tools.size > without.size + 5000
    assert with_tools.ends[0] > without.ends[0] + 5000


def test_texts_in_one_part_or_several_are_one_message() -> None:
    parts = Message("user", (TextPart("What is "), TextPart("a rung?")))
    assert chat(parts) == chat(message("user", "What is a rung?"))


def test_what_the_template_may_not_show_is_left_out() -> None:
    call = Message("assistant", (), reasoning="Hm.", tool_calls=(ToolCall("call_1", "f", '{"a": 1}'),), name="bot")
    same = Message("assistant", (), tool_calls=(ToolCall("toolu_2", "f", '{"a":1}'),))
    result = Message("tool", (TextPart("2"),), tool_call_id="call_1")
    assert chat(USER, call, result) == chat(USER, same, Message("tool", (TextPart("2"),), tool_call_id="toolu_2"))


def test_an_answer_in_one_message_or_two_is_the_same() -> None:
    call = ToolCall("1", "f", "{}")
    whole = Message("assistant", (TextPart("Let me see."),), tool_calls=(call,))
    halves = (message("assistant", "Let me see."), Message("assistant", (), tool_calls=(call,)))
    assert chat(USER, whole) == chat(USER, *halves)


def test_messages_of_users_are_not_joined() -> None:
    assert chat(message("user", "a"), message("user", "b")).rungs[-1] != chat(message("user", "ab")).rungs[-1]


@pytest.mark.parametrize("arguments", ["not json", "[" * 100_000, '{"a": "\\ud800"}', ""])
def test_arguments_that_are_no_json_are_text(arguments: str) -> None:
    def called(text: str) -> PrefixKey:
        return chat(USER, Message("assistant", (), tool_calls=(ToolCall("1", "f", text),)))

    assert called(arguments) == called(arguments)
    assert called(arguments) != called(arguments + "x")


def test_images_count_by_their_digest() -> None:
    def shown(url: str) -> PrefixKey:
        return chat(SYSTEM, Message("user", (TextPart("See: "), ImagePart(url))))

    small, large = shown("data:image/png;base64,AAAA"), shown("data:image/png;base64," + "B" * 300_000)
    assert small.size == large.size, "how long a URL is says nothing of its image"
    assert small.rungs[-1] != large.rungs[-1]
    assert set(small.rungs[:-1]) & set(large.rungs)
    assert shown("https://x/" + "B" * 100_000 + "1").rungs[-1] != shown("https://x/" + "B" * 100_000 + "22").rungs[-1]


def test_a_session_of_the_client_is_a_hash() -> None:
    assert chat(USER).affinity == 0
    one, other = chat(USER, affinity="s1"), chat(USER, affinity="s2")
    assert one.affinity != other.affinity
    assert one.rungs == other.rungs == chat(USER).rungs


@pytest.mark.parametrize("prompt", [ChatPrompt(()), TextPrompt(""), TokenPrompt(()), MixedPrompt(())])
def test_requests_without_text_have_a_key(prompt: Prompt) -> None:
    made = keyed(prompt)
    assert made.size == 0
    assert len(made.rungs) <= 1


def test_kinds_of_prompts_share_nothing() -> None:
    kinds: list[Prompt] = [
        ChatPrompt((message("user", "ab"),)),
        TextPrompt("ab"),
        TokenPrompt((97, 98)),
        MixedPrompt(("ab",)),
    ]
    ladders = [set(keyed(kind).rungs) for kind in kinds]
    assert len(set().union(*ladders)) == sum(map(len, ladders))


def test_tokens_are_counted_as_tokens() -> None:
    made = keyed(TokenPrompt(tuple(range(1000))))
    assert made.in_tokens
    assert made.size == made.ends[-1] == 1000
    assert made.ends[0] == 128
    longer = keyed(TokenPrompt(tuple(range(1400))))
    assert set(made.rungs[:-1]) <= set(longer.rungs)


def test_a_token_no_vocabulary_has_leaves_no_ladder() -> None:
    assert keyed(TokenPrompt((1, 2**70))).rungs == ()


def test_infill_shares_its_files_and_its_prefix() -> None:
    files = (InfillFile("a.py", "import a\n" * 100),)
    one, other = (keyed(InfillPrompt("def f():\n" * 80, suffix, files=files)) for suffix in ("return 1", "return 2"))
    assert one.rungs[-1] != other.rungs[-1]
    assert len(set(one.rungs) & set(other.rungs)) >= 2


def test_of_a_long_body_the_beginning_is_hashed() -> None:
    text = "0123456789abcdef" * (HASHED_BYTES // 8)
    one, other = chat(message("user", text + "x"), USER), chat(message("user", text + "yz"), USER)
    assert one.rungs == other.rungs
    assert one.ends[-1] == HASHED_BYTES
    assert one.size > len(text)
    assert chat(message("user", "!" + text)).rungs != one.rungs


def test_text_that_is_no_utf8_has_a_key() -> None:
    assert chat(message("user", "\ud800")).rungs != chat(message("user", "?")).rungs


def test_a_bare_key_has_no_ladder() -> None:
    assert bare_key(5).rungs == ()
    assert bare_key(-5).size == 0


def test_a_key_survives_the_wire() -> None:
    made = chat(SYSTEM, USER, affinity="s")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PrefixKey) == made


def test_another_process_makes_the_same_key() -> None:
    code = (
        "from deployments.routing.key import prefix_key\n"
        "from protocols.request import *\n"
        "print(prefix_key(Request('r', 'm', TextPrompt('abc' * 999), affinity='s')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == str(keyed(TextPrompt("abc" * 999), affinity="s"))


# --- dialects, through their decoders ---------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def openai_key(body: dict[str, Any]) -> PrefixKey:
    return prefix_key(decode_openai(json.dumps(body).encode(), "a").requests[0])


def anthropic_key(body: dict[str, Any]) -> PrefixKey:
    return prefix_key(decode_anthropic(json.dumps(body).encode(), "b").requests[0])


def responses_key(body: dict[str, Any]) -> PrefixKey:
    return prefix_key(decode_responses(read(json.dumps(body).encode()), "c", {}).requests[0])


@pytest.mark.parametrize("system_role", ["system", "developer"])
def test_a_conversation_has_one_ladder_in_three_dialects(system_role: str) -> None:
    function = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
    chat_body = {
        "model": "m",
        "messages": [
            {"role": system_role, "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{ "city": "Rome" }'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    anthropic_body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Weather in Rome?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny"}]},
        ],
        "tools": [{"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}],
    }
    responses_body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "call_9", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "call_9", "output": "Sunny"},
        ],
        "tools": [{"type": "function", **function}],
    }
    assert openai_key(chat_body).rungs == anthropic_key(anthropic_body).rungs == responses_key(responses_body).rungs
