"""The error envelope of every OpenAI dialect: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import msgspec

from protocols.errors import ErrorInfo, InternalError

_WORDS: dict[str, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "unauthorized": ("authentication_error", "invalid_api_key"),
    "permission_denied": ("permission_error", "permission_denied"),
    "not_found": ("invalid_request_error", "not_found"),
    "model_not_found": ("invalid_request_error", "model_not_found"),
    "method_not_allowed": ("invalid_request_error", "method_not_supported"),
    "request_timeout": ("invalid_request_error", "request_timeout"),
    "payload_too_large": ("invalid_request_error", "payload_too_large"),
    "unsupported_media_type": ("invalid_request_error", "unsupported_media_type"),
    "headers_too_large": ("invalid_request_error", "headers_too_large"),
    "overloaded": ("rate_limit_error", "rate_limit_exceeded"),
    "rate_limited": ("rate_limit_error", "rate_limit_exceeded"),
    "client_too_slow": ("invalid_request_error", "client_too_slow"),
    "internal": ("server_error", None),
    "not_supported": ("not_supported_error", "not_supported"),
    "backend_lost": ("server_error", "backend_lost"),
    "replica_stopping": ("server_error", "backend_lost"),
    "unavailable": ("server_error", "service_unavailable"),
    "deadline_exceeded": ("server_error", "deadline_exceeded"),
}
"""kind -> (type, code): every kind of `protocols.errors`."""


def error_object(error: ErrorInfo, prompt_param: str) -> dict[str, str | int | None]:
    """`error` in OpenAI's words. `prompt_param` is the dialect's name for the prompt: `messages`, `prompt`, `input`."""
    # A kind of another version is internal here, as in `ServingError.from_info`.
    kind = error.kind if error.kind in _WORDS else InternalError.kind
    type_, code = _WORDS[kind]
    message, param = error.message, error.param
    if kind == InternalError.kind:
        message = InternalError.PUBLIC_MESSAGE  # "5xx detail goes to the log, never to the client"
    elif kind == "context_overflow" and param is None:
        param = prompt_param  # "param = `messages` / `prompt` / `input`"
    # Details are additive integers, `n_prompt_tokens` and `n_ctx` of an overflow.
    return {"message": message, "type": type_, "param": param, "code": code, **error.details}


def error_body(error: ErrorInfo, prompt_param: str) -> bytes:
    """The JSON body for `error`, with `prompt_param` as above."""
    return msgspec.json.encode({"error": error_object(error, prompt_param)})
