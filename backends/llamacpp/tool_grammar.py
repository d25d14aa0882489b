"""Tool calls as a grammar: the call that a client demands, and arguments that satisfy a strict tool's schema.

A schema that cannot be compiled is no reason to refuse a request: its tool then takes any JSON object.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from backends.chat_template import ChatTemplate, ChatTemplates
from backends.llamacpp import gbnf, json_schema
from backends.llamacpp.schema_rules import RuleWriter, either, quoted
from backends.llamacpp.schema_strings import json_text
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, GbnfConstraint, GrammarTrigger, Request, Tool, ToolChoice

log = logging.getLogger(__name__)


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes a call: `before`, `name_before`, name, `name_after`, JSON arguments, `after`.

    The name is written as inside a JSON string where `json_name` is set. `separator` stands between calls. A call is
    recognised by `trigger`, with which `before` begins; None where an answer may be a call without such a mark.
    `preserved_tokens` are shown as text if they are special tokens.
    """

    before: str = ""
    name_before: str = '{"name": "'
    name_after: str = '", "arguments": '
    after: str = "}"
    separator: str = "\n"
    json_name: bool = True
    trigger: str | None = None
    preserved_tokens: tuple[str, ...] = ()


HERMES = CallSyntax(
    before="<tool_call>\n",
    after="}\n</tool_call>",
    trigger="<tool_call>",
    preserved_tokens=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen 2.5 and 3, and every model whose template has no form for calls."""

GENERIC = CallSyntax()
"""A bare JSON object, as Llama 3 writes it."""


class Thinking(msgspec.Struct, frozen=True):
    """The prompt ends within the model's reasoning, which `end` closes."""

    end: str


def call_syntax(template: ChatTemplate) -> CallSyntax:
    """How the model of `template` writes calls, seen from how its template does."""
    sample = template.sample_call()
    if sample is None or "<tool_call>" in sample:  # without a form of its own, it was told of Hermes's
        return HERMES
    return GENERIC


_THINKING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<seed:think>": "</seed:think>",
}


def open_thinking(prompt_tail: str) -> Thinking | None:
    """Whether a prompt that ends so leaves the model in the middle of its reasoning."""
    tail = prompt_tail.rstrip()
    return next((Thinking(end) for start, end in _THINKING.items() if tail.endswith(start)), None)


def demands_grammar(request: Request) -> bool:
    """Whether `request` asks for calls that a grammar has to make sure of."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.tool_choice.mode == "none":
        return False
    return prompt.tool_choice.mode == "required" or any(tool.strict for tool in prompt.tools)


def with_tool_grammar(request: Request, templates: ChatTemplates, prompt_tail: str) -> Request:
    """`request` with the constraint that its tools ask for. `prompt_tail` is the end of its prompt."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or not demands_grammar(request):
        return request
    if request.constraint is not None:
        if prompt.tool_choice.mode == "required":
            raise InvalidRequest("An answer cannot be a tool call and follow a format as well", param="tool_choice")
        return request
    key = msgspec.json.encode((prompt.tools, prompt.tool_choice))
    constraint = _cached(key, call_syntax(templates.of(prompt)), open_thinking(prompt_tail))
    return msgspec.structs.replace(request, constraint=constraint)


@lru_cache(maxsize=16)
def _cached(key: bytes, syntax: CallSyntax, thinking: Thinking | None) -> GbnfConstraint | None:
    """The tools of a conversation are the same in every turn, and compiling many schemas takes a while."""
    tools, tool_choice = msgspec.json.decode(key, type=tuple[tuple[Tool, ...], ToolChoice])
    return tool_grammar(tools, tool_choice, syntax, thinking)


def tool_grammar(
    tools: Sequence[Tool], tool_choice: ToolChoice, syntax: CallSyntax, thinking: Thinking | None = None
) -> GbnfConstraint | None:
    """None where nothing has to be constrained.

    A demanded call is all of the answer, or all that follows the reasoning. Otherwise the model may speak, and only
    what follows the trigger is constrained, as soon as one of `tools` is strict. `InvalidRequest` if there is no tool
    to call.
    """
    if tool_choice.mode == "none":
        return None
    forced = tool_choice.mode == "required"
    callable_tools = [tool for tool in tools if tool_choice.name in (None, tool.name)]
    if forced and not callable_tools:
        missing = f"there is no tool {tool_choice.name!r}" if tool_choice.name else "there are no tools"
        raise InvalidRequest(f"A tool call is required, but {missing}", param="tool_choice")
    if not forced and (syntax.trigger is None or not any(tool.strict for tool in tools)):
        return None
    text = _grammar(callable_tools, tool_choice.parallel, forced, syntax, thinking if forced else None)
    if text is None:
        return None
    if forced and thinking is None:
        return GbnfConstraint(text, preserved_tokens=syntax.preserved_tokens)
    trigger = thinking.end if forced and thinking is not None else syntax.trigger
    assert trigger is not None
    preserved = tuple(dict.fromkeys((trigger, *syntax.preserved_tokens)))
    return GbnfConstraint(text, lazy=True, triggers=(GrammarTrigger("word", trigger),), preserved_tokens=preserved)


def _grammar(
    tools: Sequence[Tool], parallel: bool, all_schemas: bool, syntax: CallSyntax, thinking: Thinking | None
) -> str | None:
    """With all schemas, with those of strict tools, or with none: the first that is not too large."""
    all_tools, strict, none = (
        frozenset(tool.name for tool in tools),
        frozenset(tool.name for tool in tools if tool.strict),
        frozenset[str](),
    )
    for with_schema in (all_tools, strict, none) if all_schemas else (strict, none):
        text = _written(tools, with_schema, parallel, syntax, thinking)
        try:
            gbnf.parse(text)
        except InvalidRequest as error:
            log.info("the grammar of %d tools cannot be used: %s", len(tools), error.message)
        else:
            return text
    return None


def _written(
    tools: Sequence[Tool], with_schema: frozenset[str], parallel: bool, syntax: CallSyntax, thinking: Thinking | None
) -> str:
    rules = RuleWriter()
    root = rules.reserve("root")
    calls = []
    for index, tool in enumerate(tools):
        arguments = _arguments(rules, tool, index) if tool.name in with_schema else None
        name = json_text(tool.name)[1:-1] if syntax.json_name else tool.name
        head = quoted(syntax.name_before + name + syntax.name_after)
        calls.append(f"{head} {arguments or rules.json('object')} {quoted(syntax.after)}")
    rules.json("space")
    call = rules.add(f"{quoted(syntax.before)} {either(calls)}" if syntax.before else either(calls), "call")
    body = f"{call} ({quoted(syntax.separator)} {call})*" if parallel else call
    rules.define(root, body if thinking is None else f"{quoted(thinking.end)} [\\n]{{0,2}} {body}")
    return rules.text()


def _arguments(rules: RuleWriter, tool: Tool, index: int) -> str | None:
    """A rule for the tool's schema, or None if it cannot be had."""
    schema: dict[str, Any] = tool.parameters
    if schema.get("type", "object") != "object":
        return None  # what is called takes an object, whatever its schema says
    if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"}:
        schema = {"type": "object", **schema}
    path = f"tools[{index}].parameters"
    try:
        json_schema.to_gbnf(schema, path)
    except InvalidRequest as error:
        log.info("the arguments of a tool are not constrained: %s", error.message)
        return None
    return json_schema.write_rule(rules, schema, path, f"arguments-{index}")
