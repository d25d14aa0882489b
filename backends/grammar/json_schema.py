"""From a JSON schema to a grammar: every text that the grammar admits satisfies the schema.

The grammar is narrower than the schema where a model gains nothing from the difference, and might never end:

- properties come in the order in which they are declared;
- an object with `properties` has no others, unless `additionalProperties` says so; so do arrays with `prefixItems`;
- white space is a space or a line with its indentation, and only behind `{ [ , :` and before `} ]`;
- numbers have at most 16 digits before the point and 16 after it, and those with bounds no exponent;
- keywords imply a type: `{"minLength": 1}` is a string.

It is wider in one place: `oneOf` is taken for `anyOf`. Formats without a rule of their own are comments, and so is any
format beside a `pattern`. What is not supported, and would change the meaning, is an `InvalidRequest` whose `param` is
the path of the keyword.
"""

from __future__ import annotations

import json
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

from backends.grammar import gbnf, schema_strings
from backends.grammar.regex_syntax import RegexError
from backends.grammar.schema_keywords import KEYWORDS_OF, bounds, counts, fits, step
from backends.grammar.schema_merge import (
    TYPES,
    Impossible,
    Plain,
    Plainer,
    Schema,
    check_size,
    expected,
    invalid,
    without_annotations,
)
from backends.grammar.schema_numbers import decimals, integers
from backends.grammar.schema_rules import MAX_DIGITS, RuleWriter, either, one_of, quoted
from backends.grammar.schema_strings import FORMATS, json_text
from protocols.errors import InvalidRequest

COMMA = '"," space '
MAX_CHOICES = 400
MAX_NESTED_CHOICES = 32


def to_gbnf(schema: object, path: str = "json_schema", *, root: object = None) -> str:
    """`path` is what the paths in errors begin with. The same schema always gives the same text.

    `schema` may be part of `root`, which is what references in it point into then.
    """
    for document in (schema, root):
        check_size(document, path)
    converter = _Converter(schema, path, RuleWriter(), "root", root)
    converter.run()
    return converter.checked_text()


def write_rule(rules: RuleWriter, schema: object, path: str, name: str, *, root: object = None) -> str:
    """The name of a rule for `schema`, which `to_gbnf` has been found to take, beside the other rules of a grammar."""
    converter = _Converter(schema, path, rules, name, root)
    converter.run()
    return converter.root


class _Converter:
    """Rules are named when they are first needed, and written one after the other: schemas may refer to themselves."""

    def __init__(self, schema: object, path: str, rules: RuleWriter, name: str, document: object = None) -> None:
        """`schema` is `document`, or part of it."""
        self._path = path
        self._rules = rules
        self._plainer = Plainer(schema if document is None else document, path)
        self.root = self._rules.reserve(name)
        self._named: dict[str, str] = {'{"$ref": "#"}': self.root} if document is None else {}
        self._todo: deque[tuple[str, object, str]] = deque([(self.root, schema, path)])
        self._paths = {self.root: path}
        self._nested_choices = 0

    def run(self) -> None:
        self._rules.json("space")
        while self._todo:
            name, schema, path = self._todo.popleft()
            try:
                self._rules.define(name, self._any(schema, path, name))
            except Impossible as error:
                raise invalid(error.path, error.why) from error

    def checked_text(self) -> str:
        text = self._rules.text()
        try:
            rules = gbnf.parse(text)
        except InvalidRequest as error:
            why = f"it is too large, or refers to itself without an end ({error.message})"
            raise invalid(self._path, why) from error
        if rules.endless:
            where = self._paths.get(rules.endless[0], self._path)
            raise invalid(where, "it requires itself, so that no document can satisfy it")
        return text

    def _rule(self, schema: object, path: str, *parts: str) -> str:
        """The name of a rule for `schema`, to be written later if it is new."""
        if (pointer := self._plainer.only_reference(schema)) is not None:
            schema, parts = {"$ref": pointer}, (pointer.rpartition("/")[2] or "root",)
        elif isinstance(schema, dict):
            schema = without_annotations(schema)
        if schema is True or schema == {}:
            return self._rules.json("value")
        if isinstance(schema, dict) and schema.keys() == {"type"} and schema["type"] in TYPES:
            return self._rules.json(schema["type"])
        key = json.dumps(schema)
        if key not in self._named:
            name = self._named[key] = self._rules.reserve(*parts)
            self._paths[name] = path
            self._todo.append((name, schema, path))
        return self._named[key]

    def _any(self, schema: object, path: str, name: str) -> str:
        return self._plain(self._plainer.plain(schema, path), path, name)

    def _plain(self, schema: Plain, path: str, name: str) -> str:
        if isinstance(schema, bool):
            if not schema:
                raise Impossible(path, "'false' allows nothing")
            return self._rules.json("value")
        if "anyOf" in schema:
            if self._nested_choices >= MAX_NESTED_CHOICES:
                raise invalid(path, f"more than {MAX_NESTED_CHOICES} nested anyOf")
            self._nested_choices += 1
            try:
                return self._any_of(schema, path, name)
            finally:
                self._nested_choices -= 1
        if "enum" in schema:
            return self._enum(schema, path)
        types = schema.get("type")
        if types is None:
            types = [kind for kind, keywords in KEYWORDS_OF.items() if any(key in schema for key in keywords)]
        if not types:
            return self._rules.json("value")
        options, failures = [], []
        for kind in types:
            if kind == "integer" and "number" in types:
                continue
            try:
                options.append(self._of_type(kind, schema, path, name))
            except Impossible as error:
                failures.append(error)
        if not options:
            raise failures[0]
        return either(options)

    def _of_type(self, kind: str, schema: Schema, path: str, name: str) -> str:
        match kind:
            case "object":
                return self._object(schema, path, name)
            case "array":
                return self._array(schema, path, name)
            case "string":
                return self._string(schema, path, name)
            case "integer" | "number":
                return self._number(kind, schema, path)
        return self._rules.json(kind)

    def _any_of(self, schema: Schema, path: str, name: str) -> str:
        base = {key: value for key, value in schema.items() if key != "anyOf"}
        options, failures = [], []
        for index, branch in enumerate(schema["anyOf"]):
            where = f"{path}.anyOf[{index}]"
            try:
                if not base and self._plainer.only_reference(branch) is not None:
                    options.append(self._rule(branch, where))
                    continue
                plain = self._plainer.merge(base or True, self._plainer.plain(branch, where), where)
                if not isinstance(plain, bool) and plain.keys() == {"type"} and len(plain["type"]) == 1:
                    options.append(self._rules.json(plain["type"][0]))
                    continue
                option = self._rules.reserve(name, str(index))
                self._paths[option] = where
                try:
                    self._rules.define(option, self._plain(plain, where, option))
                except Impossible:
                    self._rules.drop(option)
                    raise
                options.append(option)
            except Impossible as error:
                failures.append(error)
        if not options:
            raise failures[0]
        return either(options)

    # --- values ------------------------------------------------------------

    def _enum(self, schema: Schema, path: str) -> str:
        values = [value for value in schema["enum"] if fits(value, schema, path)]
        if not values:
            raise Impossible(f"{path}.enum", "none of the values satisfies the rest of the schema")
        plain = [json_text(value) for value in values if not isinstance(value, (dict, list))]
        options = [one_of(plain)] if plain else []
        return either(options + [self._constant(value) for value in values if isinstance(value, (dict, list))])

    def _constant(self, value: object) -> str:
        """Like its text, with white space where it is allowed."""
        if isinstance(value, dict):
            items = [f'{quoted(json_text(key))} ":" space {self._constant(item)}' for key, item in value.items()]
            return f'"{{" space {f" {COMMA}".join(items)} space "}}"'
        if isinstance(value, list):
            return f'"[" space {f" {COMMA}".join(map(self._constant, value))} space "]"'
        return quoted(json_text(value))

    def _string(self, schema: Schema, path: str, name: str) -> str:
        low, high = counts(schema, "Length", path)
        key, whole, pattern = "pattern", False, schema.get("pattern")
        if pattern is None and schema.get("format") in FORMATS:
            key, whole, pattern = "format", True, FORMATS[schema["format"]]
        if pattern is None:
            return schema_strings.with_length(self._rules, low, high)
        if not isinstance(pattern, str):
            raise expected(f"{path}.pattern", "a regular expression", pattern)
        try:
            return schema_strings.matching(self._rules, pattern, low, high, whole, name)
        except RegexError as error:
            raise invalid(f"{path}.{key}", str(error)) from error

    def _number(self, kind: str, schema: Schema, path: str) -> str:
        low, high = bounds(schema, path)
        places = MAX_DIGITS
        if "multipleOf" in schema:
            unit = step(schema, path)
            if kind == "integer" and (1 / Fraction(unit)).denominator == 1:
                unit = Decimal(1)
            places = -unit.adjusted()
            if unit != Decimal(1).scaleb(-places) or not 0 <= places <= MAX_DIGITS:
                raise invalid(f"{path}.multipleOf", "of multiples, those of 1, 0.1, 0.01 and so on are supported")
        text: str | None
        if kind == "integer" or places == 0:
            first = None if low is None else math.ceil(low.value)
            last = None if high is None else math.floor(high.value)
            if low is not None and first is not None and low.open and first == low.value:
                first += 1
            if high is not None and last is not None and high.open and last == high.value:
                last -= 1
            text = self._rules.json("integer") if first is None and last is None else integers(first, last)
        elif low is None and high is None and "multipleOf" not in schema:
            text = self._rules.json("number")
        else:
            text = decimals(low, high, places)
        if text is None:
            raise Impossible(path, "no number lies between its bounds")
        return text

    # --- arrays and objects --------------------------------------------------

    def _array(self, schema: Schema, path: str, name: str) -> str:
        if schema.get("uniqueItems", False) is not False:
            raise invalid(f"{path}.uniqueItems", "'uniqueItems' is not supported; leave it out")
        if schema.get("unevaluatedItems", True) not in (True, False):
            raise invalid(f"{path}.unevaluatedItems", "'unevaluatedItems' is supported as a boolean only")
        low, high = counts(schema, "Items", path)
        head = schema.get("prefixItems", [])
        rest = schema.get("items", not head and schema.get("unevaluatedItems", True))
        if forbidden := [i for i, item in enumerate(head) if item is False]:
            head, rest = head[: forbidden[0]], False
        first = [self._rule(item, f"{path}.prefixItems[{i}]", name, str(i)) for i, item in enumerate(head[:high])]
        limit = 0 if rest is False else None if high is None else max(high - len(head), 0)
        if low > len(first) + (low if limit is None else limit):
            raise Impossible(path, f"it has no room for {low} items")
        more = max(low - len(first), 0)
        if limit == 0:
            tail = ""
        else:
            item = self._rule(rest, f"{path}.items", name, "item")
            if not first:
                return f'"[" space {self._list(item, more, limit, name)} space "]"'
            tail = self._rules.repeat(COMMA + item, more, limit, name, "more")
        for index in reversed(range(len(first))):
            tail = f"{COMMA if index else ''}{first[index]} {tail}".rstrip()
            if index >= low:
                tail = self._rules.add(f"({tail})?", name, "from", str(index))
        return f'"[" space {tail} space "]"'

    def _list(self, item: str, low: int, high: int | None, name: str) -> str:
        if high in (0, 1):
            return '""' if high == 0 else item if low else f"{item}?"
        more = self._rules.repeat(COMMA + item, max(low - 1, 0), None if high is None else high - 1, name, "more")
        return f"{item} {more}" if low else f"({item} {more})?"

    def _object(self, schema: Schema, path: str, name: str) -> str:
        properties = dict(schema.get("properties", {}))
        if schema.get("unevaluatedProperties", True) not in (True, False):
            raise invalid(f"{path}.unevaluatedProperties", "'unevaluatedProperties' is supported as a boolean only")
        closed = bool(properties or schema.get("patternProperties")) or schema.get("unevaluatedProperties") is False
        rest = schema.get("additionalProperties", not closed)
        required = schema.get("required", [])
        for index, key in enumerate(required):
            if not isinstance(key, str):
                raise expected(f"{path}.required[{index}]", "a name", key)
            if properties.setdefault(key, schema.get("additionalProperties", True)) is False:
                raise Impossible(f"{path}.required[{index}]", f"{key!r} is required, and not allowed")
        members = []
        for key, member in properties.items():
            if member is not False:
                value = self._rule(member, f"{path}.properties.{key}", name, key)
                members.append((rf'{quoted(json_text(key))} ":" space {value}', key in required))
        other = self._other_member(schema, rest, properties, path, name)
        low, high = counts(schema, "Properties", path)
        if not members:
            if other is None:
                if low:
                    raise Impossible(f"{path}.minProperties", f"it has no room for {low} properties")
                body = '""'
            else:
                body = self._list(other, low, high, name)
        else:
            count = sum(needed for _, needed in members)
            if low > count or (high is not None and (other is not None or high < len(members))):
                key = "minProperties" if low > count else "maxProperties"
                raise invalid(f"{path}.{key}", f"'{key}' beside 'properties' is not supported; use 'required'")
            body = self._members(members, other, path, name)
        return f'"{{" space {body} space "}}"'

    def _other_member(self, schema: Schema, rest: Any, properties: Schema, path: str, name: str) -> str | None:
        """A member with a name of its own; None if there is no such."""
        if schema.get("patternProperties"):
            patterns = schema["patternProperties"]
            if properties or len(patterns) != 1 or rest is not False:
                raise invalid(f"{path}.patternProperties", "one pattern, and no other properties, are supported")
            ((pattern, rest),) = patterns.items()
            where = f"{path}.patternProperties.{pattern}"
            key = self._string({"pattern": pattern}, where, name)
        elif rest is False:
            return None
        elif properties:
            key, where = schema_strings.none_of(self._rules, list(properties)), f"{path}.additionalProperties"
        else:
            key, where = self._rules.json("string"), f"{path}.additionalProperties"
        if "propertyNames" in schema:
            if properties or schema.get("patternProperties"):
                raise invalid(f"{path}.propertyNames", "'propertyNames' beside other properties is not supported")
            key_path = f"{path}.propertyNames"
            names = self._plainer.merge(
                {"type": ["string"]}, self._plainer.plain(schema["propertyNames"], key_path), key_path
            )
            key = self._rules.add(self._plain(names, key_path, f"{name}-key"), name, "key")
        return self._rules.add(f'{key} ":" space {self._rule(rest, where, name, "other")}', name, "member")

    def _members(self, members: list[tuple[str, bool]], other: str | None, path: str, name: str) -> str:
        """In order; optional ones may be missing. `following` are the ways to go on with another member."""
        after = self._rules.repeat(COMMA + other, 0, None, name, "others") if other else ""
        following = f"{other} {after}" if other else None
        choices, needed = 0, False  # how many members the text may go on with; whether it has to
        for index in reversed(range(len(members))):
            member, required = members[index]
            here = f"{member} {after}".rstrip()
            choices = 1 if required else choices + 1
            if choices > MAX_CHOICES:
                raise invalid(f"{path}.properties", f"more than {MAX_CHOICES} optional properties in a row")
            following = here if required or following is None else either([here, following])
            needed = needed or required
            if index and not members[index - 1][1]:  # it is written twice
                following = self._rules.add(following, name, "from", str(index))
            after = f"{COMMA}{following}" if needed else f"({COMMA}{following})?"
            if index and not (needed and required):
                after = self._rules.add(after, name, "after", str(index - 1))
        assert following is not None
        return following if needed else f"({following})?"
