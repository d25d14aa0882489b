"""What an agent's model would write: calls of the tools it is offered, then, when it has their results, text."""

from __future__ import annotations

import json
import re

import msgspec

from backends.fake.settings import FakeAgent
from backends.output.reasoning import reasoning_format
from backends.output.selection import OutputFormats, ParserSpec, parser_for
from backends.output.tools.table import tool_format
from protocols.request import ChatPrompt, Prompt

FORMATS = OutputFormats(tool_format("hermes"), reasoning_format("think"))


class Writing(msgspec.Struct, frozen=True):
    """An answer that is known before it is written: a piece for each token, and how they are read."""

    pieces: tuple[str, ...]
    parser: ParserSpec | None


def writing(prompt: Prompt, agent: FakeAgent) -> Writing:
    if not isinstance(prompt, ChatPrompt):
        return Writing(_pieces(agent.text), None)
    offered = set() if prompt.tool_choice.mode == "none" else {tool.name for tool in prompt.tools}
    calls = [call for call in agent.calls if call.name in offered]
    if not calls or any(message.role == "tool" for message in prompt.messages):
        written = agent.text
    else:
        written = "\n".join(f"<tool_call>\n{json.dumps(call.model_dump())}\n</tool_call>" for call in calls)
    if agent.reasoning and prompt.reasoning.enabled is not False:
        written = f"<think>\n{agent.reasoning}\n</think>\n\n{written}"
    return Writing(_pieces(written), parser_for(prompt, FORMATS, prompt_tail=""))


def _pieces(text: str) -> tuple[str, ...]:
    """Words, each with the space before it."""
    return tuple(re.findall(r"\s*\S+|\s+$", text))
