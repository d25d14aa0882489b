"""The ranges of what decides about the number, the length and the end of answers, the same for every engine."""

from __future__ import annotations

import math

from protocols.errors import InvalidRequest
from protocols.request import Request


def check_limits(request: Request) -> None:
    if request.max_tokens is not None and request.max_tokens < 0:
        raise InvalidRequest("max_tokens must be at least 0", param="max_tokens")
    if request.stop_indent < 0:
        raise InvalidRequest("stop_indent must be at least 0", param="stop_indent")
    if request.max_predict_ms is not None and not -1 <= request.max_predict_ms < math.inf:
        raise InvalidRequest("max_predict_ms must be a number that is at least -1", param="max_predict_ms")
    for name, value, least in (
        ("n", request.n, 1),
        ("slot.keep", request.slot.keep, -1),
        ("slot.discard", request.slot.discard, 0),
    ):
        if value < least:
            raise InvalidRequest(f"{name} must be at least {least}", param=name)
    if request.n > 1 and request.resume:
        raise InvalidRequest("A request with several choices cannot be resumed", param="n")
