"""What a request says of its caller, besides its body: which session it is part of, whose responses it may see."""

from __future__ import annotations

from deployments.middleware import KEY, Message, Scope, Send, header
from protocols.affinity import affinity

_SESSION_HEADERS = (
    b"x-claude-code-session-id",
    b"x-session-affinity",
    b"x-session-id",  # opencode sends both
    b"session-id",
    b"thread-id",  # Codex, whose threads are parts of a session
)


def session(scope: Scope) -> str | None:
    """The name of what the request is a part of, by the first of these headers."""
    return affinity(*(header(scope, name).decode("latin-1") for name in _SESSION_HEADERS))


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
