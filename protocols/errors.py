"""Every error a client can be told about, as one tree.

    ServingError                 kind                    status  retryable
    ├── InvalidRequest           invalid_request         400     no
    │   └── ContextOverflow      context_overflow        400     no     details: n_prompt_tokens, n_ctx
    ├── Unauthorized             unauthorized            401     no
    ├── PermissionDenied         permission_denied       403     no
    ├── NotFound                 not_found               404     no     (no such route)
    │   └── ModelNotFound        model_not_found         404     no
    ├── MethodNotAllowed         method_not_allowed      405     no
    ├── RequestTimeout           request_timeout         408     no     (its body does not arrive)
    ├── PayloadTooLarge          payload_too_large       413     no
    ├── UnsupportedMediaType     unsupported_media_type  415     no
    ├── HeadersTooLarge          headers_too_large       431     no
    ├── Overloaded               overloaded              429     yes    retry_after_s
    ├── RateLimited              rate_limited            429     no     retry_after_s (the limit is its key's)
    ├── ClientTooSlow            client_too_slow         499     no
    ├── InternalError            internal                500     no     (detail goes to the log, never to the client)
    ├── NotSupported             not_supported           501     no
    ├── BackendLost              backend_lost            503     yes    (the replica died under the request)
    │   └── ReplicaStopping      replica_stopping        503     yes    (it stops, and hands over what it has not ended)
    ├── Unavailable              unavailable             503     yes    retry_after_s
    └── DeadlineExceeded         deadline_exceeded       504     no

`message` is public: a dialect words it into its own envelope. `retryable` says whether the same request may succeed
on another replica. `ErrorInfo` is the same error as a value, for the wire between processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

MAX_MESSAGE = 2000
MAX_NAME = 200
"""Characters of an error's message, and of a name or path: what a client sent does not come back at its length."""


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A `ServingError` as plain data; `ServingError.from_info` turns it back."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    details: dict[str, int] = {}


class ServingError(Exception):
    """Base of the tree above. `param` is the JSON path of the offending field, `details` are integers for the body."""

    kind: ClassVar[str]
    status: ClassVar[int]
    retryable: ClassVar[bool] = False

    _by_kind: ClassVar[dict[str, type[ServingError]]] = {}

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _shortened(message, MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, MAX_NAME)
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def __init_subclass__(cls) -> None:
        ServingError._by_kind[cls.kind] = cls

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(self.kind, self.message, self.param, self.retry_after_s, self.details)

    @staticmethod
    def from_info(info: ErrorInfo) -> ServingError:
        """The error `info` stands for. A kind this version does not know (a replica of another version) is internal."""
        cls = ServingError._by_kind.get(info.kind, InternalError)
        return cls(info.message, param=info.param, retry_after_s=info.retry_after_s, details=info.details)


class InvalidRequest(ServingError):
    kind, status = "invalid_request", 400


class ContextOverflow(InvalidRequest):
    """The prompt alone does not fit the model's context."""

    kind = "context_overflow"

    @classmethod
    def of(cls, n_prompt_tokens: int, n_ctx: int) -> ContextOverflow:
        return cls(
            f"Prompt has {n_prompt_tokens} tokens, but the configured context size is {n_ctx} tokens",
            details={"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx},
        )

    @classmethod
    def of_item(cls, index: int, n_prompt_tokens: int, n_ctx: int, param: str) -> ContextOverflow:
        """One of several inputs, which has to be computed in one piece; `param` is the list they are in."""
        return cls(
            f"Item {index} is too large: it has {n_prompt_tokens} tokens, and this model takes {n_ctx} in one piece",
            param=f"{param}[{index}]",
            details={"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx},
        )


class Unauthorized(ServingError):
    kind, status = "unauthorized", 401


class PermissionDenied(ServingError):
    kind, status = "permission_denied", 403


class NotFound(ServingError):
    kind, status = "not_found", 404


class ModelNotFound(NotFound):
    kind = "model_not_found"

    @classmethod
    def of(cls, model: str, known: Iterable[str]) -> ModelNotFound:
        """`known` are the models that there are. Of a name that is no name, the beginning is enough."""
        name = _shortened(model, MAX_NAME)
        return cls(f"The model '{name}' does not exist. Available: {', '.join(known) or 'none'}.", param="model")


class MethodNotAllowed(ServingError):
    kind, status = "method_not_allowed", 405


class RequestTimeout(ServingError):
    kind, status = "request_timeout", 408


class PayloadTooLarge(ServingError):
    kind, status = "payload_too_large", 413


class UnsupportedMediaType(ServingError):
    kind, status = "unsupported_media_type", 415


class HeadersTooLarge(ServingError):
    kind, status = "headers_too_large", 431


class Overloaded(ServingError):
    kind, status, retryable = "overloaded", 429, True


class RateLimited(ServingError):
    kind, status = "rate_limited", 429


class ClientTooSlow(ServingError):
    """The client reads slower than the model writes, and its queue is full."""

    kind, status = "client_too_slow", 499


class InternalError(ServingError):
    kind, status = "internal", 500

    PUBLIC_MESSAGE: ClassVar[str] = "The server had an error while processing the request."


class NotSupported(ServingError):
    kind, status = "not_supported", 501


class BackendLost(ServingError):
    kind, status, retryable = "backend_lost", 503, True


class ReplicaStopping(BackendLost):
    kind = "replica_stopping"


class Unavailable(ServingError):
    kind, status, retryable = "unavailable", 503, True


class DeadlineExceeded(ServingError):
    kind, status = "deadline_exceeded", 504
