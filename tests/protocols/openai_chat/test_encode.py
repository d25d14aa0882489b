"""What goes out: byte-exact goldens, and the properties that hold for every legal stream.

After an intended change, `python -m tests.protocols.openai_chat.test_encode` writes the goldens anew; read their diff.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import sse
from protocols.codec import Call, Stamp
from protocols.collect import Collector
from protocols.errors import ContextOverflow, InternalError, ModelNotFound, ServingError
from protocols.events import (
    Event,
    Failed,
    Finished,
    IllegalEvent,
    Progress,
    Started,
    TextDelta,
    Timings,
    ToolCallEnded,
    Usage,
)
from protocols.openai_chat import CODEC, ChatOptions
from protocols.request import ChatPrompt, Message, Request, TextPart
from protocols.sse import SseParser
from tests.protocols.scripts import COMPLETE, SCRIPTS, START, legal_scripts

GOLDEN = Path(__file__).parent / "golden"
STAMP = Stamp("0123456789abcdef", 1_700_000_000)


def call(include_usage: bool = False, n: int = 1) -> Call[ChatOptions]:
    prompt = ChatPrompt((Message("user", (TextPart("Hi"),)),))
    return Call((Request("r1", 'mo"del/ü', prompt, n=n),), stream=True, options=ChatOptions(include_usage))


def stream(script: tuple[Event, ...], include_usage: bool = False, n: int = 1) -> bytes:
    encoder = CODEC.encoder(call(include_usage, n), STAMP)
    return b"".join(encoder.feed(event) for event in script)


def body(script: tuple[Event, ...], n: int = 1) -> bytes:
    collector = Collector(n)
    for event in script:
        collector.feed(event)
    return CODEC.render(call(n=n), STAMP, collector.result())


def goldens() -> dict[str, bytes]:
    files = {}
    for name, script in SCRIPTS.items():
        files[f"{name}.sse"] = stream(script)
        files[f"{name}.usage.sse"] = stream(script, include_usage=True)
        if name in COMPLETE:
            files[f"{name}.json"] = body(script)
    for error in (
        ContextOverflow.of(9000, 8192),
        ModelNotFound("No model 'x'", param="model"),
        InternalError("secret"),
    ):
        files[f"error.{error.kind}.json"] = CODEC.error(error)
    return files


@pytest.mark.parametrize("name", goldens())
def test_golden(name: str) -> None:
    assert goldens()[name] == (GOLDEN / name).read_bytes()


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(goldens())


# --- streams ------------------------------------------------------------


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of all chunks, of a stream that ends as it must."""
    events = SseParser().feed(raw)
    assert [event.data for event in events].count("[DONE]") == 1
    assert events[-1].data == "[DONE]"
    return [msgspec.json.decode(event.data) for event in events[:-1]]


def fold(parts: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """What a client makes of the chunks: one message and finish reason per choice."""
    choices: list[dict[str, Any]] = [
        {"role": None, "content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
        for _ in range(n)
    ]
    for part in parts:
        for delta in part["choices"]:
            choice = choices[delta["index"]]
            assert choice["finish_reason"] is None, "nothing follows the final delta of a choice"
            choice["finish_reason"] = delta["finish_reason"]
            for key, value in delta["delta"].items():
                if key == "role":
                    assert choice["role"] is None, "the role comes once"
                    choice["role"] = value
                elif key == "tool_calls":
                    (fragment,) = value
                    if "id" in fragment:
                        assert fragment["index"] == len(choice["tool_calls"])
                        choice["tool_calls"].append(
                            {"id": fragment["id"], "type": fragment["type"], **fragment["function"]}
                        )
                    else:
                        choice["tool_calls"][fragment["index"]]["arguments"] += fragment["function"]["arguments"]
                else:
                    assert value or "role" in delta["delta"], "deltas are never empty strings"
                    choice[key] += value
    return choices


_CASES = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), legal_scripts(n), st.booleans()))


@given(_CASES)
def test_concatenated_deltas_are_the_body(case: tuple[int, tuple[Event, ...], bool]) -> None:
    n, script, include_usage = case
    parts = chunks(stream(script, include_usage, n))
    whole = msgspec.json.decode(body(script, n))
    for index, choice in enumerate(fold(parts, n)):
        expected = whole["choices"][index]
        message = expected["message"]
        assert choice["role"] == message["role"] == "assistant"
        assert choice["content"] == (message["content"] or "")
        assert choice["reasoning_content"] == message.get("reasoning_content", "")
        assert choice["finish_reason"] == expected["finish_reason"]
        calls = [{"id": c["id"], "type": c["type"], **c["function"]} for c in message.get("tool_calls", [])]
        assert choice["tool_calls"] == calls
        assert (message["content"] is None) == (bool(calls) and not choice["content"])
    if include_usage:
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"] == whole["usage"]
        assert all(part["usage"] is None for part in parts[:-1])
    else:
        assert not any("usage" in part for part in parts)
    assert parts[-1].get("timings") == whole.get("timings")
    assert not any("timings" in part for part in parts[:-1])


@given(_CASES)
def test_every_chunk_is_of_one_answer(case: tuple[int, tuple[Event, ...], bool]) -> None:
    n, script, include_usage = case
    for part in chunks(stream(script, include_usage, n)):
        assert part["id"] == "chatcmpl-0123456789abcdef"
        assert part["created"] == 1_700_000_000
        assert part["model"] == 'mo"del/ü'
        assert part["object"] == "chat.completion.chunk"
        assert part["system_fingerprint"].startswith("b")


@given(legal_scripts(), st.data())
def test_a_failure_ends_the_stream_wherever_it_comes(script: tuple[Event, ...], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(script) - 1))
    failed = Failed(ServingError.from_info(InternalError("secret").info).info)
    *_, last = chunks(stream((*script[:cut], failed)))
    assert last == msgspec.json.decode(CODEC.error(InternalError("secret")))
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in last["error"]["message"]


def test_the_role_comes_with_started_not_with_the_first_text() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    (event,) = SseParser().feed(encoder.feed(START))
    assert msgspec.json.decode(event.data)["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert encoder.feed(TextDelta("")) == b""
    assert encoder.feed(Progress(1, 0, 10, 0.5)) == b""


def test_the_end_comes_once() -> None:
    for end in (Finished("stop", Usage(1, 1)), Failed(InternalError("x").info)):
        encoder = CODEC.encoder(call(), STAMP)
        encoder.feed(START)
        encoder.feed(Finished("stop", Usage(1, 1)))
        with pytest.raises(IllegalEvent):
            encoder.feed(end)
    encoder = CODEC.encoder(call(), STAMP)
    encoder.feed(START)
    with pytest.raises(IllegalEvent):
        encoder.feed(Started(1, 0))


def test_keepalives_are_invisible() -> None:
    encoder = CODEC.encoder(call(), STAMP)
    raw = b"".join(encoder.keepalive() + encoder.feed(event) + encoder.keepalive() for event in SCRIPTS["unicode"])
    assert chunks(raw) == chunks(stream(SCRIPTS["unicode"]))
    assert encoder.keepalive() == sse.KEEPALIVE


def test_a_call_without_arguments_has_an_empty_object() -> None:
    *_, call_b = fold(chunks(stream(SCRIPTS["two_tool_calls"])), 1)[0]["tool_calls"]
    assert call_b == {"id": "call_b", "type": "function", "name": "get_time", "arguments": "{}"}
    encoder = CODEC.encoder(call(), STAMP)
    for event in SCRIPTS["tool_call"][:-2]:
        encoder.feed(event)
    assert encoder.feed(ToolCallEnded(0)) == b""


def test_a_client_that_stops_reading_a_failed_stream_still_gets_the_overflow_counts() -> None:
    (part,) = chunks(stream((Failed(ContextOverflow.of(9, 8).info),)))
    assert part["error"]["code"] == "context_length_exceeded"
    assert (part["error"]["param"], part["error"]["n_prompt_tokens"], part["error"]["n_ctx"]) == ("messages", 9, 8)


# --- numbers ------------------------------------------------------------


def numbers(usage: Usage, timings: Timings | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    whole = msgspec.json.decode(body((START, Finished("stop", usage, None, timings))))
    return whole["usage"], whole.get("timings")


def test_usage() -> None:
    usage, timings = numbers(Usage(10, 5, 4, 3), None)
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert timings is None


def test_timings() -> None:
    _, timings = numbers(Usage(10, 5), Timings(2, 8, 16.0, 5, 40.0))
    assert timings == {
        "cache_n": 2,
        "prompt_n": 8,
        "prompt_ms": 16.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 5,
        "predicted_ms": 40.0,
        "predicted_per_token_ms": 10.0,
        "predicted_per_second": 100.0,
    }


@pytest.mark.parametrize("predicted_n", [0, 1])
def test_rates_of_nothing_are_zero(predicted_n: int) -> None:
    _, timings = numbers(Usage(10, 1), Timings(10, 0, 0.0, predicted_n, 0.5))
    assert timings is not None
    assert {key: value for key, value in timings.items() if "per" in key} == {
        "prompt_per_token_ms": 0,
        "prompt_per_second": 0,
        "predicted_per_token_ms": 0,
        "predicted_per_second": 0,
    }


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file, content in goldens().items():
        (GOLDEN / file).write_bytes(content)
