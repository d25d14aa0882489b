"""gpt-oss: messages on channels."""

from __future__ import annotations

import pytest

from tests.backends.output.support import run, spec, values

ANALYSIS = "<|channel|>analysis<|message|>I'm\nthinking<|end|>"
START = "<|start|>assistant"


def check(text: str, tail: str = START) -> tuple[str, str, list[tuple[str, object]]]:
    parser = spec("harmony", "harmony", tail=tail)
    whole = run(parser, [text])
    assert run(parser, list(text)) == whole
    return whole.reasoning, whole.text, values(whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hello <b>!", ("", "Hello <b>!", [])),
        ("<|channel|>commentary<|message|>Hello", ("", "Hello", [])),
        (f"{ANALYSIS}{START}<|channel|>final<|message|>Hello<|return|>", ("I'm\nthinking", "Hello", [])),
        ("<|channel|>analysis<|message|>I'm\nthinking", ("I'm\nthinking", "", [])),
        (
            f"{ANALYSIS}{START}<|channel|>final <|constrain|>json<|message|>" + '{"a": 1}',
            ("I'm\nthinking", '{"a": 1}', []),
        ),
        (' to=functions.now<|channel|>analysis<|message|>{"a": 1}', ("", "", [("now", {"a": 1})])),
        ('<|channel|>analysis to=functions.now<|message|>{"a": 1}', ("", "", [("now", {"a": 1})])),
        ("<|channel|>commentary to=now <|constrain|>json<|message|>{}", ("", "", [("now", {})])),
        (
            f"{ANALYSIS}{START} to=functions.now<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>",
            ("I'm\nthinking", "", [("now", {})]),
        ),
        (f"{START} to=container.exec<|channel|>commentary<|message|>ls", ("", "ls", [])),
        ('<|channel|>commentary to=python <|constrain|>code<|message|>print("hi")', ("", 'print("hi")', [])),
        (
            f"<|channel|>commentary to=assistant{ANALYSIS}{START}<|channel|>final<|message|>Hello",
            ("I'm\nthinking", "Hello", []),
        ),
        ("<|channel|> final<|message|>Hello", ("", "Hello", [])),
        (f"{ANALYSIS}  {START}<|channel|>final<|message|>Hello<|end|>\n", ("I'm\nthinking", "Hello", [])),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b", [])),
        ("Hello", ("", "Hello", [])),
        ("to be", ("", "to be", [])),
        ("<|channel|>final", ("", "", [])),
        ("<|channel|>final<|message|>a < b <|x|>", ("", "a < b <|x|>", [])),
        ("<|channel|>final<|message|>a <|en", ("", "a <|en", [])),
        ("", ("", "", [])),
    ],
)
def test_messages(text: str, expected: object) -> None:
    assert check(text) == expected


@pytest.mark.parametrize(
    ("tail", "text", "expected"),
    [
        (f"<|end|>{START}", "<|channel|>final<|message|>So", ("", "So", [])),
        (f"{START}<|channel|>analysis<|message|>I'm", " thinking<|end|>", (" thinking", "", [])),
        (f"{START}<|channel|>final<|message|>Hel", "lo", ("", "lo", [])),
        (f"{START}<|channel|>final", "<|message|>Hello", ("", "Hello", [])),
        (f"{START}<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "{}", ("", "", [("now", {})])),
        ("no such token", "Hello", ("", "Hello", [])),
    ],
)
def test_B55_the_answer_begins_where_the_prompt_ends(tail: str, text: str, expected: object) -> None:
    assert check(text, tail) == expected


def test_without_reasoning_thoughts_are_text() -> None:
    output = run(spec("harmony"), [f"{ANALYSIS}{START}<|channel|>final<|message|>Hello"])
    assert (output.reasoning, output.text) == ("", "I'm\nthinkingHello")


def test_a_header_without_an_end_is_text() -> None:
    text = "<|channel|>" + "x" * 600
    assert check(text) == ("", text, [])
