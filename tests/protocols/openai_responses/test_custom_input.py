"""A custom tool's free text comes out of its JSON arguments, wherever these are cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols.openai_responses.custom_input import CustomInput
from protocols.openai_responses.tools import custom_arguments

_TEXT = st.text(alphabet='ab"\\/\n\t\r\b\f é日\U0001f469\u2028\x00\x7f{}', max_size=12)


def fed(pieces: Iterable[str]) -> str:
    custom = CustomInput()
    out = [custom.feed(piece) for piece in pieces]
    return "".join([*out, custom.finish()])


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(_TEXT, st.booleans(), st.sampled_from([None, 1, 4]), st.lists(st.integers(0, 200), max_size=8))
def test_the_text_comes_out_whole(text: str, ascii_only: bool, indent: int | None, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert fed(cut(arguments, places)) == text


@given(_TEXT, st.booleans())
def test_one_character_at_a_time(text: str, ascii_only: bool) -> None:
    assert fed(json.dumps({"input": text}, ensure_ascii=ascii_only)) == text
    assert fed([custom_arguments(text)]) == text


@given(_TEXT, st.booleans(), st.integers(0, 200))
@example("\U0001f469", True, 18)
def test_what_was_cut_is_a_beginning(text: str, ascii_only: bool, place: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert text.startswith(fed([arguments[: place % len(arguments)]]))


def test_text_comes_as_early_as_it_can() -> None:
    custom = CustomInput()
    assert [custom.feed(piece) for piece in ['{"inp', 'ut" :', ' "a', "b\\", "nc\\u00", 'e9"', "}"]] == [
        *("", "", "a", "b", "\nc", "é", ""),
    ]
    assert custom.closed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", "{}"),
        ("", ""),
        ("plain text", "plain text"),
        ('"a string"', "a string"),
        ('{"patch": "x"}', "x"),
        ('{"patch": 1}', '{"patch": 1}'),
        ('{"a": "x", "input": "y"}', '{"a": "x", "input": "y"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": "a", "more": 1}', "a"),
        (" " * 80 + '{"input": "a"}', "a"),
        ('{"patch": "\\ud83d"}', "?"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx\\u0041"}', "\ufffdxA"),
        ('{"input": "\\ude00\\q\\u12"}', "\ufffdq\\u12"),
        ('{"input": "two\nlines"}', "two\nlines"),
    ],
)
def test_odd_arguments_are_not_lost(arguments: str, text: str) -> None:
    assert fed([arguments]) == text
    assert fed(arguments) == text
    text.encode()
