"""Body -> `Call[ChatOptions]`. Everything that is wrong with a body is an `InvalidRequest` naming the JSON path."""

from __future__ import annotations

from typing import Any

import msgspec

from protocols.body import parse_object, plain_json, shown, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest
from protocols.openai_chat.messages import conversation
from protocols.openai_chat.wire import AllowedTools, Body
from protocols.request import ChatPrompt, LogprobOptions, Reasoning, Tool, ToolChoice
from protocols.sampling_fields import constraint, keepalive_s, request


class ChatOptions(msgspec.Struct, frozen=True):
    include_usage: bool


_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "functions": (([],), "it is the predecessor of 'tools': use those"),
    "function_call": (("none", "auto"), "it is the predecessor of 'tool_choice': use that"),
    "modalities": (([], ["text"]), "answers are text"),
    "audio": ((), "answers are text"),
    "web_search_options": ((), "models here do not search"),
    "moderation": ((), "answers are not moderated"),
    "echo": ((False,), "an answer does not repeat what it continues"),
    "reasoning_budget_message": (("",), "reasoning ends without one"),
}
"""Parameters that change the answer and that no model here can honour -> values that ask for nothing, and why not."""


def decode(body: bytes, request_id: str, model: type[Body] = Body) -> Call[ChatOptions]:
    """`model` is what the body must be: a route may ask for less than OpenAI does."""
    raw = parse_object(body)
    wire = validated(model, raw)
    for name, (neutral, why) in _REFUSED.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"'{name}' is not supported: {why}.", param=name)
    messages, continues = conversation(wire)
    tools, choice = _tools(wire)
    reasoning, template_kwargs = _reasoning(wire)
    closed = wire.messages[-1].role != "assistant" or wire.continue_final_message is False
    opens = not closed or wire.add_generation_prompt is not False
    prompt = ChatPrompt(messages, tools, template_kwargs, choice, reasoning, continues, opens)
    return Call(
        (
            request(
                wire,
                id=request_id,
                model=wire.model,
                prompt=prompt,
                constraint=constraint(
                    wire, _response_schema(wire), "response_format", calls=bool(tools) and choice.mode != "none"
                ),
                logprobs=_logprobs(wire),
            ),
        ),
        stream=bool(wire.stream),
        options=ChatOptions(wire.include_usage),
        keepalive_s=keepalive_s(wire),
    )


def _logprobs(wire: Body) -> LogprobOptions | None:
    if wire.logprobs:
        top = wire.n_probs if wire.top_logprobs is None else wire.top_logprobs
        return LogprobOptions(top or 0, bool(wire.post_sampling_probs))
    if wire.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    return None


# --- tools ------------------------------------------------------------


def _tools(wire: Body) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=plain_json(tool.function.parameters or {}, f"tools[{i}].function.parameters"),
            strict=bool(tool.function.strict),
        )
        for i, tool in enumerate(wire.tools or ())
    )
    chosen = wire.tool_choice
    parallel = wire.parallel_tool_calls is not False
    if not tools:
        if chosen is not None and chosen not in ("none", "auto"):
            raise InvalidRequest("'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice")
        return (), ToolChoice()
    if chosen is None or isinstance(chosen, str):
        return tools, ToolChoice(chosen or "auto", parallel=parallel)
    if chosen.type == "function":
        if chosen.function is None:
            raise InvalidRequest("Missing 'tool_choice.function': the one to call.", param="tool_choice.function")
        _must_exist(chosen.function.name, tools, "tool_choice.function.name")
        return tools, ToolChoice("required", chosen.function.name, parallel)
    if chosen.allowed_tools is None:
        raise InvalidRequest("Missing 'tool_choice.allowed_tools'.", param="tool_choice.allowed_tools")
    return _allowed(chosen.allowed_tools, tools), ToolChoice(chosen.allowed_tools.mode, parallel=parallel)


def _allowed(allowed: AllowedTools, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """ "Constrains the tools available to the model to a pre-defined set": it is told of no others."""
    for i, tool in enumerate(allowed.tools):
        _must_exist(tool.function.name, tools, f"tool_choice.allowed_tools.tools[{i}].function.name")
    names = {tool.function.name for tool in allowed.tools}
    return tuple(tool for tool in tools if tool.name in names)


def _must_exist(name: str, tools: tuple[Tool, ...], path: str) -> None:
    if all(tool.name != name for tool in tools):
        raise InvalidRequest(f"Invalid '{path}': there is no such function in 'tools'.", param=path)


# --- constraints ------------------------------------------------------------


def _response_schema(wire: Body) -> dict[str, Any] | None:
    """ "an absent or empty schema means any object" """
    form = wire.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return form.schema_ or {}
    if form.json_schema is None:
        raise InvalidRequest("Missing 'response_format.json_schema'.", param="response_format.json_schema")
    return form.json_schema.schema_ or {}


# --- reasoning ------------------------------------------------------------


def _reasoning(wire: Body) -> tuple[Reasoning, dict[str, Any]]:
    """ "`reasoning_effort` ("none" turns thinking off); `chat_template_kwargs` (`enable_thinking` must be bool)" """
    kwargs = dict(plain_json(wire.chat_template_kwargs or {}, "chat_template_kwargs"))
    enabled = kwargs.pop("enable_thinking", None)
    if enabled is not None and not isinstance(enabled, bool):
        path = "chat_template_kwargs.enable_thinking"
        raise InvalidRequest(f"Invalid '{path}': expected true or false, got {shown(enabled)}.", param=path)
    effort = wire.reasoning_effort or None
    if effort is not None:
        kwargs.pop("reasoning_effort", None)
    if effort == "none":
        enabled, effort = False, None
    if wire.reasoning_format in ("none", "deepseek-legacy"):
        raise InvalidRequest(
            "Invalid 'reasoning_format': reasoning always comes as 'reasoning_content', apart from the text.",
            param="reasoning_format",
        )
    budget = wire.thinking_budget_tokens if wire.reasoning_budget_tokens is None else wire.reasoning_budget_tokens
    return Reasoning(enabled, effort, None if budget is None or budget < 0 else budget), kwargs
