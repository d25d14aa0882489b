"""JSON, and what models write in its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.output.json_text import JsonScanner, NotJson, escaped, normalised

texts = st.text("ab\"'\\\n\t日\u2028👩{}[]:,", max_size=6) | st.text(max_size=4)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


@given(documents, st.booleans(), st.sampled_from([None, 0, 2]))
def test_json_stays_what_it_is(value: object, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    found = normalised(text)
    assert found is not None and found[0] == text


@given(documents)
def test_python_becomes_json(value: object) -> None:
    found = normalised(repr(value))
    assert found is not None
    if "\\x" not in repr(value) and "\\U" not in repr(value):  # escapes that only Python has are left as they are
        assert json.loads(found[0]) == value


@given(st.text("{}[]\"':,\\ \n1-.eEtruefalsnuNT", max_size=12))
def test_what_is_taken_is_json(text: str) -> None:
    found = normalised(text)
    if found is not None:
        json.loads(found[0])


@given(texts, texts)
def test_escaping_piece_by_piece(left: str, right: str) -> None:
    assert json.loads(f'"{escaped(left)}{escaped(right)}"') == left + right


@pytest.mark.parametrize(
    ("text", "json_text", "kind"),
    [
        ("{'a': True, 'b': [None, False,],}", '{"a": true, "b": [null, false]}', "object"),
        ("'it\\'s \"so\"'", '"it\'s \\"so\\""', "string"),
        ('"a\nb"', '"a\\nb"', "string"),
        ('"\\d+ \\x41 \\u00e9 \\u12 \\u"', '"\\\\d+ \\\\x41 \\u00e9 \\\\u12 \\\\u"', "string"),
        ("1_000", "1000", "number"),
        (".5", "0.5", "number"),
        ("-0.0e+10", "-0.0e+10", "number"),
        ("1" * 100, "1" * 100, "number"),
        ("null", "null", "null"),
        ("[ 1 , 2 ]", "[ 1 , 2 ]", "array"),
    ],
)
def test_cases(text: str, json_text: str, kind: str) -> None:
    assert normalised(text) == (json_text, kind)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1", "{]", "[}", "{1: 2}", "{a: 1}", '{"a" 1}', "[1 2]", "[,]", "nul", "inf", "1e", "1 "],
)
def test_what_is_no_json(text: str) -> None:
    assert normalised(text) is None


def test_deep_nesting_is_no_recursion() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert normalised(deep) == (deep, "array")


def test_text_is_passed_on_as_it_comes() -> None:
    scanner = JsonScanner()
    seen = []
    for char in '{"a": "xy", "n": 12}':
        scanner.feed(char)
        seen.append(scanner.take())
    assert seen == ["{", '"', "a", '"', ":", " ", '"', "x", "y", '"', "", "", ', "', "n", '"', ":", " ", "", "", "12}"]
    assert scanner.done
    with pytest.raises(NotJson):
        JsonScanner().feed("}")
