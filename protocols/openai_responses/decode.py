"""Body -> `Call[ResponsesOptions]`, in two pure steps, with what is stored brought in between:

    draft = read(body)                       # draft.references: the responses whose records are needed
    call = decode(draft, request_id, stored)

Everything that is wrong with a body is an `InvalidRequest` naming the JSON path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from protocols.body import parse_object, plain_json, validated
from protocols.codec import Call
from protocols.errors import InvalidRequest, NotFound
from protocols.openai_responses.conversation import Conversation, Item, item_type
from protocols.openai_responses.stored import StoredResponse, response_of_item
from protocols.openai_responses.tools import Declared, ToolSet
from protocols.openai_responses.wire import Body, Echo, ReasoningConfig, TextConfig, TextFormat
from protocols.request import (
    ChatPrompt,
    LogprobOptions,
    Message,
    Reasoning,
    TextPart,
)
from protocols.sampling_fields import constraint, only_one_choice, request


class ResponsesOptions(msgspec.Struct, frozen=True):
    """What the encoder and the store need besides the request.

    `summary`: reasoning comes as a summary too. `sealed`: it comes with `encrypted_content`. `names` leads from the
    functions the model knows back to the client's tools. `input` are the request's own items, `ancestors` the ids of
    the responses before it.
    """

    echo: Echo
    summary: bool
    sealed: bool
    names: dict[str, Declared]
    input: tuple[Item, ...]
    ancestors: tuple[str, ...]

    @property
    def store(self) -> bool:
        return self.echo.store


class Draft(msgspec.Struct, frozen=True):
    """A body of the right shape. `references` are the ids of stored responses that it builds on, directly."""

    body: Body
    references: frozenset[str]


_REFUSED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "prompt": (),
    "moderation": (),
}
"""Parameters that change the answer and are not supported -> values that ask for nothing."""

MAX_REFERENCES = 128
"""How many stored responses one body may refer to. A conversation goes on from one, and quotes a few."""


def read(body: bytes) -> Draft:
    raw = parse_object(body)
    wire = validated(Body, raw)
    only_one_choice(wire)
    for name, neutral in _REFUSED.items():
        value = raw.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"'{name}' is not supported: leave it out.", param=name)
    # These are handed on, or back, as they came.
    for name in ("input", "tools"):
        if isinstance(values := raw.get(name), list):
            for index, value in enumerate(values):
                plain_json(value, f"{name}[{index}]")
    for name in ("tool_choice", "text"):
        plain_json(raw.get(name), name)
    references = set() if wire.previous_response_id is None else {wire.previous_response_id}
    for index, item in enumerate(_items(wire)):
        if item_type(item, f"input[{index}]") == "item_reference" and isinstance(item_id := item.get("id"), str):
            owner = response_of_item(item_id)
            references |= set() if owner is None else {owner}
    if len(references) > MAX_REFERENCES:
        raise InvalidRequest(
            f"Invalid 'input': its items refer to more than {MAX_REFERENCES} stored responses.", param="input"
        )
    return Draft(wire, frozenset(references))


def ancestors(draft: Draft, stored: Mapping[str, StoredResponse]) -> tuple[str, ...]:
    """The ids of all responses before this one, oldest first: their records are needed too."""
    previous = draft.body.previous_response_id
    if previous is None:
        return ()
    record = stored.get(previous)
    if record is None:
        raise _previous_not_found(previous)
    return (*record.ancestors, previous)


def decode(draft: Draft, request_id: str, stored: Mapping[str, StoredResponse]) -> Call[ResponsesOptions]:
    """`stored` are the records of `draft.references` and of `ancestors`, those that there are."""
    wire = draft.body
    tools = ToolSet()
    tools.add(wire.tools or (), "tools")
    known = {item["id"]: item for record in stored.values() for item in record.items if "id" in item}
    conversation = Conversation(tools, known)
    before = ancestors(draft, stored)
    for earlier in before:
        if earlier not in stored:
            raise _previous_not_found(earlier)
        for item in stored[earlier].items:
            conversation.add(item, "previous_response_id")
    earlier_items = len(conversation.items)
    for index, item in enumerate(_items(wire)):
        conversation.add(item, f"input[{index}]")
    # "instructions rendered first as system/developer; not inherited through previous_response_id"
    instructions = (Message("system", (TextPart(wire.instructions),)),) if wire.instructions else ()
    messages = (*instructions, *conversation.messages)
    if not messages:
        raise InvalidRequest("Missing required parameter: 'input': there is nothing to answer.", param="input")

    parallel = wire.parallel_tool_calls is None or wire.parallel_tool_calls
    offered, choice = tools.choose(wire.tool_choice, parallel)
    reasoning = wire.reasoning or ReasoningConfig()
    include = wire.include or []
    decoded = request(
        wire,
        id=request_id,
        model=wire.model,
        prompt=ChatPrompt(messages, offered, tool_choice=choice, reasoning=_reasoning(reasoning)),
        constraint=constraint(
            wire, _schema(wire.text), "text.format.schema", calls=bool(offered) and choice.mode != "none"
        ),
        logprobs=(
            LogprobOptions(wire.top_logprobs or 0)
            if wire.top_logprobs or "message.output_text.logprobs" in include
            else None
        ),
    )
    options = ResponsesOptions(
        echo=_echo(wire, reasoning),
        summary=_summary(reasoning) is not None,
        sealed="reasoning.encrypted_content" in include,
        names=tools.names,
        input=tuple(conversation.items[earlier_items:]),
        ancestors=before,
    )
    return Call((decoded,), stream=bool(wire.stream), options=options)


def _items(wire: Body) -> list[Item]:
    if isinstance(wire.input, str):
        return [{"type": "message", "role": "user", "content": wire.input}]
    return wire.input or []


def _previous_not_found(wanted: str) -> NotFound:
    return NotFound(f"Previous response with id '{wanted}' not found.", param="previous_response_id")


def _summary(wire: ReasoningConfig) -> str | None:
    return wire.summary or wire.generate_summary


def _reasoning(wire: ReasoningConfig) -> Reasoning:
    match wire.effort:
        case None:
            return Reasoning()
        case "none":
            return Reasoning(enabled=False, effort="none")
        case effort:
            return Reasoning(enabled=True, effort=effort)


def _schema(wire: TextConfig | None) -> dict[str, Any] | None:
    """ "empty `json_schema {}` = any object" """
    format_ = TextFormat() if wire is None or wire.format is None else wire.format
    match format_.type:
        case "text":
            return None
        case "json_object":
            return {}
        case "json_schema":
            if format_.schema_ is None:
                raise InvalidRequest("Missing required parameter: 'text.format.schema'.", param="text.format.schema")
            return format_.schema_


def _echo(wire: Body, reasoning: ReasoningConfig) -> Echo:
    text = wire.text or TextConfig()
    format_ = (text.format or TextFormat()).model_dump(by_alias=True, exclude_none=True)
    return Echo(
        instructions=wire.instructions,
        max_output_tokens=wire.max_tokens,
        max_tool_calls=wire.max_tool_calls,
        metadata=wire.metadata or {},
        model=wire.model,
        parallel_tool_calls=wire.parallel_tool_calls is None or wire.parallel_tool_calls,
        previous_response_id=wire.previous_response_id,
        prompt_cache_key=wire.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": _summary(reasoning)},
        safety_identifier=wire.safety_identifier,
        store=wire.store is None or wire.store,
        temperature=wire.temperature,
        text={"format": format_, "verbosity": text.verbosity or "medium"},
        tool_choice="auto" if wire.tool_choice is None else wire.tool_choice,
        tools=tuple(_declared(tool) for tool in wire.tools or ()),
        top_logprobs=wire.top_logprobs or 0,
        top_p=wire.top_p,
        user=wire.user,
    )


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A function is repeated with all its fields: strict clients need them."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is not False}
