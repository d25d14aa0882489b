"""A strict reader of Messages streams. SDKs and CLIs forgive much that others do not; this forgives nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.sse import SseParser

_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}
_STARTS: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def events(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of all events, pings left out. Each is named by its type."""
    found = []
    for event in SseParser().feed(raw):
        data = msgspec.json.decode(event.data)
        assert event.event == data["type"]
        if data["type"] == "ping":
            assert data == {"type": "ping"}
        else:
            found.append(data)
    assert raw.endswith(b"\n\n")
    return found


def message(raw: bytes) -> dict[str, Any]:
    """The message that a complete stream builds up: start, blocks one after another, delta, stop, and nothing else."""
    first, *inside, delta, last = events(raw)
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    built: dict[str, Any] = first["message"]
    assert built["content"] == []
    assert (built["stop_reason"], built["stop_sequence"]) == (None, None)
    assert "output_tokens_details" not in built["usage"]
    assert built["usage"]["output_tokens"] == 0
    _check_usage({**built["usage"], "output_tokens_details": {"thinking_tokens": 0}})
    built["content"] = _blocks(inside)
    assert set(delta) == {"type", "delta", "usage"}
    assert set(delta["delta"]) == {"stop_reason", "stop_sequence"}
    assert (delta["delta"]["stop_reason"] == "stop_sequence") == (delta["delta"]["stop_sequence"] is not None)
    _check_usage(delta["usage"])
    total = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(delta["usage"][k] for k in total) == sum(built["usage"][k] for k in total)
    return {**built, **delta["delta"], "usage": delta["usage"]}


def begun(raw: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Of a stream that failed: its blocks, the last of which may be open, and the error's event."""
    *before, error = events(raw)
    assert error["type"] == "error"
    assert {"type", "message"} <= set(error["error"])
    if before:
        assert before[0]["type"] == "message_start"
    return _blocks(before[1:], cut=True), error


def _blocks(inside: list[dict[str, Any]], cut: bool = False) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    is_open = False
    pieces: list[tuple[str, str]] = []
    for event in inside:
        match event["type"]:
            case "content_block_start":
                assert not is_open, "one block is closed before the next is opened"
                assert event["index"] == len(blocks), "indices have no gaps"
                block = event["content_block"]
                assert block.items() >= _STARTS[block["type"]].items()
                blocks.append(block)
                is_open, pieces = True, []
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                kind = event["delta"]["type"]
                text = event["delta"][_DELTAS[blocks[-1]["type"]][kind]]
                assert set(event["delta"]) == {"type", _DELTAS[blocks[-1]["type"]][kind]}
                assert text, "no delta is empty"
                pieces.append((kind, text))
            case "content_block_stop":
                assert is_open
                assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
                blocks[-1] = _built(blocks[-1], pieces)
                is_open = False
            case other:
                raise AssertionError(f"{other} among the blocks")
    assert cut or not is_open
    return blocks


def _built(block: dict[str, Any], pieces: list[tuple[str, str]]) -> dict[str, Any]:
    match block["type"]:
        case "text":
            return {**block, "text": "".join(text for _, text in pieces)}
        case "thinking":
            assert [kind for kind, _ in pieces].index("signature_delta") == len(pieces) - 1, "one, and it is the last"
            thinking = "".join(text for _, text in pieces[:-1])
            return {**block, "thinking": thinking, "signature": pieces[-1][1]}
        case "tool_use":
            assert pieces, "the arguments come as deltas"
            value = msgspec.json.decode("".join(text for _, text in pieces))
            assert isinstance(value, dict)
            return {**block, "input": value}
    raise AssertionError(block)


def _check_usage(usage: dict[str, Any]) -> None:
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    assert set(usage) == {*counts, "output_tokens_details"}
    assert all(type(usage[name]) is int and usage[name] >= 0 for name in counts)
    assert 0 <= usage["output_tokens_details"]["thinking_tokens"] <= usage["output_tokens"]
