"""Documents against the grammars of their schemas, read by our own matcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backends.grammar.gbnf import parse
from backends.grammar.gbnf_matcher import Matcher
from backends.grammar.json_schema import to_gbnf
from protocols.errors import InvalidRequest

Reader = Callable[[str, str], bool]
NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value"],
}
ABC = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}}


class Text(str):
    """A document as it is written, not a string in one."""


CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "anything": (
        {},
        [1, "a", None, True, [1, {"a": []}], {"é": '🙂\n"\\'}, -1.5e3, Text("1E+3"), Text(r'"\ud83d\ude00\/"')],
        [Text("{a:1}"), Text("01"), Text("+1"), Text(""), Text("1."), Text('"\n"'), Text(r'"\ud83d"'), Text(r'"\x"')],
    ),
    "true": (True, [1, {}], []),
    "any object": ({"type": "object"}, [{}, {"a": 1, "b": [{}]}], [[], 1]),
    "required": (
        {"type": "object", "properties": ABC, "required": ["b"]},
        [{"b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "", "c": None}, {"b": "x", "c": None}],
        [{}, {"a": 1}, {"b": 1}, {"b": "x", "a": 1}, {"b": "x", "d": 1}, Text('{"b":"x",}'), Text('{,"b":"x"}')],
    ),
    "all optional": (
        {"properties": ABC},
        [{}, {"a": 1}, {"b": "x"}, {"c": None}, {"a": 1, "c": None}, {"a": 1, "b": "", "c": None}],
        [{"c": None, "a": 1}, {"d": 1}],
    ),
    "all required": ({"properties": ABC, "required": ["a", "b", "c"]}, [{"a": 1, "b": "", "c": None}], [{"a": 1}]),
    "additional schema": (
        {
            "properties": {"a": {"type": "integer"}, "ab": {"type": "string"}},
            "additionalProperties": {"type": "boolean"},
        },
        [{}, {"a": 1}, {"z": True}, {"a": 1, "ab": "x", "b": True, "abc": False, "": True, "é": True, 'a"': False}],
        [{"z": 1}, {"a": True}, {"ab": True}, Text(r'{"\u0061":true}')],
    ),
    "additional true": (
        {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": True},
        [{"a": 1}, {"a": 1, "z": [1]}],
        [{"z": 1}, {}],
    ),
    "undeclared but required": ({"type": "object", "required": ["q"]}, [{"q": [1]}, {"q": 1, "z": 2}], [{}, {"z": 1}]),
    "a map": (
        {"additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": "x"}, {"a": 1, "b": 2, "c": 3}],
    ),
    "names": ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, [{"a": 1}, {}], [{"A": 1}]),
    "name pattern": ({"patternProperties": {"^x-": {"type": "integer"}}}, [{"x-a": 1}, {}], [{"a": 1}, {"x-a": ""}]),
    "forbidden property": ({"properties": {"a": False, "b": {}}}, [{}, {"b": 1}], [{"a": 1}]),
    "odd names": ({"properties": {'a"b\\c': {}, "naïve -": {}, "": {}}}, [{'a"b\\c': 1, "naïve -": 2, "": 3}], []),
    "enum": (
        {"enum": ["a", "ab", 1, 1.5, None, True, {"x": [1, 2]}]},
        ["a", "ab", 1, 1.5, None, True, {"x": [1, 2]}],
        ["b", "", 2, False, {"x": [1]}],
    ),
    "long enum": ({"enum": [f"v{i}" for i in range(300)]}, ["v1", "v17", "v299"], ["v300", "v"]),
    "enum of prefixes": ({"enum": ["a" * i for i in range(1, 99)]}, ["a", "a" * 60, "a" * 98], ["", "a" * 99]),
    "const": ({"const": {"a": [1]}}, [{"a": [1]}], [{}, {"a": [2]}]),
    "enum and type": ({"enum": ["a", 1], "type": "string"}, ["a"], [1]),
    "enum and bounds": ({"enum": [1, 5, 9], "minimum": 2}, [5, 9], [1]),
    "enum and pattern": ({"enum": ["aa", "b"], "pattern": "^a"}, ["aa"], ["b"]),
    "types": ({"type": ["string", "null"]}, ["x", None], [1]),
    "nullable": ({"type": "string", "nullable": True}, ["x", None], [1]),
    "anyOf": (
        {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]},
        [1, [1, 2], []],
        ["x", ["a"]],
    ),
    "anyOf and siblings": (
        {
            "properties": {"k": {"const": "x"}},
            "required": ["k"],
            "anyOf": [
                {"properties": {"v": {"type": "integer"}}, "required": ["v"]},
                {"properties": {"w": {"type": "string"}}, "required": ["w"]},
            ],
        },
        [{"k": "x", "v": 1}, {"k": "x", "w": "s"}],
        [{"k": "x"}, {"k": "y", "v": 1}],
    ),
    "oneOf": ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string"}], "maximum": 5}, [3, 5, "a"], [6, 2]),
    "allOf": (
        {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "allOf of bounds": (
        {"type": "number", "allOf": [{"minimum": 1}, {"type": "integer", "maximum": 3}]},
        [1, 3],
        [0, 4],
    ),
    "allOf of enums": ({"allOf": [{"enum": [1, 2, True]}, {"enum": [2, 1.0, 3]}]}, [1, 2], [3, True]),
    "allOf of tuples": (
        {"allOf": [{"prefixItems": [{"type": "integer"}], "minItems": 1}, {"items": {"minimum": 5}}]},
        [[5]],
        [[4], []],
    ),
    "reference": ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}, "title": "x"}, [1], ["a"]),
    "escaped pointer": (
        {"$ref": "#/definitions/a~1b%20~0c", "definitions": {"a/b ~c": {"type": "integer"}}},
        [1],
        ["a"],
    ),
    "recursion": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        [{"value": 1}, {"value": 1, "next": {"value": 2, "next": None}}, {"value": 1, "children": [{"value": 2}]}],
        [{"next": None}, {"value": 1, "next": 3}],
    ),
    "recursion at the root": ({"properties": {"c": {"$ref": "#"}}}, [{}, {"c": {"c": {}}}], [{"c": 1}]),
    "recursion in allOf": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {"properties": {"n": {"allOf": [{"$ref": "#/$defs/n"}, {"required": ["x"]}]}, "x": {}}}},
        },
        [{}, {"n": {"x": 1}}, {"n": {"n": {"x": 1}, "x": 1}}],
        [{"n": {}}],
    ),
    "items": ({"items": {"type": "integer"}, "minItems": 2, "maxItems": 4}, [[1, 2], [1, 2, 3, 4]], [[1], [1] * 5, []]),
    "one item": ({"items": {"type": "integer"}, "maxItems": 1}, [[], [1]], [[1, 2], Text("[,]")]),
    "no items": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "any items": ({"type": "array", "minItems": 1}, [[1], ["a", {}]], [[]]),
    "many items": (
        {"items": {"const": 1}, "minItems": 250, "maxItems": 333},
        [[1] * 250, [1] * 333],
        [[1] * 249, [1] * 334],
    ),
    "tuple": ({"prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[], [1], [1, "a"]], [["a"], [1, "a", 3]]),
    "tuple and more": (
        {
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "items": {"type": "null"},
            "maxItems": 3,
        },
        [[1, "a"], [1, "a", None]],
        [[1], [1, "a", None, None], [1, "a", 2]],
    ),
    "old tuple": (
        {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        [[1, "a", "b"], [1], []],
        [[1, 2]],
    ),
    "length": (
        {"minLength": 2, "maxLength": 4},
        ["ab", "abcd", "é🙂", Text(r'"\n\u00e9"'), Text(r'"\ud83d\ude00x"')],
        ["a", "abcde", "", Text(r'"\ud83d\ude00"')],
    ),
    "long": (
        {"type": "string", "minLength": 150, "maxLength": 3600},
        ["a" * n for n in (150, 151, 199, 200, 299, 350, 3599, 3600)],
        ["a" * n for n in (0, 149, 3601)],
    ),
    "pattern": ({"pattern": r"^[a-c]{2,3}(-\d+)?$"}, ["ab", "abc-12"], ["a", "abcd", "ab-"]),
    "pattern anywhere": ({"pattern": "b+"}, ["abba", "b", "🙂b"], ["aa", ""]),
    "pattern half anchored": ({"pattern": "^a|b$"}, ["axx", "xxb"], ["xa"]),
    "pattern of what is escaped": ({"pattern": '^(a*|b?)*["\\\\]\\n\\u00e9$'}, ['aabb"\né', "\\\né"], ['c"\né', '"é']),
    "pattern of others": ({"pattern": "^[^a]*$"}, ["bcd\n\\", "é", ""], ["ba"]),
    "pattern of classes": ({"pattern": r"^\S+@\w+\.[^\W\d]$"}, ["a@b.c"], ["a b@c.d", "a@b.1"]),
    "pattern with its length": ({"pattern": "^a{1,5}$", "maxLength": 5, "minLength": 1}, ["aaaaa"], ["aaaaaa"]),
    "date": ({"format": "date"}, ["2024-02-29"], ["2024-13-01", "2024-02-30", "24-1-1"]),
    "time": ({"format": "time"}, ["10:00:00Z", "10:00:00.5+02:00"], ["25:00:00Z", "10:00"]),
    "date-time": ({"format": "date-time"}, ["2024-02-29T23:59:59.123Z"], ["2024-02-29", "2024-02-29T1Z"]),
    "duration": ({"format": "duration"}, ["P1DT2H", "PT5M", "P3W"], ["P", "PT", "P1D2H"]),
    "uuid": ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123", ""]),
    "ipv4": ({"format": "ipv4"}, ["255.0.10.199"], ["256.1.1.1", "01.1.1.1", "1.1.1"]),
    "ipv6": (
        {"format": "ipv6"},
        ["::", "::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "1::"],
        ["1::2::3", "1:2"],
    ),
    "email": ({"format": "email"}, ["a.b+c@d-e.org"], ["a@b", "a@@b.c", "a"]),
    "uri": ({"format": "uri"}, ["https://a.b/c?d=e#f"], ["nope", "a b:c"]),
    "hostname": ({"format": "hostname"}, ["a-b.c"], ["-a", "a..b"]),
    "unknown format": ({"type": "string", "format": "phone"}, ["x"], [1]),
    "integer": ({"type": "integer"}, [0, 7, -12], [1.5, Text("-0"), Text("1e3")]),
    "integer range": ({"type": "integer", "minimum": -5, "exclusiveMaximum": 10}, [-5, 0, 9], [-6, 10, 1.5]),
    "number range": ({"minimum": 0, "maximum": 1}, [0, 1, 0.5, Text("1.0"), 0.999], [-0.1, 1.01, 2, Text("1e-1")]),
    "open range": ({"type": "number", "exclusiveMinimum": 0}, [0.1, 5, 1234.5], [0, Text("0.0"), -1]),
    "old open range": ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, [6], [5]),
    "cents": ({"type": "number", "multipleOf": 0.01, "minimum": 0}, [1, 1.25], [1.255, -1]),
    "annotations": (
        {"title": "t", "description": "d", "default": 1, "examples": [], "$schema": "s", "x-y": 1},
        [1, []],
        [],
    ),
}


def texts(document: Any) -> set[str]:
    if isinstance(document, Text):
        return {document}
    return {
        json.dumps(document, ensure_ascii=False),
        json.dumps(document, ensure_ascii=False, indent=2),
        json.dumps(document, ensure_ascii=False, separators=(",", ":")),
    }


def matches(gbnf: str, text: str) -> bool:
    matcher = Matcher(parse(gbnf), {})
    state = matcher.advance(matcher.start, -1, text.encode()) if text else matcher.start  # a token is never empty
    return state is not None and matcher.complete(state)


def check(reads: Reader, schema: Any, accepted: list[Any], rejected: list[Any]) -> None:
    gbnf = to_gbnf(schema)
    for text in (text for document in accepted for text in texts(document)):
        assert reads(gbnf, text), f"{text}\n{gbnf}"
    for text in (text for document in rejected for text in texts(document)):
        assert not reads(gbnf, text), f"{text}\n{gbnf}"


@pytest.mark.parametrize("name", CASES)
def test_documents(name: str) -> None:
    check(matches, *CASES[name])


def test_white_space_is_bounded() -> None:
    gbnf = to_gbnf({"type": "object"})
    assert matches(gbnf, '{\n    "a": 1\n}')
    for text in ("{  }  ", " {}", '{"a" :1}', '{"a":   1}', "{" + "\n" * 4 + "}", "{\n" + " " * 42 + "}"):
        assert not matches(gbnf, text), text


def test_B71_references_lead_into_lists_and_back_to_themselves() -> None:
    branches = {"type": "array", "items": {"$ref": "#/properties/tree/anyOf/1"}}
    tree = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"of": branches}, "required": ["of"]}]}
    gbnf = to_gbnf({"type": "object", "properties": {"tree": tree}, "required": ["tree"]})
    for good in ("null", '{"of": []}', '{"of": [{"of": []}, {"of": [{"of": []}]}]}'):
        assert matches(gbnf, f'{{"tree": {good}}}'), good
    for bad in ("{}", '{"of": [null]}', '{"of": [{}]}'):
        assert not matches(gbnf, f'{{"tree": {bad}}}'), bad
    for reference in ("https://example.org/tree.json", "tree.json", "#tree"):
        with pytest.raises(InvalidRequest):
            to_gbnf({"properties": {"tree": {"$ref": reference}}})


def test_is_deterministic() -> None:
    schema = {
        "$defs": {"node": NODE},
        "properties": {"a b": {"enum": [1]}, "a-b": {"enum": [2]}, "n": {"$ref": "#/$defs/node"}},
    }
    assert to_gbnf(schema) == to_gbnf(json.loads(json.dumps(schema)))
    assert "root-a-b-2 ::= " in to_gbnf(schema)


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ("x", "", "expected a schema"),
        (None, "", "expected a schema"),
        (False, "", "allows nothing"),
        ({"type": "foo"}, ".type", "one of object, array"),
        ({"type": []}, ".type", "at least one"),
        ({"type": ["string", 5]}, ".type[1]", "one of object, array"),
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not", "list what is allowed"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, ".properties.a.items.uniqueItems", "leave it out"),
        ({"if": {}}, ".if", "anyOf"),
        ({"minLength": -1}, ".minLength", "whole number"),
        ({"minimum": "3"}, ".minimum", "expected a number"),
        ({"minimum": 1e300}, ".minimum", "digits"),
        ({"multipleOf": 3}, ".multipleOf", "0.1, 0.01"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "", "no number"),
        ({"minLength": 3, "maxLength": 2}, ".maxLength", "less than"),
        ({"prefixItems": [{}], "minItems": 2}, "", "no room"),
        ({"$ref": "http://x/y"}, ".$ref", "#/$defs/name"),
        ({"$ref": "#/$defs/x"}, ".$ref", "leads nowhere"),
        ({"$ref": "#"}, ".$ref", "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "", "without an end"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", "requires itself"),
        ({"pattern": "(?=a)b"}, ".pattern", "'(?:'"),
        ({"pattern": "a\\b"}, ".pattern", "at the begin or the end"),
        ({"pattern": "["}, ".pattern", "too early"),
        ({"pattern": "a", "maxLength": 5}, ".pattern", "imply that length"),
        ({"format": "email", "maxLength": 5}, ".format", "imply that length"),
        ({"enum": []}, ".enum", "none of the values"),
        ({"enum": 1}, ".enum", "expected a list"),
        ({"anyOf": []}, ".anyOf", "at least one"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ".type", "no type"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ".pattern", "cannot be combined"),
        ({"required": ["a"], "additionalProperties": False}, ".required[0]", "not allowed"),
        ({"properties": {"a": {}}, "minProperties": 3}, ".minProperties", "required"),
        ({"properties": {"a": {}}, "patternProperties": {"b": {}}}, ".patternProperties", "one pattern"),
    ],
)
def test_errors(schema: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_gbnf(schema)
    assert caught.value.param == f"json_schema{param}"
    assert message in caught.value.message


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = wrap(schema)
    return schema


HOSTILE: dict[str, Any] = {
    "deep": nested(5000, lambda inner: {"items": inner}),
    "wide": {"enum": list(range(30_000))},
    "chain of references": {
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)},
        "$ref": "#/$defs/0",
    },
    "doubling references": {
        "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(25)} | {"25": {}},
        "$ref": "#/$defs/0",
    },
    "nested choices": {
        "$defs": {
            str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}", "minLength": 1}, {"type": "null"}]} for i in range(900)
        },
        "$ref": "#/$defs/0",
    },
    "product of choices": {"allOf": [{"anyOf": [{"minimum": i} for i in range(20)]}] * 3},
    "optional properties": {"properties": {str(i): {} for i in range(1000)}},
    "huge pattern": {"pattern": "^(a{1000}){1000}$"},
    "optional parts": {"pattern": "^(" + "(a?)" * 200 + ")*$"},
    "long names": {"properties": {"x" * 1000 + str(i): {} for i in range(250)}},
    "not JSON": {"enum": [float("nan")]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    with pytest.raises(InvalidRequest):
        to_gbnf(HOSTILE[name])


def test_large_but_harmless() -> None:
    levels = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(1500)} | {"1500": {}}
    assert matches(to_gbnf({"$defs": levels, "$ref": "#/$defs/0"}), '{"a": {"a": {}}}')
    properties = {f"p{i}": {"type": "integer"} for i in range(300)}
    assert matches(to_gbnf({"properties": properties}), '{"p5": 1, "p299": 2}')
    assert matches(to_gbnf({"enum": ["\ud800", "a"]}), r'"\ud800"')
    assert matches(to_gbnf({"allOf": [{"properties": {"a": {"minimum": i}}} for i in range(4000)]}), '{"a": 3999}')
