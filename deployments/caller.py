"""What a request says of its caller, besides its body: which session it is part of, whose responses it may see."""

from __future__ import annotations

from deployments.middleware import KEY, Message, Scope, Send, header
from protocols.affinity import affinity
from protocols.errors import InvalidRequest

TIMEOUT_HEADER = b"x-request-timeout-s"

_SESSION_HEADERS = (
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"x-session-id",  # opencode sends both
    b"session-id",
    b"thread-id",  # Codex, whose threads are parts of a session
)


def session(scope: Scope) -> str | None:
    """The name of what the request is a part of, by the first of these headers."""
    if not any(name in _SESSION_HEADERS for name, _ in scope["headers"]):
        return None  # as of most requests, without a look for each
    return affinity(*(header(scope, name).decode("latin-1") for name in _SESSION_HEADERS))


def timeout_s(scope: Scope) -> float | None:
    """How long the caller will wait for its whole answer, if it says. `InvalidRequest` if that is no time."""
    given = header(scope, TIMEOUT_HEADER).decode("latin-1")
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InvalidRequest(
            f"The header {TIMEOUT_HEADER.decode()} is a number of seconds above 0, not {given[:50]!r}.",
            param=TIMEOUT_HEADER.decode(),
        )
    return seconds


def owner(scope: Scope) -> str:
    """Whose the responses are that the request stores, and may see."""
    id: str = scope.get(KEY, "")
    return id


def with_request_id(send: Send, request_id: str) -> Send:
    """Answers with Anthropic's header for it. Its SDKs look for no other."""

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
        await send(message)

    return with_id
