"""Whether an answer is one that its route may give."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from protocols.errors import MAX_MESSAGE, MAX_NAME, InternalError
from protocols.sse import CONTENT_TYPE
from tests.deployments.support import Exchange
from tests.fuzz import mutations
from tests.fuzz.mutations import BOMB, Path
from tests.fuzz.routes import Envelope, Route
from tests.protocols.dialects import Answer

ANYWHERE = frozenset({400, 404, 405, 413, 415, 431})


@dataclass
class Sent:
    """One request, and what was done to it."""

    route: Route
    method: str
    path: str
    query: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    what: list[str]
    touched: tuple[Path, ...] = ()
    plain: bytes | None = None
    """The body without its coding; None where that is broken."""
    fails: bool = False
    """Whether the model is to fail."""
    good: bool = False
    """Whether nothing is wrong with it, so that the answer is 200."""

    @property
    def ordinary(self) -> bool:
        return (self.method, self.path) == (self.route.method, self.route.path)

    def __str__(self) -> str:
        shown = self.body if len(self.body) <= 3000 else self.body[:3000] + b"... (%d bytes)" % len(self.body)
        query = f"?{self.query[:200]}" if self.query else ""
        return f"{self.method} {self.path[:200]}{query}\n{self.headers}\n{self.what}\n{shown!r}"


def judge(sent: Sent, got: Exchange) -> Answer | None:
    """The answer of a generation, where there is one. Fails on what may not be."""
    assert got.complete, "the answer has an end"
    headers = got.headers
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", headers["x-request-id"]), (
        "an id that came along is repeated as it is"
    )
    body = got.body
    if BOMB in sent.what and sent.ordinary and sent.query == sent.route.query:
        assert got.status == 413, "a bomb went off"
    if got.status == 200 and sent.ordinary and sent.plain:
        strict_json(sent.plain)  # what is no JSON is not taken for any
    if got.status == 200 and headers["content-type"] == CONTENT_TYPE:
        return _stream(sent, body)
    if got.status == 204:  # a preflight: RFC 9110, 8.6 forbids a length here
        assert sent.method == "OPTIONS"
        assert not body
        return None
    assert headers["content-length"] == str(len(body))
    if got.status == 200 and sent.path == "/metrics":
        assert list(text_string_to_metric_families(body.decode()))
        return None
    assert headers["content-type"] == "application/json"
    value = strict_json(body)
    if got.status != 200:
        _error(sent, got, value)
        return None
    dialect, route = sent.route.dialect, sent.route
    if not sent.ordinary or dialect is None or route.decode is None:
        return None
    if sent.plain is None or b"response_fields" in sent.plain:
        return None
    assert not dialect.has_n or not route.decode(sent.plain, "r").stream
    return dialect.read_body(body)


def _stream(sent: Sent, body: bytes) -> Answer | None:
    route, dialect = sent.route, sent.route.dialect
    assert sent.ordinary and dialect is not None and route.decode is not None
    if sent.plain is None or b"response_fields" in sent.plain:
        return None
    n = 1
    if dialect.has_n:
        call = route.decode(sent.plain, "r")
        assert call.stream
        n = sum(request.n for request in call.requests)
    if sent.fails:
        assert dialect.read_failure(body, n)["message"]
        return None
    return dialect.read_stream(body, n)


def _error(sent: Sent, got: Exchange, value: Any) -> None:
    status, envelopes = got.status, _envelopes(sent)
    errors = [error for error in (_inside(value, envelope, got) for envelope in envelopes) if error is not None]
    assert errors, f"not in the words of {envelopes}: {value}"
    message = errors[0]["message"]
    assert isinstance(message, str) and message
    assert len(message) <= MAX_MESSAGE + 1, f"what was sent comes back: {message[:80]}"
    assert message != InternalError.PUBLIC_MESSAGE or sent.fails
    for leaked in ("Traceback", "pydantic", "msgspec", "protocols.", "deployments.", "<string>", "<list>", "<object>"):
        assert leaked not in message
    allowed = ANYWHERE | sent.route.statuses | (frozenset({500, 503, 529}) if sent.fails else frozenset())
    assert status in allowed, f"status {status}: {message}"
    expected = sent.route.statuses | {431}  # headers are mutated of good requests too
    assert not sent.good or sent.fails or status in expected, f"a good request got {status}: {message}"
    if status == 405:
        assert got.headers["allow"]
    if status == 415:
        assert got.headers["accept-encoding"]
    if status == 400 and sent.ordinary and sent.touched:
        _names_the_field(sent, errors[0], message)


def _names_the_field(sent: Sent, error: dict[str, Any], message: str) -> None:
    """The message says what is wrong with a body that is JSON: with one value spoilt, some key on the way to it."""
    if "n_ctx" in error or message.startswith(("Expected a JSON object", "Expected JSON")):
        return
    if message.startswith("Missing required parameter"):
        return  # a null is as good as none, and what it stands for may have another name
    if sent.route.envelope == "openai":
        assert error["param"], f"no param: {message}"
        assert len(error["param"]) <= MAX_NAME + 1
    else:
        assert "'" in message or "LoRA adapter" in message, f"nothing is named: {message}"
    (*_, key) = path = sent.touched[0]
    if len(sent.what) == 1 and sent.what[0].endswith(mutations.SPOILT) and sent.query == sent.route.query:
        assert key in _RELATED or any(str(key) in message for key in path), f"{sent.what}: {message}"


_RELATED = ("type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "name")
"""What is wrong with one of these may show where something else refers to it."""


def _envelopes(sent: Sent) -> list[Envelope]:
    """Where a route words its own errors, its own; elsewhere by the path, or as the caller says what it speaks."""
    speaks: list[Envelope] = ["anthropic"] if any(name == b"anthropic-version" for name, _ in sent.headers) else []
    if sent.ordinary and sent.route.method == "POST":
        return [sent.route.envelope, *speaks]
    if sent.path.startswith("/v1/messages"):
        return ["anthropic"]
    own: Envelope = "openai" if sent.path.startswith("/v1/") else "llamacpp"
    return [*speaks, own]


def _inside(value: Any, envelope: Envelope, got: Exchange) -> dict[str, Any] | None:
    """The error object of an answer in this envelope; None if it is not in it."""
    if not isinstance(value, dict) or not isinstance(error := value.get("error"), dict):
        return None
    keys = set(error) - {"n_prompt_tokens", "n_ctx"}
    match envelope:
        case "openai":
            right = set(value) == {"error"} and keys == {"message", "type", "param", "code"}
            right = right and isinstance(error["type"], str) and error["param"] != ""
        case "llamacpp":
            right = set(value) == {"error"} and keys == {"message", "type", "code"} and error["code"] == got.status
        case "anthropic":
            right = set(value) <= {"type", "error", "request_id"} and value.get("type") == "error"
            right = right and keys == {"type", "message"}
    return error if right else None


def strict_json(body: bytes) -> Any:
    """Of UTF-8 without lone surrogates, and without what JSON does not have."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    value = json.loads(body.decode(), parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value
