"""Bodies of requests, for every dialect: JSON in, a validated model out, and one wording for what is wrong with it.

Everything that is wrong is an `InvalidRequest` that names the JSON path, what was expected there, and what came.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, from_json

from protocols.errors import InvalidRequest, PayloadTooLarge

STRING, LIST, OBJECT = "<string>", "<list>", "<object>"
"""Tags of a field of either shape.

pydantic puts the tags of a union into a path. Those in angle brackets, as these, are never keys and are left out.
"""

ModelT = TypeVar("ModelT", bound=BaseModel)


def _stop_at_first(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        for value in schema.values():
            _stop_at_first(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            _stop_at_first(value)


class Wire(BaseModel):
    """No coercion: "hot" is no temperature, and 1.0 is no token count. Unknown keys are ignored, `null` is absent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists stop at their first bad item, which is the one that is told.

        Else pydantic keeps an error for each: eight megabytes of `{}` were 2.5 GB of them, and 20 seconds.
        """
        schema = handler(source)
        _stop_at_first(schema)
        return schema


def _shape(value: object) -> str:
    return STRING if isinstance(value, str) else LIST


STRING_OR_LIST = Discriminator(_shape)
"""For `Annotated[Annotated[str, Tag(STRING)] | Annotated[list[X], Tag(LIST)], STRING_OR_LIST]`."""


def _string_or_object(value: object) -> str:
    return STRING if isinstance(value, str) else OBJECT


STRING_OR_OBJECT = Discriminator(_string_or_object)
"""The same for a field that is a string or an object, whose tag is `OBJECT`."""


ModelName = Annotated[str, BeforeValidator(lambda name: "" if name is None else name)]
"""Of a body that need not name a model: null is as good as nothing."""

MAX_CONTAINERS = 2**16
"""Objects and lists of one body. One of three bytes takes a hundred in memory, and some 10 µs of everybody's time."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Never fails behind a quote and never looks back, so what it takes is proportional to the body."""


def _check_containers(body: bytes) -> None:
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    bare = _STRINGS.sub(b"", body)  # a prompt may be full of brackets
    if bare.count(b"{") + bare.count(b"[") > MAX_CONTAINERS:
        raise PayloadTooLarge(f"The body has more than {MAX_CONTAINERS} objects and lists.")


def parse_json(body: bytes, expected: str = "JSON") -> Any:
    """What `body` says. `PayloadTooLarge` for more objects and lists than `MAX_CONTAINERS`."""
    _check_containers(body)
    try:
        # Also refuses NaN, Infinity, invalid UTF-8, lone surrogates, deep nesting and integers too long for Python.
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        what = f"the body is not valid JSON: {error}" if body.strip() else "the body is empty"
        raise InvalidRequest(f"Expected {expected}, but {what}.") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`."""
    raw = parse_json(body, "a JSON object")
    if not isinstance(raw, dict):
        raise InvalidRequest(f"Expected a JSON object, but the body is {shown(raw)}.")
    return raw


def validated(model: type[ModelT], raw: object) -> ModelT:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)[0]) from None


JsonT = TypeVar("JsonT")


def plain_json(value: JsonT, path: str) -> JsonT:
    """`value`, a piece of JSON that is handed on as it came: its integers must fit what carries it."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise InvalidRequest(
            f"Invalid '{path}': it holds an integer of more than 64 bits, which nothing here can use.", param=path
        ) from None
    return value


_EXPECTED: dict[str, str] = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "an integer",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "one of {expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a string that is not empty",
    "too_short": "at least {min_length} item(s)",
    "too_long": "at most {max_length} items",
}
"""pydantic's error type -> what would be right."""


def invalid(error: ErrorDetails) -> InvalidRequest:
    loc = error["loc"]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc if not _is_tag(key))[1:]
    if error["type"] == "missing":
        return InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    if loc[-1] == LIST and error["type"] == "list_type":
        expected = "a string or a list"
    elif loc[-1] == OBJECT and error["type"] == "model_type":
        expected = "a string or an object"
    elif (wording := _EXPECTED.get(error["type"])) is not None:
        expected = wording.format_map(error.get("ctx", {}))
    else:
        expected = f"something else ({error['msg']})"
    # A string is shown only where it was to be one of a few words: anywhere else it may be the prompt.
    got = shown(error["input"], show_string=error["type"] == "literal_error")
    return InvalidRequest(f"Invalid '{path}': expected {expected}, got {got}.", param=path)


def _is_tag(key: int | str) -> bool:
    return isinstance(key, str) and key.startswith("<")


def shown(value: object, *, show_string: bool = False) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"'{value}'" if show_string and len(value) <= 40 else "a string"
        case int() | float():
            text = str(value)
            return text if len(text) <= 40 else "a number"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"


def validated_at(path: str, model: type[ModelT], raw: object) -> ModelT:
    """`validated`, of a piece of the body that stands at `path`."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        raise invalid({**details, "loc": (path, *details["loc"])}) from None
