"""JSON schemas made plain: `$ref` followed, `allOf` merged, old spellings turned into new ones.

A plain schema is a boolean, or a dict without `$ref`, `allOf`, `oneOf`, `const`, `nullable` and annotations, whose
`type` is a list. Its `anyOf`, if any, holds what has to be true besides its other keywords.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

from protocols.errors import InvalidRequest

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_TEXT = 256 * 1024
MAX_MERGES = 20_000
MAX_REFERENCES = 32
MAX_VARIANTS = 256

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_UNSUPPORTED = {
    "not": "list what is allowed instead",
    "if": "use anyOf",
    "then": "use anyOf",
    "else": "use anyOf",
    "dependentRequired": "use anyOf",
    "dependentSchemas": "use anyOf",
    "dependencies": "use anyOf",
    "contains": "use items",
    "minContains": "use items",
    "maxContains": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_KEYWORDS = frozenset(
    "type enum anyOf properties required additionalProperties unevaluatedProperties patternProperties propertyNames "
    "minProperties maxProperties items prefixItems unevaluatedItems minItems maxItems uniqueItems minLength maxLength "
    "pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)

Schema = dict[str, Any]
Plain = Schema | bool


class Impossible(Exception):
    """No value satisfies the schema. `anyOf` leaves such a branch out."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why


def invalid(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid JSON schema: {path}: {why}.", param=path)


def expected(path: str, what: str, value: object) -> InvalidRequest:
    return invalid(path, f"expected {what}, got {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_size(schema: object, path: str) -> None:
    """Bounds everything that comes after, recursion above all."""
    nodes = text = 0
    todo: list[tuple[object, int]] = [(schema, 0)]
    while todo:
        value, depth = todo.pop()
        nodes += 1
        if isinstance(value, str):
            text += len(value)
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            text += sum(map(len, value))
            todo += ((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            todo += ((item, depth + 1) for item in value)
        elif (
            value is not None
            and not isinstance(value, (bool, int, float))
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise invalid(path, f"{_shown(value)} is not JSON")
        if depth > MAX_DEPTH:
            raise invalid(path, f"it is nested more than {MAX_DEPTH} deep; put parts of it into $defs")
        if nodes > MAX_NODES or text > MAX_TEXT:
            raise invalid(path, f"it has more than {MAX_NODES} values or {MAX_TEXT} characters")


def same(first: object, second: object) -> bool:
    """Equal as JSON: true is not 1, and 1.0 is."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return first == second


def without_annotations(schema: Schema) -> Schema:
    known = _KEYWORDS | _REWRITTEN | _UNSUPPORTED.keys()
    return {key: value for key, value in schema.items() if key in known}


def common_types(first: list[str], second: list[str]) -> list[str]:
    types = [kind for kind in first if kind in second or (kind == "integer" and "number" in second)]
    return types + [kind for kind in second if kind == "integer" and "number" in first and kind not in types]


class Plainer:
    """Knows the whole schema, which references point into."""

    def __init__(self, root: object, path: str) -> None:
        self._root = root
        self._path = path
        self._merges = 0

    def target(self, pointer: object, path: str) -> object:
        if not isinstance(pointer, str):
            raise expected(path, "a string", pointer)
        if pointer != "#" and not pointer.startswith("#/"):
            raise invalid(path, f"{_shown(pointer)} is not inside this schema; a reference looks like '#/$defs/name'")
        value = self._root
        for part in unquote(pointer).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:6]) < len(value):
                value = value[int(key[:6])]
            else:
                raise invalid(path, f"{_shown(pointer)} leads nowhere: there is no {_shown(key)}")
        return value

    def only_reference(self, schema: object) -> str | None:
        """The pointer, if the schema is nothing but one, also where `allOf` or annotations are wrapped around it."""
        while isinstance(schema, dict):
            keywords = list(without_annotations(schema))
            if keywords == ["$ref"] and isinstance(schema["$ref"], str):
                return schema["$ref"]
            if keywords not in (["allOf"], ["anyOf"], ["oneOf"]):
                return None
            members = schema[keywords[0]]
            if not isinstance(members, list) or len(members) != 1:
                return None
            schema = members[0]
        return None

    def plain(self, schema: object, path: str, followed: tuple[str, ...] = ()) -> Plain:
        self._merges += 1
        if self._merges > MAX_MERGES:
            raise invalid(self._path, "its references and combinations multiply to too many schemas")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise expected(path, "a schema (an object or a boolean)", schema)
        for key, instead in _UNSUPPORTED.items():
            if key in schema:
                raise invalid(f"{path}.{key}", f"'{key}' is not supported; {instead}")
        base: Plain = self._rewritten({key: schema[key] for key in schema if key in _KEYWORDS}, schema, path)
        if "$ref" in schema:
            pointer = schema["$ref"]
            if pointer in followed:
                raise invalid(f"{path}.$ref", f"{_shown(pointer)} refers to itself")
            if len(followed) >= MAX_REFERENCES:
                raise invalid(f"{path}.$ref", f"more than {MAX_REFERENCES} references that lead to references")
            base = self.merge(base, self.plain(self.target(pointer, f"{path}.$ref"), path, (*followed, pointer)), path)
        for index, member in enumerate(_list(schema, "allOf", path)):
            base = self.merge(base, self.plain(member, f"{path}.allOf[{index}]", followed), path)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                members = _list(schema, key, path)
                if not members:
                    raise expected(f"{path}.{key}", "at least one schema", members)
                base = self.merge(base, {"anyOf": members}, path)
        if schema.get("nullable") is True:
            base = {"anyOf": [base, {"type": ["null"]}]}
        return base

    def _rewritten(self, plain: Schema, schema: Schema, path: str) -> Schema:
        plain.pop("anyOf", None)
        if "type" in plain:
            types = plain["type"] if isinstance(plain["type"], list) else [plain["type"]]
            if not types:
                raise expected(f"{path}.type", "at least one type", types)
            for index, kind in enumerate(types):
                if kind not in TYPES:
                    where = f"{path}.type[{index}]" if types is plain["type"] else f"{path}.type"
                    raise expected(where, "one of " + ", ".join(TYPES), kind)
            plain["type"] = types
        for key in ("properties", "patternProperties"):
            if not isinstance(plain.get(key, {}), dict):
                raise expected(f"{path}.{key}", "an object", plain[key])
        for key in ("enum", "required", "prefixItems"):
            if not isinstance(plain.get(key, []), list):
                raise expected(f"{path}.{key}", "a list", plain[key])
        if isinstance(plain.get("items"), list):
            plain["prefixItems"] = plain["items"]
            plain["items"] = schema.get("additionalItems", False)
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(plain.get(exclusive), bool):  # draft 4: a flag of the bound
                if plain.pop(exclusive) and bound in plain:
                    plain[exclusive] = plain.pop(bound)
        return cast(Schema, self.merge(plain, {"enum": [schema["const"]]}, path)) if "const" in schema else plain

    # --- merging -----------------------------------------------------------

    def merge(self, first: Plain, second: Plain, path: str) -> Plain:
        """What both allow. `Impossible` if that is clearly nothing."""
        if first is True or second is True:
            return second if first is True else first
        if first is False or second is False:
            return False
        merged = dict(first)
        for key, value in second.items():
            if key not in merged:
                merged[key] = value
            elif key not in _COMBINED:
                merged[key] = _MERGES.get(key, _merge_equal)(first[key], value, f"{path}.{key}")
        if "anyOf" in first and "anyOf" in second:
            merged["anyOf"] = [_both(a, b) for a in first["anyOf"] for b in second["anyOf"]]
            if len(merged["anyOf"]) > MAX_VARIANTS:
                raise invalid(path, f"its combinations of anyOf have more than {MAX_VARIANTS} cases")
        if any(key in side for side in (first, second) for key in ("prefixItems", "items")):
            _merge_items(merged, first, second)
        if any(key in side for side in (first, second) for key in ("properties", "additionalProperties")):
            _merge_properties(merged, first, second, path)
        if "type" in merged and not merged["type"]:
            raise Impossible(f"{path}.type", "no type satisfies all of it")
        return merged


def _merge_properties(merged: Schema, first: Schema, second: Schema, path: str) -> None:
    if "patternProperties" in merged and (first.keys() & _OBJECT_KEYS and second.keys() & _OBJECT_KEYS):
        raise invalid(f"{path}.patternProperties", "'patternProperties' cannot be combined with other properties")
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    if names:
        merged["properties"] = {name: _both(_member(first, name), _member(second, name)) for name in names}
    if "additionalProperties" in merged:
        merged["additionalProperties"] = _both(*(side.get("additionalProperties", True) for side in (first, second)))


def _merge_items(merged: Schema, first: Schema, second: Schema) -> None:
    heads = [side.get("prefixItems", []) for side in (first, second)]
    rests = [side.get("items", True) for side in (first, second)]
    if length := max(map(len, heads)):
        merged["prefixItems"] = [
            _both(*(head[i] if i < len(head) else rest for head, rest in zip(heads, rests, strict=True)))
            for i in range(length)
        ]
    if "items" in merged:
        merged["items"] = _both(*rests)


_REWRITTEN = frozenset(("$ref", "allOf", "anyOf", "oneOf", "const", "nullable", "additionalItems"))
_OBJECT_KEYS = frozenset(("properties", "additionalProperties", "patternProperties"))
_COMBINED = frozenset(("properties", "additionalProperties", "prefixItems", "items", "anyOf"))


def _list(schema: Schema, key: str, path: str) -> list[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list):
        raise expected(f"{path}.{key}", "a list of schemas", value)
    return value


def _member(schema: Schema, name: str) -> Any:
    """What a schema asks of a property. One that it does not speak of is free, unless the schema is closed."""
    properties = schema.get("properties", {})
    return properties[name] if name in properties else schema.get("additionalProperties", True)


def _both(first: Any, second: Any) -> Any:
    if first is True or second is True or first is second:
        return second if first is True else first
    if first is False or second is False:
        return False
    members = first["allOf"] if isinstance(first, dict) and first.keys() == {"allOf"} else [first]
    return {"allOf": [*members, second]} if isinstance(members, list) else {"allOf": [first, second]}


def _merge_equal(first: object, second: object, path: str) -> object:
    if not same(first, second):
        raise invalid(path, f"{_shown(first)} and {_shown(second)} cannot be combined")
    return first


def _merge_enum(first: list[Any], second: list[Any], path: str) -> list[Any]:
    values = [value for value in first if any(same(value, other) for other in second)]
    if not values:
        raise Impossible(path, "no value is in all of the lists")
    return values


def _merge_bound(choose: Callable[[Any, Any], Any]) -> Callable[[Any, Any, str], Any]:
    def merged(first: Any, second: Any, path: str) -> Any:
        for value in (first, second):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise expected(path, "a number", value)
        return choose(first, second)

    return merged


def _merge_false(first: object, second: object, path: str) -> object:
    """The stricter one of two booleans."""
    return False if first is False or second is False else _merge_equal(first, second, path)


_MERGES: dict[str, Callable[[Any, Any, str], Any]] = {
    "type": lambda first, second, path: common_types(first, second),
    "enum": _merge_enum,
    "required": lambda first, second, path: [*first, *(name for name in second if name not in first)],
    "unevaluatedProperties": _merge_false,
    "unevaluatedItems": _merge_false,
    "propertyNames": lambda first, second, path: _both(first, second),
    **{key: _merge_bound(max) for key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")},
    **{key: _merge_bound(min) for key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")},
}
