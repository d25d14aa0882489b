"""llama.cpp's error envelope: `{"error": {code, message, type}}`, where the code is the HTTP status."""

from __future__ import annotations

import msgspec

from protocols.errors import ErrorInfo, InternalError, ServingError

_TYPES: dict[str, str] = {
    "invalid_request": "invalid_request_error",
    "context_overflow": "exceed_context_size_error",
    "unauthorized": "authentication_error",
    "permission_denied": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "method_not_allowed": "invalid_request_error",
    "request_timeout": "invalid_request_error",
    "payload_too_large": "invalid_request_error",
    "unsupported_media_type": "invalid_request_error",
    "headers_too_large": "invalid_request_error",
    "overloaded": "unavailable_error",
    "rate_limited": "unavailable_error",
    "client_too_slow": "invalid_request_error",
    "internal": "server_error",
    "not_supported": "not_supported_error",
    "backend_lost": "unavailable_error",
    "replica_stopping": "unavailable_error",
    "unavailable": "unavailable_error",
    "deadline_exceeded": "server_error",
}
"""kind -> type: every kind of `protocols.errors`."""


def error_body(info: ErrorInfo) -> bytes:
    error = ServingError.from_info(info)  # a kind of another version is internal here
    # "5xx detail goes to the log, never to the client"
    message = InternalError.PUBLIC_MESSAGE if isinstance(error, InternalError) else error.message
    body = {"code": error.status, "message": message, "type": _TYPES[error.kind], **error.details}
    return msgspec.json.encode({"error": body})
