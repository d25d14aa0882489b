"""What is kept of a response, so that later requests can build on it and clients can ask for it again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from protocols.body import shown
from protocols.errors import InvalidRequest, NotFound

RESPONSE_PREFIX = "resp_"

_OUR_ITEM_ID = re.compile(r"[a-z]+_([0-9A-Za-z]+)_i?[0-9]+")

_ID_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def response_id(bare: str) -> str:
    return RESPONSE_PREFIX + bare


def output_item_id(type_: str, bare: str, index: int) -> str:
    """`bare` is the response's own id: an item says where it is stored, and needs no index of its own."""
    return f"{_ID_PREFIX[type_]}_{bare}_{index}"


def response_of_item(item_id: str) -> str | None:
    """The response an item is stored with, if we gave it its id."""
    match = _OUR_ITEM_ID.fullmatch(item_id)
    return None if match is None else response_id(match[1])


class StoredResponse(msgspec.Struct, frozen=True):
    """One response as it was answered, and its own input. `ancestors` are the responses before it, oldest first.

    Nobody but its `owner` is to see it.
    """

    id: str
    response: msgspec.Raw
    input: tuple[dict[str, Any], ...]
    ancestors: tuple[str, ...] = ()
    owner: str = ""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, record: bytes) -> StoredResponse:
        return msgspec.json.decode(record, type=cls)

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """Input and output: what the response adds to the conversation."""
        output: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return (*self.input, *output)


def listed(items: Sequence[dict[str, Any]], bare: str) -> tuple[dict[str, Any], ...]:
    """Input items in the form they are listed in: each has an id, and every message a list of parts."""
    return tuple(_listed(item, bare, index) for index, item in enumerate(items))


def _listed(item: dict[str, Any], bare: str, index: int) -> dict[str, Any]:
    type_ = "message" if item.get("type") is None else item["type"]
    prefix = _ID_PREFIX.get(type_, "item")
    item = {**item, "type": type_, "id": item.get("id") or f"{prefix}_{bare}_i{index}"}
    if type_ == "message" and isinstance(text := item["content"], str):
        output = item["role"] == "assistant"
        item["content"] = [
            {"type": "output_text", "text": text, "annotations": []} if output else {"type": "input_text", "text": text}
        ]
    if type_ not in ("reasoning", "additional_tools"):
        item.setdefault("status", "completed")
    return item


def page(items: Sequence[dict[str, Any]], after: str | None, limit: str | None, order: str | None) -> bytes:
    """One page of `items`, by the query's `after` (an item's id), `limit` (1 to 100) and `order` (asc, desc)."""
    if order not in (None, "asc", "desc"):
        raise InvalidRequest(
            f"Invalid 'order': expected one of 'asc' or 'desc', got {shown(order, show_string=True)}.", param="order"
        )
    count = 20 if limit is None else int(limit) if re.fullmatch("[0-9]{1,3}", limit) else 0
    if not 1 <= count <= 100:
        raise InvalidRequest("Invalid 'limit': expected an integer from 1 to 100.", param="limit")
    left = list(items if order == "asc" else reversed(items))
    if after is not None:
        position = next((i for i, item in enumerate(left) if item["id"] == after), None)
        if position is None:
            raise NotFound(f"Item with id '{after}' not found.", param="after")
        left = left[position + 1 :]
    data = left[:count]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(left) > count,
        }
    )
