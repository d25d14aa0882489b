"""What the tests of OpenAI's two completion dialects share."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.sse import SseParser


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of all chunks, of a stream that ends as it must."""
    events = SseParser().feed(raw)
    assert [event.data for event in events].count("[DONE]") == 1
    assert events[-1].data == "[DONE]"
    return [msgspec.json.decode(event.data) for event in events[:-1]]


def check_numbers(parts: list[dict[str, Any]], whole: dict[str, Any], include_usage: bool) -> None:
    """Usage and timings of a stream are those of the body, and in the last chunk only."""
    if include_usage:
        assert parts[-1]["choices"] == []
        assert parts[-1]["usage"] == whole["usage"]
        assert all(part["usage"] is None for part in parts[:-1])
    else:
        assert not any("usage" in part for part in parts)
    assert parts[-1].get("timings") == whole.get("timings")
    assert not any("timings" in part for part in parts[:-1])


def chat_choices(parts: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """What a client makes of chat chunks: one message and finish reason per choice. Fails on deltas out of order."""
    choices: list[dict[str, Any]] = [
        {"role": None, "content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None, "logprobs": []}
        for _ in range(n)
    ]
    last: list[str] = [""] * n  # what the delta before was of
    for part in parts:
        assert len(part["choices"]) <= 1
        for delta in part["choices"]:
            choice = choices[delta["index"]]
            assert choice["finish_reason"] is None, "nothing follows the final delta of a choice"
            choice["finish_reason"] = delta["finish_reason"]
            choice["logprobs"] += (delta["logprobs"] or {"content": []})["content"]
            assert len(delta["delta"].keys() - {"role"}) <= 1, "one kind of delta per chunk"
            assert choice["role"] is not None or "role" in delta["delta"], "the role comes first"
            for key, value in delta["delta"].items():
                if key == "role":
                    assert choice["role"] is None, "the role comes once"
                    choice["role"] = value
                elif key == "tool_calls":
                    (fragment,) = value
                    if "id" in fragment:
                        assert fragment["index"] == len(choice["tool_calls"]), "indices have no gaps"
                        assert fragment["type"] == "function"
                        assert fragment["function"]["name"]
                        choice["tool_calls"].append(
                            {"id": fragment["id"], "type": fragment["type"], **fragment["function"]}
                        )
                    else:
                        assert fragment["index"] == len(choice["tool_calls"]) - 1, "one call at a time"
                        assert last[delta["index"]] == "tool_calls", "nothing comes between the pieces of a call"
                        choice["tool_calls"][-1]["arguments"] += fragment["function"]["arguments"]
                else:
                    assert value or "role" in delta["delta"], "deltas are never empty strings"
                    choice[key] += value or ""
                if key != "role":
                    last[delta["index"]] = key
    return choices


LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def text_choices(parts: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """What a client makes of the chunks of Completions."""
    choices: list[dict[str, Any]] = [
        {"text": "", "finish_reason": None, **{name: [] for name in LOGPROB_LISTS}} for _ in range(n)
    ]
    for part in parts:
        for item in part["choices"]:
            choice = choices[item["index"]]
            assert choice["finish_reason"] is None, "nothing follows the final chunk of a choice"
            choice["finish_reason"] = item["finish_reason"]
            choice["text"] += item["text"]
            for name in LOGPROB_LISTS if item["logprobs"] else ():
                choice[name] += item["logprobs"][name]
    return choices
