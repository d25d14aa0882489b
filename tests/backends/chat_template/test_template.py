"""Messages under templates of every kind: nothing lost, nothing moved, nothing refused that can be said another way."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from backends.chat_template import ChatTemplate, ChatTemplates
from backends.chat_template.builtin import BUILTIN
from backends.chat_template.template import CHATML
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, ImagePart, Message, Reasoning, Role, TextPart, Tool, ToolCall, ToolChoice
from tests.backends.chat_template import templates

NOW = datetime(2026, 2, 3)
WEATHER = Tool("get_weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("call_0123456789abcdef", "get_weather", '{"city": "Köln"}')
CALL_2 = ToolCall("call_0123456789abcdeg", "get_weather", '{"city": "Ulm"}')


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, clock=lambda: NOW, bos_token="<s>", eos_token="</s>")


def message(role: Role, text: str = "", **fields: Any) -> Message:
    return Message(role, (TextPart(text),) if text else (), **fields)


def render(source: str, *messages: Message, tools: tuple[Tool, ...] = (), **fields: Any) -> str:
    return template(source).render(ChatPrompt(messages, tools, **fields))


HELLO = message("user", "Hello")
LONG = (
    message("system", "S1"),
    message("user", "U1"),
    message("assistant", "A1", reasoning="R1", tool_calls=(CALL, CALL_2)),
    message("tool", "RESULT1", tool_call_id=CALL.id),
    message("tool", "RESULT2", tool_call_id=CALL_2.id),
    message("user", "U2"),
    message("system", "S2"),
    message("assistant", "A2"),
    message("user", "U3"),
    message("user", "U4"),
)


@pytest.mark.parametrize("name", templates.ALL)
def test_a_whole_conversation_keeps_its_order(name: str) -> None:
    text = render(templates.ALL[name], *LONG, tools=(WEATHER,))
    order = [text.rindex(part) for part in ("S1", "U1", "Köln", "RESULT1", "RESULT2", "U2", "S2", "A2", "U3", "U4")]
    assert order == sorted(order)
    assert "Ulm" in text
    assert ("A1" in text) is (name != "MISTRAL")


@pytest.mark.parametrize("name", templates.ALL)
def test_a_turn_is_a_prefix_of_the_next(name: str) -> None:
    """ "hoisting changes the prefix every turn" """
    made = template(templates.ALL[name])
    for end in (2, 7):  # where the assistant speaks
        text = made.render(ChatPrompt(LONG[:end], (WEATHER,)))
        for later in range(end + 1, len(LONG) + 1):
            assert made.render(ChatPrompt(LONG[:later], (WEATHER,))).startswith(text)


@pytest.mark.parametrize("name", templates.ALL)
def test_B74_text_and_parts_are_the_same(name: str) -> None:
    made = template(templates.ALL[name])
    for role in ("user", "system", "assistant"):
        one = (HELLO, message("assistant", "x"), HELLO, Message(role, (TextPart("Hel"), TextPart("lo"))))
        other = (*one[:3], message(role, "Hello"))
        assert made.render(ChatPrompt(one)) == made.render(ChatPrompt(other))


# --- roles ------------------------------------------------------------


def test_B13_a_system_message_in_the_middle_stays_where_it_is() -> None:
    later = (HELLO, message("assistant", "Hi"), message("user", "Go on"), message("system", "Be brief."))
    assert "<user>Go on</><user><system-reminder>\nBe brief.\n</system-reminder></>" in render(templates.QWEN, *later)
    assert "<user>Go on\n\n<system-reminder>\nBe brief.\n</system-reminder></>" in render(templates.GEMMA, *later)
    assert "user\nGo on<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>" in render(templates.CHATML, *later)


def test_a_template_without_system_has_it_in_the_first_turn() -> None:
    assert "<user>Be brief.\n\nHello</>" in render(templates.GEMMA, message("system", "Be brief."), HELLO)


def test_B75_leading_instructions_are_one_system_message() -> None:
    both = (message("system", "One"), message("developer", "Two"), HELLO)
    assert render(templates.QWEN, *both) == "<system>One\n\nTwo</><user>Hello</><assistant>"
    assert "<dev>One\n\nTwo</>" in render(templates.HARMONY, *both)
    assert "<dev>Two</>" in render(templates.HARMONY, *both[1:])


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "system"),  # prints anything
        (
            "{% for m in messages %}{% if m.role not in ('system', 'user') %}{{ raise_exception('role') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}",
            "system",
        ),
        (
            "{% for m in messages %}{{ '[dev]' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}",
            "dev",
        ),
    ],
)
def test_developer_is_system_where_the_template_does_not_know_it(source: str, role: str) -> None:
    assert render(source, message("developer", "x"), HELLO).startswith(f"[{role}]x")


def test_turns_alternate_where_they_must() -> None:
    assert render(templates.GEMMA, message("assistant", "A"), message("assistant", "B"), HELLO, HELLO) == (
        "<s><user>...</><model>A\n\nB</><user>Hello\n\nHello</><model>"
    )
    assert "<user>Hello</><user>Hello</>" in render(templates.QWEN, HELLO, HELLO)


def test_a_conversation_without_a_user_is_taken() -> None:
    assert "Be brief." in render(templates.QWEN, message("system", "Be brief."))
    assert "Be brief." in render(templates.GEMMA, message("system", "Be brief."))


# --- tools ------------------------------------------------------------


def test_B19_results_and_text_after_them() -> None:
    call = message("assistant", tool_calls=(CALL,))
    text = render(templates.MISTRAL, HELLO, call, message("tool", "20", tool_call_id=CALL.id), message("user", "So?"))
    id = text.partition('"id": "')[2][:9]
    assert id.isalnum()
    assert f"[RESULT]20|{id}[/RESULT]...</s>[INST]So?[/INST]" in text
    short = ToolCall("abcdefgh9", "f", "{}")
    assert '"id": "abcdefgh9"' in render(templates.MISTRAL, HELLO, message("assistant", tool_calls=(short,)))


@pytest.mark.parametrize("name", templates.ALL)
def test_B72_B73_a_call_without_text_and_its_result(name: str) -> None:
    call = message("assistant", tool_calls=(CALL,))
    result = Message("tool", (TextPart("2"), TextPart("0 C")), tool_call_id=CALL.id)
    text = render(templates.ALL[name], HELLO, call, result, tools=(WEATHER,))
    assert text.index("Köln") < text.index("20 C")
    assert "None" not in text


def test_one_call_at_a_time_where_the_template_takes_no_more() -> None:
    results = (message("tool", "2", tool_call_id=CALL_2.id), message("tool", "1", tool_call_id=CALL.id))
    text = render(templates.LLAMA, HELLO, message("assistant", tool_calls=(CALL, CALL_2)), *results)
    assert text == (
        '<s><user>Hello</><assistant>{"name": "get_weather", "parameters": {"city": "Köln"}}</><ipython>"1"</>'
        '<assistant>{"name": "get_weather", "parameters": {"city": "Ulm"}}</><ipython>"2"</><assistant>'
    )


def test_tools_calls_and_results_are_text_where_the_template_has_no_form() -> None:
    text = render(templates.GEMMA, *LONG[:5], tools=(WEATHER,))
    assert text.startswith("<s><user>S1\n\n# Tools")
    assert '"name": "get_weather", "description": "Tells the weather."' in text
    assert 'A1\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    assert "<tool_response>\nRESULT1\n</tool_response>\n\n<tool_response>\nRESULT2\n</tool_response>" in text


def test_arguments_are_an_object_or_text_as_the_template_wants() -> None:
    call = message("assistant", tool_calls=(CALL,))
    assert '"arguments": {"city": "Köln"}}' in render(templates.QWEN, HELLO, call)
    assert 'get_weather({"city": "Köln"})' in render(templates.PRINTED, HELLO, call)
    broken = message("assistant", tool_calls=(ToolCall("call_1", "f", '{"city": '),))
    assert '"arguments": "{\\"city\\": "' in render(templates.QWEN, HELLO, broken)
    empty = message("assistant", tool_calls=(ToolCall("call_1", "f", ""),))
    assert '"arguments": {}}' in render(templates.QWEN, HELLO, empty)


def test_ids_with_names_are_made_where_the_template_shows_no_other() -> None:
    turns = (HELLO, message("assistant", tool_calls=(CALL, CALL_2)), message("tool", "r", tool_call_id=CALL_2.id))
    text = render(templates.KIMI, *turns)
    assert '[functions.get_weather:0]{"city": "Köln"}[functions.get_weather:1]{"city": "Ulm"}' in text
    assert "rfunctions.get_weather:1</>" in text


def test_text_thoughts_and_calls_that_a_template_refuses_together_come_apart() -> None:
    turn = message("assistant", "Let me see.", reasoning="hm", tool_calls=(CALL,))
    assert '<user>Hello</><final>Let me see.</><analysis>hm</><call>get_weather{"city": "Köln"}</>' in render(
        templates.HARMONY, HELLO, turn
    )


def test_what_a_template_refuses_after_all_is_text() -> None:
    """The probes have two calls at most."""
    refuse = "{% if m.tool_calls | default([]) | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    source = templates.PRINTED.replace("<{{ m.role }}>", refuse + "<{{ m.role }}>")
    calls = message("assistant", tool_calls=(CALL, CALL_2, ToolCall("call_3", "f", "{}")))
    text = render(source, HELLO, calls, message("tool", "20", tool_call_id=CALL.id))
    assert '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></>' in text
    assert "<tool_response>\n20\n</tool_response>" in text


def test_tools_stay_in_the_prompt_whatever_is_chosen() -> None:
    made = [
        render(templates.QWEN, HELLO, tools=(WEATHER,), tool_choice=choice)
        for choice in (ToolChoice(), ToolChoice("none"), ToolChoice("required", "get_weather"))
    ]
    assert len(set(made)) == 1
    assert "get_weather" in made[0]


def test_a_template_cannot_change_a_tool() -> None:
    source = "{% for t in tools or [] %}{{ t.function.parameters.l.append(1) }}{% endfor %}{{ messages[0].content }}"
    tool = Tool("f", parameters={"l": [0]})
    render(source, HELLO, tools=(tool,))
    assert tool.parameters == {"l": [0]}


# --- thinking ------------------------------------------------------------


def test_B15_thinking_is_switched_by_the_templates_own_variable() -> None:
    plain, on, off = (render(templates.QWEN, HELLO, reasoning=Reasoning(enabled)) for enabled in (None, True, False))
    assert plain == on == "<user>Hello</><assistant>"
    assert off == "<user>Hello</><assistant><think></think>"
    assert render(templates.QWEN, HELLO, reasoning=Reasoning(effort="none")) == off
    own = {"enable_thinking": False}
    assert render(templates.QWEN, HELLO, reasoning=Reasoning(True), template_kwargs=own) == off


@pytest.mark.parametrize(
    ("words", "effort", "shown"),
    [
        ((), "high", "high"),
        ((), "minimal", "minimal"),
        (("no_think", "low", "high"), "minimal", "low"),
        (("no_think", "low", "high"), "xhigh", "high"),
        (("no_think", "low", "high"), "none", "no_think"),
        ((), "none", "low"),
    ],
)
def test_effort_is_a_word_that_the_template_takes(words: tuple[str, ...], effort: str, shown: str) -> None:
    check = f"{{% if reasoning_effort is defined and reasoning_effort not in {list(words)} %}}"
    check += "{{ raise_exception('no') }}{% endif %}"
    source = (check if words else "") + "{{ messages[0].content }}{{ reasoning_effort }}"
    assert render(source, HELLO, reasoning=Reasoning(effort=effort)) == f"Hello{shown}"


def test_thoughts_come_back_under_the_templates_name_for_them() -> None:
    turn = message("assistant", reasoning="hm", tool_calls=(CALL,))
    assert "<think>hm</think>" in render(templates.QWEN, HELLO, turn)
    assert "<analysis>hm</>" in render(templates.HARMONY, HELLO, turn)


# --- continuing ------------------------------------------------------------


def test_an_answer_goes_on_where_it_ends() -> None:
    text = render(templates.CHATML, HELLO, message("assistant", "Once upon a "), continues=True)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nOnce upon a "
    parts = Message("assistant", (TextPart("Once upon "), TextPart("a ")))
    assert render(templates.CHATML, HELLO, parts, continues=True) == text
    assert render(templates.GEMMA, HELLO, message("assistant", "Once "), continues=True).endswith("<model>Once ")
    assert render(templates.QWEN, HELLO, message("assistant"), continues=True).endswith("</><assistant>")
    thought = message("assistant", reasoning="Let me")
    assert render(templates.QWEN, HELLO, thought, continues=True).endswith("<assistant><think>Let me")


def test_an_answer_need_not_be_begun() -> None:
    opened = render(CHATML, HELLO)
    assert opened == render(CHATML, HELLO, opens=False) + "<|im_start|>assistant\n"


def test_what_cannot_be_continued_is_said() -> None:
    with pytest.raises(InvalidRequest, match="last message of the assistant"):
        render(templates.CHATML, HELLO, continues=True)
    with pytest.raises(InvalidRequest, match="continue reasoning"):
        render(templates.CHATML, HELLO, message("assistant", reasoning="Let me"), continues=True)


# --- variables, and what is refused ------------------------------------------------------------


def test_the_day_has_the_names_that_templates_ask_for_and_clients_may_say_another() -> None:
    source = "{{ messages[0].content }} {{ date_string }} {{ datetime }}"
    assert render(source, HELLO) == "Hello 03 Feb 2026 Feb 03 2026"
    assert render(source, HELLO, template_kwargs={"date_string": "then"}) == "Hello then Feb 03 2026"


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_known_templates_give_every_turn_its_role(name: str) -> None:
    asked = (message("system", "S1"), HELLO, message("assistant", "A1"), message("user", "U2"))
    text = render(BUILTIN[name], *asked)
    places = [text.index(part.text) for part in asked]
    assert places == sorted(places)
    assert text.count("<|") > len(asked)


def test_special_tokens_clock_and_kwargs() -> None:
    source = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ ' ' ~ style if style }}{{ eos_token }}"
    assert render(source, HELLO) == "<s>03 Feb 2026</s>"
    assert render(source, HELLO, template_kwargs={"style": "x", "self": 1}) == "<s>03 Feb 2026 x</s>"


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"bos_token": ""}, {"enable_thinking": "no"}])
def test_variables_that_are_not_the_clients(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(kwargs))) as caught:
        render(templates.CHATML, HELLO, template_kwargs=kwargs)
    assert caught.value.param is not None
    assert caught.value.param.startswith("chat_template_kwargs")


def test_B76_images_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="images"):
        render(templates.CHATML, Message("user", (ImagePart("https://example.org/fox.png"),)))


def test_a_model_may_have_a_template_for_tools() -> None:
    sources = {"default": templates.GEMMA, "tool_use": templates.QWEN}
    made = ChatTemplates(sources, clock=lambda: NOW)
    assert made.render(ChatPrompt((HELLO,))) == "<user>Hello</><model>"
    assert made.render(ChatPrompt((HELLO,), (WEATHER,))).startswith("<tools>")
    assert ChatTemplates({"default": ""}, clock=lambda: NOW).render(ChatPrompt((HELLO,))) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_typed_content_is_found() -> None:
    assert render(templates.TYPED, HELLO) == "<user>Hello</>"
