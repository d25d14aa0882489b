"""gpt-oss's Harmony: an answer is a row of messages, `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`.

The channel says what a message is: `analysis` is thinking, `final` and `commentary` are text, and a message to
`functions.name` is a call. Where the prompt ends decides where in a message the answer begins.

The tokens are read as text. OpenAI's own parser (`openai-harmony`) works on the ids of one vocabulary, which it
downloads when it is first used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from backends.output.reading import NotACall, Reading
from backends.output.stops import StopTable
from backends.output.tools.format import ToolFormat
from backends.output.tools.grammar import All, CallGrammar, Json, Node, Text, schema_of
from backends.output.tools.grammar import Any as AnyOf
from backends.output.tools.json_calls import json_arguments
from backends.output.writer import Writer
from protocols.events import Event, FinishReason
from protocols.request import Tool

_START, _END, _MESSAGE, _CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
_CALL, _RETURN, _CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_TOKENS = (_START, _END, _MESSAGE, _CHANNEL, _CALL, _RETURN, _CONSTRAIN)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"\s*(\w+)")
_MAX_HEADER = 512


class _Message(Enum):
    TEXT = auto()
    THINKING = auto()
    CALL = auto()


class HarmonyParser:
    """An `OutputParser` of its own. `thoughts`: thinking is set apart; else it is text. `calls`: there are tools."""

    def __init__(self, writer: Writer, prompt_tail: str, *, calls: bool, thoughts: bool) -> None:
        self._out = writer
        self._has_calls = calls
        self._thought = _Message.THINKING if thoughts else _Message.TEXT
        self._kind: _Message | None = None
        self._header: str | None = ""  # None between messages and inside one
        self._role_known = True  # the prompt has said whose message begins
        self._table = _TABLE
        self._state = 0
        self._held = ""
        self._call: Reading[None] | None = None
        _, start, begun = prompt_tail.rpartition(_START)
        self._take(begun.removeprefix("assistant") if start else "")
        writer.take()  # what the prompt says itself

    @property
    def stop_now(self) -> bool:
        return self._out.full

    @property
    def thinking(self) -> bool:
        return self._kind is _Message.THINKING

    @property
    def undecided(self) -> int:
        return len(self._held) + len(self._header or "") + (0 if self._out.open else len(self._out.raw))

    def feed(self, text: str) -> list[Event]:
        self._take(text)
        return self._out.take()

    def finish(self, reason: FinishReason) -> list[Event]:
        if self._header is not None:
            if self._role_known and not self._header.lstrip().startswith("to="):  # no header at all
                self._text(self._header + self._held)
        elif not self._out.full:
            self._chars(self._held)
            if self._call is not None and not self._out.open and reason == "length":
                self._call = None
            self._end_call()
        self._held = ""
        return self._out.take()

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return "tool_calls" if reason == "stop" and self._out.complete and not self._out.was_cut else reason

    def _take(self, text: str) -> None:
        at = 0
        while at < len(text) and not self._out.full:
            plain = text.find("<", at) if not self._held else at
            if plain != at:
                end = plain if plain > at else len(text)
                self._chars(text[at:end])
                at = end
                continue
            self._scan(text[at])
            at += 1

    def _scan(self, char: str) -> None:
        self._held += char
        self._state = self._table.step(self._state, char)
        if (token := self._table.match[self._state]) is not None:
            self._state = 0
            self._chars(self._held[: -len(token)])
            self._held = ""
            self._token(token)
            return
        certain = len(self._held) - self._table.depth[self._state]
        text, self._held = self._held[:certain], self._held[certain:]
        self._chars(text)

    def _token(self, token: str) -> None:
        if token == _MESSAGE:
            if self._header is not None:
                self._begin_message(self._header)
        elif token == _START:
            self._end_call()
            self._header, self._role_known, self._kind = "", False, None
        elif token in (_END, _CALL, _RETURN):
            self._end_call()
            self._header = self._kind = None
        elif self._header is not None:
            self._role_known = False
            self._header += token
        elif token == _CHANNEL:  # a message that was not ended
            self._end_call()
            self._header, self._role_known, self._kind = token, False, None

    def _begin_message(self, header: str) -> None:
        self._header = None
        channel = _CHANNEL_NAME.match(header.rpartition(_CHANNEL)[2]) if _CHANNEL in header else None
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind = self._thought if is_thought else _Message.TEXT
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._has_calls:
            return
        name = recipient[1]
        try:
            name = self._out.tools.resolve(name, declared=not name.startswith("functions."))
        except NotACall:
            return  # a tool of the model's own, or no recipient but the user
        self._kind = _Message.CALL
        self._out.raw.clear()
        self._call = _arguments(self._out, name)
        next(self._call)

    def _chars(self, text: str) -> None:
        """Text that is no token."""
        if not text:
            return
        if self._header is not None:
            self._header += text
            if len(self._header) > _MAX_HEADER or (self._role_known and not _may_be_header(self._header)):
                text, self._header = self._header, None
                self._text(text)
        elif self._kind is _Message.THINKING:
            self._out.reasoning(text)
        elif self._kind is _Message.CALL:
            self._call_chars(text)
        elif self._kind is _Message.TEXT or text.strip():
            self._text(text)

    def _text(self, text: str) -> None:
        self._kind = _Message.TEXT
        self._out.text(text)

    # --- calls ---

    def _call_chars(self, text: str) -> None:
        for at, char in enumerate(text):
            if self._call is None:
                if rest := text[at:].lstrip():
                    self._text(rest)
                return
            self._out.raw.append(char)
            try:
                self._call.send(char)
            except StopIteration:
                self._call = None
                self._out.raw.clear()
            except NotACall:
                self._end_call()

    def _end_call(self) -> None:
        """The message ends, or turns out to be no call. What was read and not written is text."""
        if self._call is None:
            return
        self._call = None
        rest = "".join(self._out.raw)
        if self._out.open:
            self._out.cut()
        self._out.raw.clear()
        self._kind = _Message.TEXT
        self._out.text(rest)


def _may_be_header(text: str) -> bool:
    """Whether a message may go on like this where the prompt ends behind its role."""
    text = text.lstrip()
    return "to=".startswith(text[:3])


def _arguments(out: Writer, name: str) -> Reading[None]:
    char = yield
    while char.isspace():
        char = yield
    yield from json_arguments(out, name, char)
    out.raw.clear()


_TABLE = StopTable(_TOKENS)


def _call(tool: Tool) -> Node:
    begin = f"{_CHANNEL}commentary to=functions.{tool.name} {_CONSTRAIN}json{_MESSAGE}"
    return All((Text(begin), Json(schema_of(tool))))


def _grammar(tools: Sequence[Tool]) -> CallGrammar:
    """Always one call: the model ends its turn behind it. A lazy grammar is woken behind the start of a message."""
    call = AnyOf(tuple(_call(tool) for tool in tools))
    return CallGrammar(call, call, (f"{_CHANNEL}commentary to=functions.",))


HARMONY = ToolFormat(
    name="harmony",
    grammar=_grammar,
    shown_by=((_CHANNEL, _MESSAGE),),
    special_tokens=_TOKENS,
)
