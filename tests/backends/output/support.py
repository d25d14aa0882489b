"""Runs a parser over text in pieces, and folds what comes out."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from backends.output.parser import OutputParser
from backends.output.reasoning import reasoning_format
from backends.output.selection import OutputFormats, ParserSpec, parser_for
from backends.output.tools.table import tool_format
from protocols.collect import Collector
from protocols.events import Event, Finished, FinishReason, Started, Usage
from protocols.request import ChatPrompt, Tool, ToolChoice

TOOLS = (
    Tool(
        "get_weather",
        "The weather in a city",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    ),
    Tool("now", "The time"),
    Tool(
        "save",
        "Saves things",
        {
            "type": "object",
            "properties": {
                "items": {"type": "array"},
                "options": {"type": "object"},
                "flag": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
                "unit": {"enum": ["c", "f"]},
                "any": {},
            },
        },
    ),
)


class Call(NamedTuple):
    name: str
    arguments: str
    id: str = ""


class Output(NamedTuple):
    text: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str


def spec(
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    offered: tuple[Tool, ...] = TOOLS,
    tail: str = "",
    parallel: bool = True,
    continues: bool = False,
) -> ParserSpec:
    formats = OutputFormats(
        None if tools is None else tool_format(tools), None if reasoning is None else reasoning_format(reasoning)
    )
    prompt = ChatPrompt((), offered, tool_choice=ToolChoice(parallel=parallel), continues=continues)
    found = parser_for(prompt, formats, tail)
    assert found is not None
    return found


def events_of(parser: OutputParser, pieces: list[str], reason: FinishReason = "stop") -> list[Event]:
    """What an engine makes of `pieces`: it stops feeding where the parser says so."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
        if parser.stop_now:
            break
    return events + parser.finish(reason)


def run(parser_spec: ParserSpec, pieces: list[str], reason: FinishReason = "stop") -> Output:
    """Folded by the collector, which checks the order of events."""
    parser = parser_spec.make("request", 0)
    collector = Collector()
    collector.feed(Started(1, 0))
    for event in events_of(parser, pieces, reason):
        collector.feed(event)
    collector.feed(Finished(parser.finish_reason(reason), Usage(1, 1)))
    choice = collector.result().choices[0]
    calls = tuple(Call(call.name, call.arguments, call.id) for call in choice.tool_calls)
    return Output(choice.text, choice.reasoning, calls, choice.reason)


def values(output: Output) -> list[tuple[str, Any]]:
    """The calls with their arguments parsed: each must be valid JSON."""
    return [(call.name, json.loads(call.arguments)) for call in output.calls]
