"""Body -> `Call[MessagesOptions]`. Everything that is wrong with a body is an `InvalidRequest` naming the JSON path.

`cache_control`, `context_management`, `service_tier` and the like ask for nothing that changes the answer here, and are
not read.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocols.anthropic_messages.content import conversation
from protocols.anthropic_messages.tools import ToolBox
from protocols.anthropic_messages.version import check_version
from protocols.anthropic_messages.wire import Body, InMessage, Thinking, ToolResultBlock
from protocols.body import parse_object, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, Message, Reasoning
from protocols.sampling_fields import constraint, only_one_choice, request

DEFAULT_MAX_TOKENS = 4096
DEFAULT_THINKING_BUDGET = 10_000


class MessagesOptions(msgspec.Struct, frozen=True):
    """`thinking`: its text, only that there was some, or none of it, as nobody asked for any."""

    thinking: Literal["shown", "omitted", "none"] = "none"


def decode(body: bytes, request_id: str, *, strict: bool = False) -> Call[MessagesOptions]:
    """`strict` refuses what the newest API version does."""
    wire = validated(Body, parse_object(body))
    if strict:
        check_version(wire)
    if wire.mcp_servers:
        raise InvalidRequest("Invalid 'mcp_servers': this server does not connect to any.", param="mcp_servers")
    if wire.n_probs:
        raise InvalidRequest("Invalid 'n_probs': an answer has no place for probabilities here.", param="n_probs")
    only_one_choice(wire)
    talk = conversation(wire.system, wire.messages)
    if not talk.messages:
        raise InvalidRequest("Invalid 'messages': expected at least one that has content.", param="messages")
    tools = ToolBox(wire.tools or ())
    for update in talk.updates:
        tools.update(update)
    choice = tools.choice(wire.tool_choice)
    config = wire.output_config
    reasoning = _reasoning(wire.thinking, wire.messages)
    if config is not None and config.effort is not None:
        reasoning = msgspec.structs.replace(reasoning, effort=config.effort)
    schema, path = _schema(wire)
    decoded = request(
        wire,
        id=request_id,
        model=wire.model,
        prompt=ChatPrompt(
            talk.messages,
            tools=tools.offered,
            tool_choice=choice,
            reasoning=reasoning,
            continues=_continues(talk.messages),
        ),
        constraint=constraint(wire, schema, path, calls=bool(tools.offered) and choice.mode != "none"),
        max_tokens=DEFAULT_MAX_TOKENS,
        session=None if wire.metadata is None else wire.metadata.user_id,
    )
    return Call((decoded,), stream=bool(wire.stream), options=MessagesOptions(_shown(wire.thinking, reasoning)))


def _reasoning(thinking: Thinking | None, messages: list[InMessage]) -> Reasoning:
    if thinking is None:
        return Reasoning(enabled=False)
    match thinking.type:
        case "disabled":
            return Reasoning(enabled=False)
        case "adaptive":
            return Reasoning(enabled=True)
        case "enabled":
            return Reasoning(enabled=True, budget_tokens=thinking.budget_tokens or DEFAULT_THINKING_BUDGET)
        case "between_tools":
            content = messages[-1].content
            return Reasoning(enabled=isinstance(content, list) and any(isinstance(b, ToolResultBlock) for b in content))


def _shown(thinking: Thinking | None, reasoning: Reasoning) -> Literal["shown", "omitted", "none"]:
    if thinking is None or not reasoning.enabled:
        return "none"
    return "omitted" if thinking.display == "omitted" else "shown"


def _schema(wire: Body) -> tuple[dict[str, Any] | None, str]:
    """Of the answer, and where it stands."""
    if wire.output_config is None or wire.output_config.format is None:
        return None if wire.output_format is None else wire.output_format.json_schema, "output_format.schema"
    return wire.output_config.format.json_schema, "output_config.format.schema"


def _continues(messages: tuple[Message, ...]) -> bool:
    """ "If the final message uses the `assistant` role, the response content will continue immediately from the content
    in that message." After a call there is nothing to continue.
    """
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls
