"""Random schemas and documents, judged by the jsonschema package; and bounds of numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.grammar.json_schema import to_gbnf
from protocols.errors import InvalidRequest
from tests.backends.grammar.test_json_schema import matches


def texts(document: Any) -> list[str]:
    return [json.dumps(document, ensure_ascii=False, indent=indent) for indent in (None, 2)]


NAMES = st.sampled_from(["a", "ab", "b", "é", 'q"', ""])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab"\\é🙂\n', max_size=3))
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-120, 120),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, size: {"type": "number", "minimum": low / 8, "exclusiveMaximum": (low + size) / 8},
        st.integers(-20, 20),
        st.integers(1, 40),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=4)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def closed(properties: dict[str, Any], needed: set[str], additional: Any) -> Any:
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in needed],
            "additionalProperties": additional,
        }

    return st.one_of(
        st.builds(
            closed, st.dictionaries(NAMES, inner, min_size=1, max_size=4), st.sets(NAMES), st.just(False) | inner
        ),
        st.builds(
            lambda item, low, more: {"type": "array", "items": item, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "items": False},
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
    )


SCHEMAS = st.recursive(LEAVES, containers, max_leaves=6)


def instance(draw: Callable[[st.SearchStrategy[Any]], Any], schema: Any) -> Any:
    if "anyOf" in schema:
        return instance(draw, draw(st.sampled_from(schema["anyOf"])))
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    match schema.get("type"):
        case "boolean":
            return draw(st.booleans())
        case "null":
            return None
        case "integer":
            return draw(st.integers(schema["minimum"], schema["maximum"]))
        case "number":
            return draw(st.integers(int(schema["minimum"] * 8), int(schema["exclusiveMaximum"] * 8) - 1)) / 8
        case "string":
            return draw(st.text(min_size=schema["minLength"], max_size=schema["maxLength"]))
        case "array" if "prefixItems" in schema:
            count = draw(st.integers(0, len(schema["prefixItems"])))
            return [instance(draw, item) for item in schema["prefixItems"][:count]]
        case "array":
            count = draw(st.integers(schema["minItems"], schema["maxItems"]))
            return [instance(draw, schema["items"]) for _ in range(count)]
        case "object":
            required, additional = schema["required"], schema["additionalProperties"]
            present = [name for name in schema["properties"] if name in required or draw(st.booleans())]
            made = {name: instance(draw, schema["properties"][name]) for name in present}
            if additional is not False and draw(st.booleans()):
                name = draw(st.sampled_from(["a0", "zz", 'q"x', "🙂"]))
                made[name] = instance(draw, additional)
            return made
    return draw(SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(NAMES, SCALARS, max_size=2))


def mutated(draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> Any:
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(value)))
        return {key: mutated(draw, item) if key == name else item for key, item in value.items()}
    if isinstance(value, dict):
        name = draw(NAMES)
        return {k: v for k, v in value.items() if k != name} if name in value else {**value, name: draw(SCALARS)}
    if isinstance(value, list):
        return value[1:] if value and draw(st.booleans()) else [*value, draw(SCALARS)]
    return draw(SCALARS | st.just([]) | st.just({}) | st.integers(-1000, 1000).map(lambda n: n / 8))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_schemas(data: st.DataObject) -> None:
    """What is valid and in order is accepted; what is accepted is valid."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    schema = data.draw(SCHEMAS)
    gbnf = to_gbnf(schema)
    document = instance(data.draw, schema)
    assert validator(schema).is_valid(document)
    for text in texts(document):
        assert matches(gbnf, text), text
    changed = document
    for _ in range(4):
        changed = mutated(data.draw, changed)
        if not validator(schema).is_valid(changed):
            assert not any(matches(gbnf, text) for text in texts(changed)), changed


@settings(max_examples=50, deadline=None)
@given(
    st.none() | st.integers(-3000, 3000),
    st.none() | st.integers(-3000, 3000),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.sampled_from([1, 10, 1000]),
    st.lists(st.integers(-4000, 4000), min_size=10, max_size=30),
)
def test_ranges(low: int | None, high: int | None, low_key: str, high_key: str, scale: int, values: list[int]) -> None:
    kind = "integer" if scale == 1 else "number"
    bounds = {key: bound / scale for key, bound in ((low_key, low), (high_key, high)) if bound is not None}
    strict = {"exclusiveMinimum": 1, "exclusiveMaximum": 1}
    least = None if low is None else low + strict.get(low_key, 0)
    most = None if high is None else high - strict.get(high_key, 0)
    try:
        gbnf = to_gbnf({"type": kind, **bounds})
    except InvalidRequest:
        # Between two open decimals that differ there is always another one.
        assert low is not None and high is not None and (low >= high if scale > 1 else least > most)  # type: ignore[operator]
        return
    near = [bound + d for bound in (low, high) if bound is not None for d in (-1, 0, 1)]
    for value in [*values, *near, 0]:
        text = json.dumps(value if scale == 1 else value / scale)
        inside = (least is None or value >= least) and (most is None or value <= most)
        assert matches(gbnf, text) is (inside and text != "-0.0"), (text, gbnf)
