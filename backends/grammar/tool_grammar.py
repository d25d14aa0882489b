"""Tool calls as a grammar: the call that a client demands, and arguments that satisfy a strict tool's schema.

Calls are written as the model writes them (`ToolFormat.grammar`), so that they are read as such. A schema that cannot
be compiled is no reason to refuse a request: its tool then takes any arguments.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from backends.grammar import gbnf
from backends.grammar.call_rules import call_gbnf
from backends.output.selection import ParserSpec
from backends.output.tools.format import ToolFormat
from backends.output.tools.table import tool_format
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, GbnfConstraint, GrammarTrigger, Request, Tool, ToolChoice

log = logging.getLogger(__name__)

_META = re.compile(r"[\\^$.|?*+()\[\]{}]")


def demands_grammar(request: Request) -> bool:
    """Whether `request` asks for calls that a grammar has to make sure of."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.tool_choice.mode == "none":
        return False
    return prompt.tool_choice.mode == "required" or any(tool.strict for tool in prompt.tools)


def with_tool_grammar(request: Request, parser: ParserSpec | None) -> Request:
    """`request` with the constraint that its tools ask for, in the form that `parser` reads."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or not demands_grammar(request):
        return request
    forced = prompt.tool_choice.mode == "required"
    if request.constraint is not None:
        if forced:
            raise InvalidRequest("An answer cannot be a tool call and follow a format as well", param="tool_choice")
        return request
    format = None if parser is None else parser.formats.tools
    if forced:
        _callable(prompt.tools, prompt.tool_choice)
        if format is None:
            raise InvalidRequest("This model's tool calls are left in its text", param="tool_choice")
    if format is None:
        return request
    constraint = _cached(msgspec.json.encode((prompt.tools, prompt.tool_choice)), format.name)
    return msgspec.structs.replace(request, constraint=constraint)


@lru_cache(maxsize=16)
def _cached(key: bytes, format: str) -> GbnfConstraint | None:
    """The tools of a conversation are the same in every turn, and compiling many schemas takes a while."""
    tools, tool_choice = msgspec.json.decode(key, type=tuple[tuple[Tool, ...], ToolChoice])
    return tool_grammar(tools, tool_choice, tool_format(format))


def tool_grammar(tools: Sequence[Tool], tool_choice: ToolChoice, format: ToolFormat) -> GbnfConstraint | None:
    """None where nothing has to be constrained.

    A demanded call is all of the answer, but for the thinking before it. Otherwise the model may speak, and only what
    follows the beginning of a call is constrained, as soon as one of `tools` is strict. `InvalidRequest` if there is no
    tool to call.
    """
    if tool_choice.mode == "none":
        return None
    forced = tool_choice.mode == "required"
    if not forced and not any(tool.strict for tool in tools):
        return None
    tools = _callable(tools, tool_choice) if forced else tools
    text = _grammar(tools, tool_choice.parallel, forced, format)
    if text is None:
        return None
    if forced:
        return GbnfConstraint(text, preserved_tokens=format.special_tokens)
    words = format.grammar(tools).triggers
    triggers = tuple(_trigger(word, format) for word in words)
    return GbnfConstraint(
        text, lazy=True, triggers=triggers, preserved_tokens=tuple(dict.fromkeys((*format.special_tokens, *words)))
    )


def _callable(tools: Sequence[Tool], tool_choice: ToolChoice) -> list[Tool]:
    """One of these must be called."""
    found = [tool for tool in tools if tool_choice.name in (None, tool.name)]
    if not found:
        missing = f"there is no tool {tool_choice.name!r}" if tool_choice.name else "there are no tools"
        raise InvalidRequest(f"A tool call is required, but {missing}", param="tool_choice")
    return found


def _trigger(word: str, format: ToolFormat) -> GrammarTrigger:
    """What is a call at the beginning of a line only is elsewhere what the text says."""
    if not any(word.startswith(marker) for marker in format.naked_markers):
        return GrammarTrigger("word", word)
    return GrammarTrigger("pattern", r"(?:^|\n)[ \t]*(" + _META.sub(r"\\\g<0>", word) + ")")


def _grammar(tools: Sequence[Tool], parallel: bool, all_schemas: bool, format: ToolFormat) -> str | None:
    """With all schemas, with those of strict tools, or with none: the first that is not too large."""
    all_tools, strict, none = (
        frozenset(tool.name for tool in tools),
        frozenset(tool.name for tool in tools if tool.strict),
        frozenset[str](),
    )
    for with_schema in (all_tools, strict, none) if all_schemas else (strict, none):
        grammar = format.grammar([tool if tool.name in with_schema else Tool(tool.name) for tool in tools])
        text = call_gbnf(grammar.several if parallel else grammar.one)
        try:
            gbnf.parse(text)
        except InvalidRequest as error:
            log.info("the grammar of %d tools cannot be used: %s", len(tools), error.message)
        else:
            return text
    return None
