"""What is passed on of a model's arguments is one JSON object, however they are cut and whatever is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from protocols.partial_json import MAX_DEPTH, MAX_NUMBER_CHARS, JsonObject, json_object

_STRICT: Any = {"allow_inf_nan": False, "allow_partial": False}
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_OBJECTS = st.dictionaries(st.text(), _VALUES, max_size=5)
_ALMOST = st.text(alphabet='{}[]":,\\/ubnt0123456789.eE+-truefalsnN dD8cC\n\té😀', max_size=60)


def piecewise(text: str, cuts: list[int]) -> str:
    reader = JsonObject()
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    out, start = "", 0
    for end in ends:
        out += reader.feed(text[start:end])
        start = end
    return out + reader.finish()


@given(_OBJECTS, st.booleans(), st.none() | st.integers(0, 3), st.lists(st.integers(0, 200)))
def test_an_object_comes_through_however_it_is_cut(
    value: dict[str, Any], ensure_ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    assert json.loads(piecewise(text, cuts)) == value


@given(_OBJECTS | _ALMOST.map(lambda text: '{"a":' + text), st.integers(0, 400), st.lists(st.integers(0, 200)))
def test_what_is_cut_short_is_an_object_all_the_same(value: Any, length: int, cuts: list[int]) -> None:
    text = (value if isinstance(value, str) else json.dumps(value))[:length]
    whole = json_object(text)
    assert isinstance(from_json(whole, **_STRICT), dict)
    assert piecewise(text, cuts) == whole


@given(_ALMOST | st.text())
def test_so_is_whatever_else_a_model_writes(text: str) -> None:
    assert isinstance(from_json(json_object(text), **_STRICT), dict)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("null", "{}"),
        ("[1]", "{}"),
        ('"text"', "{}"),
        (' {"a" : 1 } and more', '{"a":1}'),
        # cut short
        ('{"a', "{}"),
        ('{"a":', "{}"),
        ('{"a":1,"b', '{"a":1}'),
        ('{"a":"x', '{"a":"x"}'),
        ('{"a":"x\\', '{"a":"x"}'),
        ('{"a":"x\\u00', '{"a":"x"}'),
        ('{"a":[{"b":tru', '{"a":[{}]}'),
        ('{"a":12', '{"a":12}'),
        ('{"a":12.', "{}"),
        # what models get wrong
        ('{"a":1,}', '{"a":1}'),
        ('{"a":[1,]}', '{"a":[1]}'),
        ('{"a":"one\ntwo\tthree\x00"}', '{"a":"one\\ntwo\\tthree\\u0000"}'),
        ('{"a":True,"b":False,"c":None}', '{"a":true,"b":false,"c":null}'),
        (r'{"a":"\d \x \u12"}', r'{"a":"\\d \\x \\u12"}'),
        # half a surrogate pair
        (r'{"a":"\ud83d\ude00"}', r'{"a":"\ud83d\ude00"}'),
        (r'{"a":"\ud83d"}', '{"a":"\ufffd"}'),
        (r'{"a":"\ud83dx\ude00\ud83d\n\ud83d\ud83d\ude00', '{"a":"\ufffdx\ufffd\ufffd\\n\ufffd\\ud83d\\ude00"}'),
        # what cannot be understood is the end
        ('{"a":1 "b":2}', '{"a":1}'),
        ('{"a":1,b:2,"c":3}', '{"a":1}'),
        ('{"a":01,"c":3}', "{}"),
        ('{"a":NaN}', "{}"),
        ('{"a":[1}', '{"a":[1]}'),
    ],
)
def test_repairs(text: str, expected: str) -> None:
    assert json_object(text) == piecewise(text, list(range(len(text)))) == expected


def test_nothing_is_nested_or_counted_deeper_than_parsers_follow() -> None:
    deep = json_object('{"a":' + "[" * 10_000)
    assert deep == '{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert json_object('{"a":' + "9" * MAX_NUMBER_CHARS + "}") == '{"a":' + "9" * MAX_NUMBER_CHARS + "}"
    assert json_object('{"a":' + "9" * (MAX_NUMBER_CHARS + 1) + "}") == "{}"


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    reader = JsonObject()
    fed = [reader.feed(piece) for piece in ('{"path"', ": ", '"a', "bc\\", 'n"', ", ", '"n": 1', "2", "}")]
    assert fed == ["{", "", '"path":"a', "bc", '\\n"', "", "", "", ',"n":12}']
    assert reader.finish() == ""
