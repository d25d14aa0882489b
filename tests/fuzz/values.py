"""Random JSON: what a wire model's schema allows, and what nobody should send."""

from __future__ import annotations

import copy
import random
from typing import Any

from pydantic import BaseModel

MAX_DEPTH = 6

WORDS = (
    "a",
    "Hi",
    "get_weather",
    "m",
    "STOP",
    "call_1",
    "Why is the sky blue?",
    "ü 日本 👩‍👩‍👧",
    'quo"te\\',
    "\n\n",
    "user",
)

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "-1", "true", "null", "NaN", "\x00", "\ud800", "a\udfffb", "\u2028", "\ufeff", "\x7f"),
    *("x" * 300, "[DONE]", "data: x\n\n", "event: error\r\n", "<think>", "<tool_call>", "../../etc/passwd", "%s%n"),
    *([], {}, [[]], [{}], {"": ""}, [None], ["a"], [0], {"a": None}, {"type": "text"}, {"type": 5}, {"type": None}),
)


def hostile(rng: random.Random) -> Any:
    value = copy.deepcopy(rng.choice(HOSTILE))
    match rng.randrange(12):
        case 0:
            for _ in range(rng.choice((3, 30, 120, 300))):
                value = [value] if rng.random() < 0.5 else {"a": value}
        case 1:
            return "x" * rng.choice((1000, 20_000))
        case 2:
            return [value] * rng.choice((2, 17, 129, 2100))
        case 3:
            return {f"k{i}": value for i in range(rng.choice((2, 17, 300)))}
    return value


def plain(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, of modest size."""
    match rng.randrange(6 if depth < 3 else 4):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.randint(-3, 300)
        case 2:
            return round(rng.uniform(-2, 2), 3)
        case 3:
            return rng.choice(WORDS)
        case 4:
            return [plain(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(WORDS): plain(rng, depth + 1) for _ in range(rng.randrange(4))}


class SchemaSampler:
    """Values of a pydantic model, by its JSON schema: right in every type and range, and in nothing else."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._schema = model.model_json_schema()
        self._defs: dict[str, Any] = self._schema.get("$defs", {})

    def body(self, rng: random.Random, optional: float) -> dict[str, Any]:
        """`optional` is how likely a field that may be left out is there."""
        return self._object(self._schema, rng, 0, optional)

    def fields(self, rng: random.Random, count: int) -> dict[str, Any]:
        """Some of the model's fields."""
        properties = self._schema["properties"]
        names = rng.sample(sorted(properties), min(count, len(properties)))
        return {name: self._value(properties[name], rng, 1) for name in names}

    def _object(self, schema: dict[str, Any], rng: random.Random, depth: int, optional: float) -> dict[str, Any]:
        required = schema.get("required", ())
        return {
            name: self._value(inner, rng, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if name in required or rng.random() < optional
        }

    def _value(self, schema: dict[str, Any], rng: random.Random, depth: int) -> Any:
        if "$ref" in schema:
            return self._value(self._defs[schema["$ref"].rpartition("/")[2]], rng, depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                members = [m for m in schema[union] if m.get("type") != "null" or rng.random() < 0.2] or schema[union]
                simple = [m for m in members if "$ref" not in m and m.get("type") not in ("array", "object")]
                return self._value(rng.choice(simple if depth > MAX_DEPTH and simple else members), rng, depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                low, high = int(schema.get("minimum", -5)), int(schema.get("maximum", 300))
                return rng.choice((low, high, min(high, max(low, rng.randint(-1, 12)))))
            case "number":
                low, high = schema.get("minimum", -3.0), schema.get("maximum", 3.0)
                return rng.choice((low, high, round(rng.uniform(low, high), 3), int(low)))
            case "string":
                return rng.choice(WORDS)
            case "array":
                count = rng.randint(schema.get("minItems", 0), max(schema.get("minItems", 0), 3))
                return [self._value(schema.get("items", {}), rng, depth + 1) for _ in range(count)]
            case "object" if schema.get("properties"):
                return self._object(schema, rng, depth, 0.3)
            case "object":
                return {rng.choice(WORDS): self._value(_values_of(schema), rng, depth + 1) for _ in range(2)}
        return plain(rng)


def _values_of(schema: dict[str, Any]) -> dict[str, Any]:
    inner = schema.get("additionalProperties")
    return inner if isinstance(inner, dict) else {}
