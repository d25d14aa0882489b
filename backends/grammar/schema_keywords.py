"""Reads the keywords that bound a value: checked, and with old spellings already gone."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from backends.grammar import regex_syntax
from backends.grammar.schema_merge import Impossible, Schema, expected, invalid
from backends.grammar.schema_numbers import MAX_BOUND_DIGITS, Bound
from backends.grammar.triggers import Program, Progress

MAX_COUNT = 100_000

_TYPE_OF = {
    "object": "properties required additionalProperties patternProperties propertyNames minProperties maxProperties "
    "unevaluatedProperties",
    "array": "items prefixItems minItems maxItems uniqueItems unevaluatedItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
KEYWORDS_OF = {kind: keywords.split() for kind, keywords in _TYPE_OF.items()}


def type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def _finds(pattern: object, text: str, path: str) -> bool:
    if not isinstance(pattern, str):
        raise expected(path, "a regular expression", pattern)
    try:
        program = Program(regex_syntax.parse(pattern))
    except regex_syntax.RegexError as error:
        raise invalid(path, str(error)) from error
    return program.feed(Progress(), [(ord(char), 1) for char in text])[1] is not None


def counts(schema: Schema, what: str, path: str) -> tuple[int, int | None]:
    found: list[int | None] = []
    for key in (f"min{what}", f"max{what}"):
        value = schema.get(key)
        if value is None:
            found.append(None)
        elif type(value) not in (int, float) or not 0 <= value <= MAX_COUNT or value != int(value):
            raise expected(f"{path}.{key}", f"a whole number from 0 to {MAX_COUNT}", value)
        else:
            found.append(int(value))
    low, high = found[0] or 0, found[1]
    if high is not None and low > high:
        raise Impossible(f"{path}.max{what}", f"{high} is less than min{what}, {low}")
    return low, high


def _decimal(schema: Schema, key: str, path: str) -> Decimal:
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise expected(f"{path}.{key}", "a number", value)
    number = Decimal(repr(value))
    digits = number.as_tuple()
    if abs(number.adjusted()) > MAX_BOUND_DIGITS or len(digits.digits) > MAX_BOUND_DIGITS:
        raise expected(f"{path}.{key}", f"a number of at most {MAX_BOUND_DIGITS} digits", value)
    return number


def bounds(schema: Schema, path: str) -> tuple[Bound | None, Bound | None]:
    """The tighter one where there are two."""
    found = {
        key: Bound(_decimal(schema, key, path), key.startswith("exclusive"))
        for key in KEYWORDS_OF["number"][:4]
        if key in schema
    }
    lows = [found[key] for key in ("minimum", "exclusiveMinimum") if key in found]
    highs = [found[key] for key in ("maximum", "exclusiveMaximum") if key in found]
    return (
        max(lows, key=lambda bound: (bound.value, bound.open), default=None),
        min(highs, key=lambda bound: (bound.value, not bound.open), default=None),
    )


def step(schema: Schema, path: str) -> Decimal:
    step = _decimal(schema, "multipleOf", path)
    if step <= 0:
        raise expected(f"{path}.multipleOf", "a number above 0", schema["multipleOf"])
    return step


def fits(value: object, schema: Schema, path: str) -> bool:
    kind = type_of(value)
    types = schema.get("type", [kind])
    if kind not in types and not (kind == "integer" and "number" in types):
        return False
    if isinstance(value, (dict, list)):
        for key in KEYWORDS_OF[kind]:
            if key in schema:
                raise invalid(f"{path}.{key}", f"'{key}' beside an enum of objects or arrays is not supported")
    if isinstance(value, str):
        low, high = counts(schema, "Length", path)
        pattern = schema.get("pattern")
        return (
            low <= len(value)
            and (high is None or len(value) <= high)
            and (pattern is None or _finds(pattern, value, f"{path}.pattern"))
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        lower, upper = bounds(schema, path)
        number = Decimal(repr(value))
        return not (
            (lower and (number < lower.value or (lower.open and number == lower.value)))
            or (upper and (number > upper.value or (upper.open and number == upper.value)))
            or ("multipleOf" in schema and Fraction(number) % Fraction(step(schema, path)) != 0)
        )
    return True
