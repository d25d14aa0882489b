"""Thinking is set apart first, whatever the tools are."""

from __future__ import annotations

import pytest

from backends.output.reasoning import REASONING_FORMATS, detect_reasoning, reasoning_format
from protocols.events import ReasoningDelta, TextDelta
from tests.backends.output.support import Output, run, spec, values


def answer(text: str, format: str = "think", tail: str = "", *, continues: bool = False) -> tuple[str, str]:
    """Reasoning and text, the same however the text is split."""
    parser = spec(None, format, tail=tail, continues=continues)
    whole = run(parser, [text])
    assert run(parser, list(text)) == whole
    return whole.reasoning, whole.text


@pytest.mark.parametrize("format", REASONING_FORMATS[1:], ids=lambda format: format.name)
def test_every_format(format) -> None:
    begin, end = format.begins[0], format.ends[0]
    assert answer(f"{begin}\nI'm\nthinking\n{end}\n\nHello.\n", format.name) == ("I'm\nthinking", "Hello.\n")
    assert answer(f"I'm thinking{end}Hello.", format.name, tail=f"user: hi\nassistant: {begin}\n") == (
        "I'm thinking",
        "Hello.",
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("Hello.", "", "Hello."),
        ("  Hello.\n ", "", "  Hello.\n "),
        ("<think>never closed\n", "never closed\n", ""),
        ("<think></think>Hello.", "", "Hello."),
        ("<think>\n\n</think>\n\nHello.", "", "Hello."),
        ("<think>", "", ""),
        ("<think>a</thi", "a</thi", ""),
        ("<thin", "", "<thin"),
        ("Hello.\n<think>late</think>\nBye.", "late", "Hello.\nBye."),
        ("<think>a</think>\n<think>b</think>c", "ab", "c"),
        ("The tag <think> begins it.", "", "The tag <think> begins it."),
        ("a </think> b", "", "a </think> b"),
        ("<think>a <think> b</think>c", "a <think> b", "c"),
        ("<think>日本\u3000</think>語", "日本", "語"),
        ("", "", ""),
    ],
)
def test_cases(text: str, reasoning: str, rest: str) -> None:
    assert answer(text) == (reasoning, rest)


def test_markup_around_the_answer_is_dropped() -> None:
    text = "<think>a</think> <response>Hello.</response>"
    assert answer(text, "granite") == ("a", "Hello.")


@pytest.mark.parametrize(
    ("tail", "continues", "thinking"),
    [
        ("<|im_start|>assistant\n<think>\n", False, True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("<|im_start|>assistant\n", False, False),
        ("user: <think>\nassistant:", False, False),
        ("assistant:\n<think>\nI wond", True, True),
        ("assistant:\n<think>\nI wonder</think>So", True, False),
    ],
)
def test_B55_the_end_of_the_prompt_says_whether_the_answer_begins_with_thinking(
    tail: str, continues: bool, thinking: bool
) -> None:
    expected = ("why", "So.") if thinking else ("", "why</think>So.")
    assert answer("why</think>So.", tail=tail, continues=continues) == expected


def test_B55_after_a_tool_result_too() -> None:
    tail = "<tool_call>\n{}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    output = run(spec("hermes", "think", tail=tail + "<|im_start|>assistant\n<think>\n"), ["so 7</think>\n\nIt is 7."])
    assert output == Output("It is 7.", "so 7", (), "stop")


def test_B54_a_call_inside_the_thinking_is_thinking() -> None:
    inside = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    output = run(spec("hermes", "think"), list(f"<think>try {inside}</think>\n\nOr not. {inside}"))
    assert output.reasoning == f"try {inside}"
    assert output.text == "Or not."
    assert values(output) == [("now", {})]
    unclosed = run(spec("hermes", "think"), [f"<think>try {inside}"])
    assert (unclosed.reasoning, unclosed.calls, unclosed.reason) == (f"try {inside}", (), "stop")


def test_B54_thinking_is_set_apart_without_tools() -> None:
    assert run(spec("hermes", "think", offered=()), ["<think>a</think>b"]) == Output("b", "a", (), "stop")


def test_mistral_names_its_call_in_its_thoughts() -> None:
    text = "[THINK]Shall I [TOOL_CALLS]now[ARGS]{} or not[/THINK][TOOL_CALLS]now[ARGS]{}"
    output = run(spec("mistral", "mistral"), list(text))
    assert output.reasoning == "Shall I [TOOL_CALLS]now[ARGS]{} or not"
    assert values(output) == [("now", {})]


def test_thinking_reaches_the_client_at_once() -> None:
    parser = spec(None, "think").make("r", 0)
    assert parser.feed("<think>") == []
    assert parser.thinking
    assert parser.feed("\nI") == [ReasoningDelta("I")]
    assert parser.feed(" think") == [ReasoningDelta(" think")]
    assert parser.feed("</think>\n\nSo") == [TextDelta("So")]
    assert not parser.thinking


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' }}", "think"),
        ("content.split('</think>')", "think"),
        ("<think></think><response></response>", "granite"),
        ("<|channel|>analysis<|message|>", "harmony"),
        ("'<seed:think>'", "seed"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_detection(template: str, name: str | None) -> None:
    assert detect_reasoning(template) == (None if name is None else reasoning_format(name))
