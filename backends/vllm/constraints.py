"""What an answer is held to: a client's schema or grammar, or the calls that its tools demand. Imports no vLLM.

vLLM's constraints govern an answer from its first token on. Where the prompt has opened the thinking, a grammar that
takes it, up to its end mark, is put before the rest. There are no lazy grammars: a client's is refused, and for a
strict tool that need not be called the grammar takes text too, up to the mark that begins a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, assert_never

import msgspec

from backends.grammar import json_schema
from backends.grammar.call_rules import call_gbnf
from backends.grammar.schema_rules import char_class, quoted
from backends.grammar.tool_grammar import with_tool_grammar
from backends.output.selection import ParserSpec
from backends.output.stops import StopTable
from backends.output.tools.grammar import Until
from protocols.errors import InvalidRequest
from protocols.request import Constraint, GbnfConstraint, JsonSchemaConstraint, Request

Arguments = dict[str, Any]


def constrained(request: Request, parser: ParserSpec | None, *, control_tokens: bool = False) -> Request:
    """`request` with the one constraint that its answer has. `parser` reads the answer.

    `control_tokens`: some of what it looks for are control tokens, which no grammar of vLLM's admits; the model can
    then only call a tool that it need not call where nothing is constrained.

    A complete answer has nothing behind it, so ends are not ignored where there is a constraint.
    """
    if isinstance(request.constraint, GbnfConstraint) and request.constraint.lazy:
        raise InvalidRequest("This model's engine has no lazy grammars", param="grammar_lazy")
    constraint = with_tool_grammar(request, parser).constraint
    if isinstance(constraint, GbnfConstraint) and constraint.lazy:
        constraint = None if control_tokens else _awake(constraint)
    if constraint is not None and parser is not None and parser.thinking and parser.formats.reasoning is not None:
        constraint = GbnfConstraint(_behind_thinking(constraint, parser.formats.reasoning.ends[0]))
    return msgspec.structs.replace(request, constraint=constraint, ignore_eos=request.ignore_eos and constraint is None)


def structured(constraint: Constraint | None) -> Arguments | None:
    """The arguments of vLLM's `StructuredOutputsParams`."""
    match constraint:
        case None:
            return None
        case JsonSchemaConstraint(schema=dict(schema)) if schema:
            return {"json": msgspec.json.encode(schema).decode()}
        case JsonSchemaConstraint(schema=schema):  # which admits everything, or nothing
            return {"grammar": json_schema.to_gbnf(schema)}
        case GbnfConstraint(text=text):
            return {"grammar": text}
        case _:
            assert_never(constraint)


def _awake(lazy: GbnfConstraint) -> GbnfConstraint | None:
    """A grammar of text without a mark that begins a call, and of calls behind it. None where marks are patterns.

    One rule for each beginning of a mark that the text may end with: an automaton that looks for them.
    """
    words = tuple(trigger.value for trigger in lazy.triggers if trigger.kind == "word")
    if not words or len(words) < len(lazy.triggers):
        return None
    table = StopTable(words)
    rules = ["root ::= text-0", _renamed(lazy.text, lambda name: f"call-{name}")]
    for state, match in enumerate(table.match):
        if match is not None:
            continue
        steps = {char: table.step(state, char) for char in dict.fromkeys("".join(words))}
        ahead = {char: after for char, after in steps.items() if after}
        options = [f"{quoted(char)} text-{after}" for char, after in ahead.items() if table.match[after] is None]
        others = "[^" + char_class((ord(char), ord(char)) for char in ahead)[1:]
        rules.append(f"text-{state} ::= " + " | ".join(['""', "call-root", *options, f"{others} text-0"]))
    return GbnfConstraint("\n".join(rules))


def _behind_thinking(constraint: Constraint, end: str) -> str:
    """A grammar of thinking that goes up to `end`, at most two line breaks, and an answer of `constraint`."""
    match constraint:
        case JsonSchemaConstraint(schema=schema):
            answer = json_schema.to_gbnf(schema)
        case GbnfConstraint(text=answer):
            pass
        case _:
            assert_never(constraint)
    thinking = _renamed(call_gbnf(Until(end)), lambda name: f"thinking-{name}")
    rest = _renamed(answer, lambda name: f"answer-{name}")
    return f'root ::= thinking-root "\\n"? "\\n"? answer-root\n{thinking}\n{rest}'


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|<[^>\n]*>|\{[^}\n]*\}|[A-Za-z][\w-]*')


def _renamed(gbnf: str, name: Callable[[str], str]) -> str:
    """The same grammar with other names for its rules, so that it can stand beside another one."""
    return _TOKEN.sub(lambda found: name(found[0]) if found[0][0].isalpha() else found[0], gbnf)
