"""Anthropic's error envelope: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from protocols.anthropic_messages.wire import OutError
from protocols.errors import ErrorInfo, InternalError, ServingError

OVERLOADED = 529
"""Anthropic's status for `overloaded_error`, where others have 503."""

_TYPES: dict[str, str] = {
    "invalid_request": "invalid_request_error",
    "context_overflow": "invalid_request_error",
    "unauthorized": "authentication_error",
    "permission_denied": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "method_not_allowed": "invalid_request_error",
    "request_timeout": "invalid_request_error",
    "payload_too_large": "request_too_large",
    "unsupported_media_type": "invalid_request_error",
    "headers_too_large": "request_too_large",
    "overloaded": "rate_limit_error",
    "rate_limited": "rate_limit_error",
    "client_too_slow": "api_error",
    "internal": "api_error",
    "not_supported": "api_error",
    "backend_lost": "api_error",
    "replica_stopping": "api_error",
    "unavailable": "overloaded_error",
    "deadline_exceeded": "timeout_error",
}
"""kind -> type: every kind of `protocols.errors`."""


def status(error: ServingError) -> int:
    return OVERLOADED if _TYPES.get(error.kind) == "overloaded_error" else error.status


def error_body(error: ErrorInfo, request_id: str = "") -> bytes:
    # A kind of another version is internal here, as in `ServingError.from_info`.
    kind = error.kind if error.kind in _TYPES else InternalError.kind
    message = error.message
    if kind == InternalError.kind:
        message = InternalError.PUBLIC_MESSAGE  # "5xx detail goes to the log, never to the client"
    elif kind == "context_overflow" and error.param is None:
        # The words by which Claude Code knows that it has to compact.
        tokens, limit = error.details.get("n_prompt_tokens"), error.details.get("n_ctx")
        message = f"prompt is too long: {tokens} tokens > {limit} maximum"
    # Details are additive integers, `n_prompt_tokens` and `n_ctx` of an overflow.
    body: dict[str, str | int] = {"type": _TYPES[kind], "message": message, **error.details}
    return msgspec.json.encode(OutError(error=body, request_id=request_id or UNSET))
