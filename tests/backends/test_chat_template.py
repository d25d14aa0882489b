"""Rendering as `transformers` would, and every failure as the client's error."""

from __future__ import annotations

from datetime import datetime

import pytest

from backends.chat_template import ChatTemplate
from protocols.errors import InvalidRequest
from protocols.request import ImagePart, Message, Role, TextPart, Tool, ToolCall

QWEN_LIKE = """
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
        {%- endfor %}
    {%- else %}
<|{{ message.role }}|>{{ message.content }}
    {%- endif %}
{%- endfor %}
"""


def message(role: Role, text: str) -> Message:
    return Message(role, (TextPart(text),))


HELLO = [message("user", "Hello")]


def test_chatml_is_the_fallback() -> None:
    assert ChatTemplate().render([message("system", "Be brief."), *HELLO]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate().render(HELLO, add_generation_prompt=False).endswith("Hello<|im_end|>\n")


def test_parts_are_flattened() -> None:
    parts = [Message("user", (TextPart("Hel"), TextPart("lo")))]
    assert ChatTemplate().render(parts) == ChatTemplate().render(HELLO)


def test_whitespace_and_loop_controls_as_in_transformers() -> None:
    source = """
    {%- for m in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{{ m.content }}
    {% endfor %}
end"""
    assert ChatTemplate(source).render([*HELLO, *HELLO]) == "Hello\nend"


def test_training_marks_are_transparent() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "Hello"


def test_special_tokens_clock_and_kwargs() -> None:
    source = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ ' think' if enable_thinking }}{{ eos_token }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2026, 2, 3))
    assert template.render(HELLO) == "<s>03 Feb 2026</s>"
    assert template.render(HELLO, kwargs={"enable_thinking": True, "self": 1}) == "<s>03 Feb 2026 think</s>"
    with pytest.raises(InvalidRequest, match="messages"):
        template.render(HELLO, kwargs={"messages": []})


def test_tojson_does_not_escape() -> None:
    tools = [Tool("f", "a < b & 'c' ü", {"type": "object"})]
    assert "a < b & 'c' ü" in ChatTemplate("{{ tools | tojson }}").render(HELLO, tools)
    assert ChatTemplate("{{ tools is none }}").render(HELLO) == "True"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}[{{ m.role }}]{% endfor %}", "system"),  # prints anything
        ("{% for m in messages %}{% if m.role == 'system' %}[system]{% endif %}{% endfor %}", "system"),  # drops it
        (
            "{% for m in messages %}{% if m.role not in ('system', 'user') %}{{ raise_exception('role') }}{% endif %}"
            "[{{ m.role }}]{% endfor %}",
            "system",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}[dev]{% else %}[{{ m.role }}]{% endif %}{% endfor %}",
            "dev",
        ),
    ],
)
def test_developer_is_system_where_the_template_does_not_know_it(source: str, role: str) -> None:
    assert ChatTemplate(source).render([message("developer", "x")]) == f"[{role}]"


def test_arguments_are_an_object_or_text_as_the_template_wants() -> None:
    call = Message("assistant", tool_calls=(ToolCall("call_1", "f", '{"city": "Köln"}'),))
    printed = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert '{"name": "f", "arguments": {"city": "Köln"}}' in ChatTemplate(QWEN_LIKE).render([*HELLO, call])
    assert ChatTemplate(printed).render([*HELLO, call]) == '{"city": "Köln"}'
    broken = Message("assistant", tool_calls=(ToolCall("call_1", "f", '{"city": '),))
    assert '"{\\"city\\": "' in ChatTemplate(QWEN_LIKE).render([*HELLO, broken])


def test_reasoning_and_tool_results_reach_the_template() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.tool_call_id }}|{{ m.content }};{% endfor %}"
    thought = Message("assistant", (TextPart("a"),), reasoning="hm")
    result = Message("tool", (TextPart("20 C"),), tool_call_id="call_1")
    assert ChatTemplate(source).render([thought, result]) == "hm||a;|call_1|20 C;"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Conversation roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",  # the sandbox: what it is given stays as it is
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(100000) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'secrets' %}",
    ],
)
def test_a_failing_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, max_output_chars=100_000).render(HELLO)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate"):
        ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}").render(HELLO)


def test_images_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="images"):
        ChatTemplate().render([Message("user", (ImagePart("https://example.org/fox.png"),))])


def test_a_broken_template_is_one_line() -> None:
    with pytest.raises(ValueError, match="line 2") as caught:
        ChatTemplate("\n{% if %}")
    assert "\n" not in str(caught.value)
