"""Every dialect behind one interface: what a strict reader makes of its streams and bodies, in words common to all.

Each reader fails on a stream that breaks the rules all dialects share: it starts once, has exactly one end and nothing
behind it, opens one thing at a time and closes it before the next, and counts without gaps.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from protocols import anthropic_messages, llamacpp_native, openai_chat, openai_completions, openai_responses
from protocols.codec import Call, Codec, frame_feed
from protocols.collect import BatchCollector, Choice, Completion
from protocols.events import (
    Event,
    Finished,
    Frame,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from protocols.partial_json import json_object
from protocols.sse import SseParser
from tests.protocols.anthropic_messages import checker
from tests.protocols.openai import chat_choices, chunks, text_choices
from tests.protocols.openai_responses import support
from tests.protocols.scripts import STAMP


class Said(NamedTuple):
    """One choice. `finish` is the dialect's word and the stop string, where it tells it."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # name and arguments
    finish: tuple[str, str | None]
    logprobs: tuple[float, ...]
    ids: tuple[str, ...] = ()


class Answer(NamedTuple):
    """`usage`: tokens of the prompt, of its cached part, of the completion, of reasoning; None where it is not told."""

    choices: tuple[Said, ...]
    usage: tuple[int | None, ...] | None


class Dialect(ABC):
    name: str
    codec: Codec[Any]
    fields: dict[str, Any]
    """A body that asks for all the dialect can tell."""
    has_n = False
    n_field = "n"

    def call(self, *, stream: bool, n: int = 1) -> Call[Any]:
        wanted = {self.n_field: n} if self.has_n else {}
        return self.codec.decode(json.dumps({"stream": stream, **self.fields, **wanted}).encode(), "r1")

    def playable(self, script: Iterable[Event]) -> tuple[Event, ...]:
        """`script` without what no model can answer in this dialect."""
        return tuple(script)

    def stream(self, script: Sequence[Event], n: int = 1) -> bytes:
        feed = frame_feed(self.codec.encoder(self.call(stream=True, n=n), STAMP))
        return b"".join(feed(frame) for frame in frames(script))

    def body(self, script: Sequence[Event], n: int = 1) -> bytes:
        return self.codec.render(self.call(stream=False, n=n), STAMP, self.completion(script, n))

    def completion(self, script: Sequence[Event], n: int = 1) -> Completion:
        collector = BatchCollector([n])
        for frame in frames(script):
            collector.feed_frame(frame)
        return collector.result()

    def expected(self, completion: Completion) -> Answer:
        choices = tuple(
            Said(
                self._text(choice),
                self._reasoning(choice),
                tuple((call.name, self._arguments(call.arguments)) for call in choice.tool_calls),
                self._finish(choice),
                tuple(item.logprob for item in choice.logprobs),
            )
            for choice in completion.choices
        )
        return Answer(choices, self._usage(completion.usage))

    def _text(self, choice: Choice) -> str:
        return choice.text

    def _reasoning(self, choice: Choice) -> str:
        return choice.reasoning

    def _arguments(self, arguments: str) -> str:
        return arguments or "{}"

    def _usage(self, usage: Usage) -> tuple[int | None, ...]:
        return (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens)

    @abstractmethod
    def _finish(self, choice: Choice) -> tuple[str, str | None]: ...

    @abstractmethod
    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        """Of a whole stream that did not fail."""

    @abstractmethod
    def read_body(self, raw: bytes) -> Answer: ...

    @abstractmethod
    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        """Of a whole stream that failed: its error, which is its end."""


def frames(script: Iterable[Event]) -> list[Frame]:
    """An event each, with a token where it is one that a token brings."""
    brought = (TextDelta, ReasoningDelta, ToolCallDelta)
    return [Frame((event,), (7,) if isinstance(event, brought) else (), event.choice) for event in script]


def without_ids(answer: Answer) -> Answer:
    return answer._replace(choices=tuple(choice._replace(ids=()) for choice in answer.choices))


def _openai_usage(usage: dict[str, Any] | None) -> tuple[int | None, ...] | None:
    if usage is None:
        return None
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return (
        usage["prompt_tokens"],
        cached,
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


class Chat(Dialect):
    name = "openai_chat"
    codec: Codec[Any] = openai_chat.CODEC
    fields: dict[str, Any] = {
        "model": 'mo"del/ü',
        "messages": [{"role": "user", "content": "Hi"}],
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }
    has_n = True

    def _finish(self, choice: Choice) -> tuple[str, str | None]:
        return choice.reason, None

    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        parts = chunks(raw)
        assert len({(part["id"], part["created"], part["model"], part["object"]) for part in parts}) == 1
        usages = [part["usage"] for part in parts if part.get("usage") is not None]
        assert usages == ([parts[-1]["usage"]] if "usage" in parts[-1] else []), "usage is told once, at the end"
        choices = chat_choices(parts, n)
        assert all(choice["finish_reason"] for choice in choices), "every choice ends"
        return Answer(tuple(_chat_said(choice) for choice in choices), _openai_usage(usages[0] if usages else None))

    def read_body(self, raw: bytes) -> Answer:
        whole = json.loads(raw)
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
        choices = [
            {
                "content": choice["message"]["content"] or "",
                "reasoning_content": choice["message"].get("reasoning_content", ""),
                "tool_calls": [
                    {"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", ())
                ],
                "finish_reason": choice["finish_reason"],
                "logprobs": (choice["logprobs"] or {"content": []})["content"],
            }
            for choice in whole["choices"]
        ]
        return Answer(tuple(_chat_said(choice) for choice in choices), _openai_usage(whole["usage"]))

    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        *before, last = chunks(raw)
        chat_choices(before, n)
        error: dict[str, Any] = last["error"]
        return error


def _chat_said(choice: dict[str, Any]) -> Said:
    return Said(
        choice["content"],
        choice["reasoning_content"],
        tuple((call["name"], call["arguments"]) for call in choice["tool_calls"]),
        (choice["finish_reason"], None),
        tuple(item["logprob"] for item in choice["logprobs"]),
        tuple(call["id"] for call in choice["tool_calls"]),
    )


class NativeChat(Chat):
    name = "llamacpp_native_chat"
    codec = llamacpp_native.CHAT


class Completions(Dialect):
    name = "openai_completions"
    codec: Codec[Any] = openai_completions.CODEC
    fields: dict[str, Any] = {
        "model": "m",
        "prompt": "Once",
        "stream_options": {"include_usage": True},
        "logprobs": 2,
    }
    has_n = True

    def expected(self, completion: Completion) -> Answer:
        """ "Text that is neither reasoning nor a call": there is no place for them."""
        answer = super().expected(completion)
        plain = [choice._replace(reasoning="", calls=()) for choice in answer.choices]
        return answer._replace(choices=tuple(plain))

    def _finish(self, choice: Choice) -> tuple[str, str | None]:
        return "length" if choice.reason == "length" else "stop", None

    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        parts = chunks(raw)
        assert len({(part["id"], part["created"], part["model"], part["object"]) for part in parts}) == 1
        choices = text_choices(parts, n)
        assert all(choice["finish_reason"] for choice in choices), "every choice ends"
        said = [
            Said(c["text"], "", (), (c["finish_reason"], None), tuple(c["token_logprobs"])) for c in choices
        ]  # fmt: skip
        return Answer(tuple(said), _openai_usage(parts[-1].get("usage")))

    def read_body(self, raw: bytes) -> Answer:
        whole = json.loads(raw)
        said = [
            Said(
                choice["text"],
                "",
                (),
                (choice["finish_reason"], None),
                tuple((choice["logprobs"] or {"token_logprobs": ()})["token_logprobs"]),
            )
            for choice in whole["choices"]
        ]
        return Answer(tuple(said), _openai_usage(whole["usage"]))

    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        *before, last = chunks(raw)
        text_choices(before, n)
        error: dict[str, Any] = last["error"]
        return error


class Responses(Dialect):
    name = "openai_responses"
    codec: Codec[Any] = openai_responses.CODEC
    fields: dict[str, Any] = {
        "model": "m",
        "input": "Hi",
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "top_logprobs": 2,
    }

    def _finish(self, choice: Choice) -> tuple[str, str | None]:
        return "incomplete" if choice.reason == "length" else "completed", None

    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        final = support.read(raw)
        assert final["status"] != "failed"
        return self._read(final)

    def read_body(self, raw: bytes) -> Answer:
        return self._read(json.loads(raw))

    def _read(self, response: dict[str, Any]) -> Answer:
        seen = support.visible(response)
        usage = response["usage"]
        texts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
        said = Said(
            seen["text"],
            seen["reasoning"],
            tuple((name, arguments if input is None else input) for _, name, arguments, input in seen["calls"]),
            (response["status"], None),
            tuple(item["logprob"] for part in texts for item in part["logprobs"]),
            tuple(id for id, *_ in seen["calls"]),
        )
        details = usage["input_tokens_details"], usage["output_tokens_details"]
        counts = (usage["input_tokens"], details[0]["cached_tokens"])
        return Answer((said,), (*counts, usage["output_tokens"], details[1]["reasoning_tokens"]))

    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        final = support.read(raw)
        assert final["status"] == "failed"
        error: dict[str, Any] = final["error"]
        return error


class Messages(Dialect):
    name = "anthropic_messages"
    codec: Codec[Any] = anthropic_messages.CODEC
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
        "thinking": {"type": "enabled", "budget_tokens": 50},
    }

    def expected(self, completion: Completion) -> Answer:
        answer = super().expected(completion)
        return answer._replace(choices=tuple(choice._replace(logprobs=()) for choice in answer.choices))

    def _arguments(self, arguments: str) -> str:
        return _canonical(json.loads(json_object(arguments)))

    def _finish(self, choice: Choice) -> tuple[str, str | None]:
        if choice.reason == "length":
            return "max_tokens", None
        if choice.tool_calls:
            return "tool_use", None
        return ("end_turn", None) if choice.stop_sequence is None else ("stop_sequence", choice.stop_sequence)

    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        return self._read(checker.message(raw))

    def read_body(self, raw: bytes) -> Answer:
        return self._read(json.loads(raw))

    def _read(self, message: dict[str, Any]) -> Answer:
        blocks, usage = message["content"], message["usage"]
        said = Said(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tuple((block["name"], _canonical(block["input"])) for block in blocks if block["type"] == "tool_use"),
            (message["stop_reason"], message["stop_sequence"]),
            (),
            tuple(block["id"] for block in blocks if block["type"] == "tool_use"),
        )
        cached = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
        thinking = usage["output_tokens_details"]["thinking_tokens"]
        return Answer((said,), (prompt, cached, usage["output_tokens"], thinking))

    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        _, event = checker.begun(raw)
        error: dict[str, Any] = event["error"]
        return error


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class Native(Dialect):
    """A prompt here is plain text: there are no tools, and nothing in the answer is taken for thinking."""

    name = "llamacpp_native"
    codec: Codec[Any] = llamacpp_native.COMPLETION
    fields: dict[str, Any] = {"prompt": "Once", "n_probs": 2, "return_progress": True, "timings_per_token": True}
    has_n = True
    n_field = "n_cmpl"

    def playable(self, script: Iterable[Event]) -> tuple[Event, ...]:
        kept: list[Event] = []
        for event in script:
            match event:
                case ReasoningDelta(text, choice):
                    kept.append(TextDelta(text, choice=choice))
                case Finished(reason="tool_calls"):
                    kept.append(msgspec.structs.replace(event, reason="stop"))
                case ToolCallStarted() | ToolCallDelta() | ToolCallEnded():
                    pass
                case _:
                    kept.append(event)
        return tuple(kept)

    def _finish(self, choice: Choice) -> tuple[str, str | None]:
        if choice.reason == "length":
            return "limit", choice.stop_sequence
        return ("eos", None) if choice.stop_sequence is None else ("word", choice.stop_sequence)

    def _usage(self, usage: Usage) -> tuple[int | None, ...]:
        return (usage.prompt_tokens, None, usage.completion_tokens, None)

    def read_stream(self, raw: bytes, n: int = 1) -> Answer:
        said, usage = self._choices(_objects(raw), n)
        assert all(choice is not None for choice in said), "every choice ends"
        return Answer(tuple(choice for choice in said if choice is not None), usage)

    def _choices(self, objects: list[dict[str, Any]], n: int) -> tuple[list[Said | None], tuple[int | None, ...]]:
        texts, tokens = [""] * n, [0] * n
        logprobs: list[list[float]] = [[] for _ in range(n)]
        ends: list[Said | None] = [None] * n
        prompts, completions = [0], 0
        for item in objects:
            index = item["index"]
            assert ends[index] is None, "nothing follows the end of a choice"
            if not item["stop"]:
                assert item["tokens_predicted"] == tokens[index] + len(item["tokens"])
                tokens[index] = item["tokens_predicted"]
                texts[index] += item["content"]
                logprobs[index] += [entry["logprob"] for entry in item.get("completion_probabilities", ())]
                continue
            assert (item["content"], item["tokens"]) == ("", [])
            ends[index] = Said(texts[index], "", (), _native_finish(item), tuple(logprobs[index]))
            prompts.append(item["tokens_evaluated"])
            completions += item["tokens_predicted"]
        return ends, (max(prompts), None, completions, None)

    def read_body(self, raw: bytes) -> Answer:
        whole = json.loads(raw)
        items = whole if isinstance(whole, list) else [whole]
        assert [item["index"] for item in items] == list(range(len(items)))
        said = [
            Said(
                item["content"],
                "",
                (),
                _native_finish(item),
                tuple(entry["logprob"] for entry in item.get("completion_probabilities", ())),
            )
            for item in items
        ]
        prompt = max(item["tokens_evaluated"] for item in items)
        return Answer(tuple(said), (prompt, None, sum(item["tokens_predicted"] for item in items), None))

    def read_failure(self, raw: bytes, n: int = 1) -> dict[str, Any]:
        *before, last = _objects(raw)
        self._choices(before, n)
        error: dict[str, Any] = last["error"]
        return error


def _objects(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n\n")
    events = SseParser().feed(raw)
    assert all(event.event == "message" and event.data != "[DONE]" for event in events)
    return [json.loads(event.data) for event in events]


def _native_finish(item: dict[str, Any]) -> tuple[str, str | None]:
    return item["stop_type"], item["stopping_word"] or None


DIALECTS: tuple[Dialect, ...] = (Chat(), NativeChat(), Completions(), Responses(), Messages(), Native())
