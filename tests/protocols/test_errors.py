"""The error tree: every kind survives the way between processes, and every dialect has words for it."""

from __future__ import annotations

import pickle
import re

import msgspec
import pytest

from protocols import errors, openai_errors
from protocols.errors import ContextOverflow, ErrorInfo, InternalError, InvalidRequest, ModelNotFound, ServingError

KINDS = sorted(
    (
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, ServingError) and cls is not ServingError
    ),
    key=lambda cls: cls.__name__,
)


@pytest.mark.parametrize("cls", KINDS)
def test_round_trip(cls: type[ServingError]) -> None:
    error = cls("message", param="a.b", retry_after_s=1.5, details={"n": 1})
    wire = msgspec.msgpack.encode(error.info)
    back = ServingError.from_info(msgspec.msgpack.decode(wire, type=ErrorInfo))
    assert type(back) is cls
    assert back.info == error.info
    assert str(back) == "message"


@pytest.mark.parametrize("cls", KINDS)
def test_pickles(cls: type[ServingError]) -> None:
    error = cls("message", param="a", details={"n": 1})
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert back.info == error.info


def test_kinds_are_unique_and_the_docstring_lists_them() -> None:
    assert len({cls.kind for cls in KINDS}) == len(KINDS)
    rows = re.findall(r"(\w+) +(\w+) +(\d{3}) +(yes|no)", errors.__doc__ or "")
    assert sorted(rows) == sorted(
        (cls.__name__, cls.kind, str(cls.status), "yes" if cls.retryable else "no") for cls in KINDS
    )


def test_what_a_client_sent_does_not_come_back_at_its_length() -> None:
    error = InvalidRequest("No call 'é" + "x" * 10_000, param="a" * 10_000)
    assert error.message == "No call 'é" + "x" * 1990 + "…"
    assert error.param == "a" * 200 + "…"
    assert ServingError.from_info(error.info).info == error.info
    assert ModelNotFound.of("m" * 10_000, ["a", "b"]).message.endswith("m…' does not exist. Available: a, b.")


def test_an_unknown_kind_is_internal() -> None:
    assert type(ServingError.from_info(ErrorInfo("from_the_future", "x"))) is InternalError


def test_details_of_one_error_are_not_anothers() -> None:
    one, two = InternalError("a"), InternalError("b")
    one.details["n"] = 1
    assert two.details == {}


def test_context_overflow_says_both_counts() -> None:
    error = ContextOverflow.of(9000, 8192)
    assert "9000" in error.message and "8192" in error.message
    assert error.details == {"n_prompt_tokens": 9000, "n_ctx": 8192}


# --- OpenAI's envelope ------------------------------------------------------------


def test_openai_table_has_every_kind() -> None:
    assert set(openai_errors._WORDS) == {cls.kind for cls in KINDS}


@pytest.mark.parametrize("cls", KINDS)
def test_openai_envelope(cls: type[ServingError]) -> None:
    body = msgspec.json.decode(openai_errors.error_body(cls("words", param="x").info, "messages"))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == "x"
    assert body["error"]["message"] == (InternalError.PUBLIC_MESSAGE if cls is InternalError else "words")


@pytest.mark.parametrize(
    ("kind", "type_", "code"),
    [
        ("model_not_found", "invalid_request_error", "model_not_found"),
        ("context_overflow", "invalid_request_error", "context_length_exceeded"),
        ("overloaded", "rate_limit_error", "rate_limit_exceeded"),
        ("internal", "server_error", None),
        ("unauthorized", "authentication_error", "invalid_api_key"),
        ("from_the_future", "server_error", None),
    ],
)
def test_openai_words(kind: str, type_: str, code: str | None) -> None:
    body = msgspec.json.decode(openai_errors.error_body(ErrorInfo(kind, "secret detail"), "messages"))
    assert (body["error"]["type"], body["error"]["code"]) == (type_, code)
    assert ("secret" in body["error"]["message"]) == (type_ != "server_error")


@pytest.mark.parametrize("prompt_param", ["messages", "prompt", "input"])
def test_openai_overflow_is_additive_and_names_the_prompt(prompt_param: str) -> None:
    body = msgspec.json.decode(openai_errors.error_body(ContextOverflow.of(9, 8).info, prompt_param))
    assert body["error"] == {
        "message": "Prompt has 9 tokens, but the configured context size is 8 tokens",
        "type": "invalid_request_error",
        "param": prompt_param,
        "code": "context_length_exceeded",
        "n_prompt_tokens": 9,
        "n_ctx": 8,
    }
