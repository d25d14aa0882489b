"""`GET /v1/models` in Anthropic's shape, for callers that say they speak it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import parse_qs

import msgspec

from protocols.anthropic_messages.wire import OutModel, OutModelPage
from protocols.errors import InvalidRequest

MAX_PAGE = 1000
"""Also what a page holds when no limit is given: the official 20 would hide models from clients that read one page."""


def model_body(id: str, created: int) -> bytes:
    return msgspec.json.encode(_model(id, created))


def model_page(models: Sequence[tuple[str, int]], query: str) -> bytes:
    """One page of `models`, which are (id, Unix time of creation), as the URL's `query` asks for it."""
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    ids = [id for id, _ in models]
    limit = _limit(asked["limit"]) if "limit" in asked else MAX_PAGE
    if "before_id" in asked:
        end = _position(ids, asked["before_id"], "before_id")
        page = models[max(0, end - limit) : end]
        has_more = end > limit
    else:
        start = _position(ids, asked["after_id"], "after_id") + 1 if "after_id" in asked else 0
        page = models[start : start + limit]
        has_more = len(models) > start + limit
    return msgspec.json.encode(
        OutModelPage(
            data=tuple(_model(id, created) for id, created in page),
            has_more=has_more,
            first_id=page[0][0] if page else None,
            last_id=page[-1][0] if page else None,
        )
    )


def _model(id: str, created: int) -> OutModel:
    created_at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return OutModel(id=id, display_name=id, created_at=created_at)


def _limit(text: str) -> int:
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= MAX_PAGE:
        raise InvalidRequest(f"Invalid 'limit': expected an integer from 1 to {MAX_PAGE}.", param="limit")
    return int(text)


def _position(ids: list[str], id: str, name: str) -> int:
    if id not in ids:
        raise InvalidRequest(f"Invalid '{name}': there is no model '{id}'.", param=name)
    return ids.index(id)
