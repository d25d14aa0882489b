"""Which parser the answer to a chat prompt needs."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from backends.output.parser import ChatParser, OutputParser
from backends.output.reasoning import ReasoningFormat, detect_reasoning, is_thinking, reasoning_format
from backends.output.tool_table import ToolTable
from backends.output.tools.format import ToolFormat
from backends.output.tools.harmony import HARMONY, HarmonyParser
from backends.output.tools.table import detect_tool_format, tool_format
from backends.output.writer import Writer
from protocols.request import ChatPrompt, Tool

ToolFormatName = Literal[
    "harmony",
    "kimi_k2",
    "deepseek_r1",
    "deepseek",
    "gemma4",
    "function_gemma",
    "mistral",
    "mistral_list",
    "cohere",
    "minimax",
    "seed_oss",
    "glm",
    "qwen3_coder",
    "nemotron",
    "granite",
    "lfm2",
    "hermes",
    "llama3_json",
    "pythonic",
    "gemma3",
    "generic",
    "none",
]
ReasoningFormatName = Literal[
    "harmony", "gemma", "mistral", "seed", "cohere", "granite", "granite-3.2", "think", "none"
]


class OutputFormats(msgspec.Struct, frozen=True):
    """How a model writes calls and thinking. None: its calls, or its thinking, are plain text."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def of(
        cls,
        template: str,
        tools: ToolFormatName | None = None,
        reasoning: ReasoningFormatName | None = None,
    ) -> OutputFormats:
        """What `template`, the source of the chat template, shows, unless something else is said."""
        return cls(
            detect_tool_format(template) if tools is None else None if tools == "none" else tool_format(tools),
            detect_reasoning(template)
            if reasoning is None
            else None
            if reasoning == "none"
            else reasoning_format(reasoning),
        )


PLAIN = OutputFormats(None, None)


class ParserSpec(msgspec.Struct, frozen=True):
    """A parser to be made, one for each choice. `special_tokens` must have a text for it, where they are tokens."""

    tools: tuple[Tool, ...]
    formats: OutputFormats
    prompt_tail: str
    thinking: bool
    parallel: bool

    @property
    def special_tokens(self) -> tuple[str, ...]:
        tools = self.formats.tools.special_tokens if self.formats.tools is not None else ()
        reasoning = self.formats.reasoning.special_tokens if self.formats.reasoning is not None else ()
        return (*tools, *reasoning)

    def make(self, request: str, choice: int) -> OutputParser:
        """Ids of calls are a function of the `request`'s id, so that every replica that continues it gives the same."""
        own_ids = None if self.formats.tools is None else self.formats.tools.own_ids

        def call_id(index: int) -> str:
            id = f"call_{blake2b(f'{request}:{choice}:{index}'.encode(), digest_size=12).hexdigest()}"
            return id if own_ids is None else own_ids(id)

        writer = Writer(ToolTable(self.tools), call_id, choice, self.parallel)
        if self.formats.tools is HARMONY:
            thoughts = self.formats.reasoning is not None
            return HarmonyParser(writer, self.prompt_tail, calls=bool(self.tools), thoughts=thoughts)
        return ChatParser(writer, self.formats.tools, self.formats.reasoning, self.thinking)


def parser_for(prompt: ChatPrompt, formats: OutputFormats, prompt_tail: str) -> ParserSpec | None:
    """None if the answer is nothing but text. `prompt_tail` is the end of the rendered prompt."""
    tools = () if prompt.tool_choice.mode == "none" else prompt.tools
    reasoning = formats.reasoning
    if formats.tools is not HARMONY:
        formats = msgspec.structs.replace(formats, tools=formats.tools if tools else None)
        if formats.tools is None and reasoning is None:
            return None
    thinking = reasoning is not None and is_thinking(reasoning, prompt_tail, continues=prompt.continues)
    return ParserSpec(tools, formats, prompt_tail, thinking, prompt.tool_choice.parallel)
