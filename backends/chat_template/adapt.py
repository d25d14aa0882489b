"""Messages as a template can take them. Each message becomes the same text in every later turn of its conversation.

So nothing moves to the front that came later, and what a template has no form for is written as text where it stands:
a system message as a tagged user turn, tools, calls and results in the JSON form of Hermes. What is done depends on the
template and on what came before, never on what follows, but for neighbours that a template wants as one message.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from backends.chat_template.abilities import Abilities, IdForm, Value, tool_call, typed, with_empty
from protocols.errors import InvalidRequest
from protocols.request import ImagePart, Message, Role, TextPart, Tool, ToolCall

_INSTRUCTIONS = ("system", "developer")
_BETWEEN = "\n\n"
_FILLER = (TextPart("..."),)  # some templates refuse a turn without text
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ID_LETTERS = string.digits + string.ascii_letters

TOOLS_AS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def check_images(messages: Iterable[Message]) -> None:
    for message in messages:
        if any(isinstance(part, ImagePart) for part in message.content):
            raise InvalidRequest("This model does not take images", param="messages")


def adapted(messages: Sequence[Message], tools: Sequence[Tool], can: Abilities) -> list[Value]:
    """Without `tools` in it, unless the template has no place for them."""
    turns = [_plain(message, can) for message in messages]
    turns = _leading_system(turns, () if can.tools else tools)
    turns = list(_named_results(turns))
    if not can.parallel_calls and can.calls:
        turns = _one_call_each(turns)
    turns = [new for at, turn in enumerate(turns) for new in _supported(turn, at == 0, can)]
    if can.alternation:
        turns = list(_alternating(turns, can))
    ids = _ids(turns, can.ids)
    values = [_value(turn, ids, can) for turn in turns]
    return [typed(value) for value in values] if can.typed_content else values


def tool_values(tools: Iterable[Tool]) -> list[Value]:
    """OpenAI's shape."""
    values: list[Value] = []
    for tool in tools:
        # Templates walk through the properties, and put the description between other texts, without a question.
        parameters = copy.deepcopy(tool.parameters) or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        values.append({"type": "function", "function": function})
    return values


# --- steps ------------------------------------------------------------


def _plain(message: Message, can: Abilities) -> Message:
    """A string, a list with one text, and a list with several whose texts join to it, are the same message."""
    role = "system" if message.role == "developer" and not can.developer else message.role
    return msgspec.structs.replace(message, role=role, content=_text(message.text))


def _text(text: str) -> tuple[TextPart, ...]:
    return (TextPart(text),) if text else ()


def _leading_system(turns: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """The system messages that begin a conversation are one. `tools` are written into it."""
    count = next((i for i, turn in enumerate(turns) if turn.role not in _INSTRUCTIONS), len(turns))
    texts = [turn.text for turn in turns[:count] if turn.content]
    if tools:
        described = "\n".join(json.dumps(value, ensure_ascii=False) for value in tool_values(tools))
        texts.append(TOOLS_AS_TEXT.format(tools=described))
    if not texts:
        return turns[count:]
    roles = {turn.role for turn in turns[:count]}
    role: Role = "developer" if roles == {"developer"} else "system"
    return [Message(role, _text(_BETWEEN.join(texts))), *turns[count:]]


def _named_results(turns: Iterable[Message]) -> Iterator[Message]:
    """Results say which function they are of. One without an id answers the first call that has no answer yet."""
    open_calls: dict[str, str] = {}
    for turn in turns:
        open_calls |= {call.id: call.name for call in turn.tool_calls}
        if turn.role == "tool":
            id = turn.tool_call_id or next(iter(open_calls), "call_0")
            name = open_calls.pop(id, None) or turn.name
            turn = msgspec.structs.replace(turn, tool_call_id=id, name=name)
        yield turn


def _one_call_each(turns: Sequence[Message]) -> list[Message]:
    """For a template that takes a single call per message: each call is followed by its result."""
    done: list[Message] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        if len(turn.tool_calls) < 2:
            done.append(turn)
            continue
        results = []
        while at < len(turns) and turns[at].role == "tool":
            results.append(turns[at])
            at += 1
        for index, call in enumerate(turn.tool_calls):
            done.append(msgspec.structs.replace(turn, tool_calls=(call,)) if not index else _caller(call))
            done += [result for result in results if result.tool_call_id == call.id]
        known = {call.id for call in turn.tool_calls}
        done += [result for result in results if result.tool_call_id not in known]
    return done


def _caller(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


def _supported(turn: Message, first: bool, can: Abilities) -> Iterator[Message]:
    """`turn` in the roles that the template knows."""
    if turn.role in _INSTRUCTIONS and not (can.system == "anywhere" or (first and can.system == "first")):
        # Where it stands: at the front it would change the beginning of the conversation, which is cached.
        yield Message("user", _text(turn.text if first else f"<system-reminder>\n{turn.text}\n</system-reminder>"))
    elif turn.role == "tool" and not can.results:
        yield Message("user", _text(f"<tool_response>\n{turn.text}\n</tool_response>"))
    elif turn.tool_calls and not can.calls:
        calls = [call_as_text(call) for call in turn.tool_calls]
        text = "\n".join([turn.text, *calls] if turn.content else calls)
        yield msgspec.structs.replace(turn, content=_text(text), tool_calls=())
    elif turn.tool_calls and turn.content and can.split_calls and _hides_text(turn, can):
        yield msgspec.structs.replace(turn, tool_calls=(), reasoning=None)
        yield msgspec.structs.replace(turn, content=())
    else:
        yield turn


def _hides_text(turn: Message, can: Abilities) -> bool:
    return not can.text_with_calls or bool(turn.reasoning and not can.text_with_reasoning_and_calls)


def call_as_text(call: ToolCall) -> str:
    arguments = json.dumps(_object_or_text(call.arguments), ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'
    )


def _alternating(turns: Iterable[Message], can: Abilities) -> Iterator[Message]:
    """The user begins, and neighbours of one role are one message. Calls and their results stand outside of that."""
    last: Message | None = None
    for turn in turns:
        if last is not None and last.role == turn.role in ("user", "assistant"):
            if not (last.tool_calls or turn.tool_calls):
                last = _merged(last, turn)
                continue
        if last is not None:
            yield last
        if turn.role in ("assistant", "tool") and (last is None or last.role in _INSTRUCTIONS):
            yield Message("user", _FILLER)
        if turn.role == "user" and last is not None and not can.user_after_result:
            if last.role == "tool" or last.tool_calls:
                yield Message("assistant", _FILLER)
        last = turn
    if last is not None:
        yield last


def _merged(one: Message, other: Message) -> Message:
    text = _BETWEEN.join(part for part in (one.text, other.text) if part)
    reasoning = _BETWEEN.join(part for part in (one.reasoning, other.reasoning) if part)
    return msgspec.structs.replace(one, content=_text(text), reasoning=reasoning or None)


# --- values ------------------------------------------------------------


def _value(turn: Message, ids: dict[str, str], can: Abilities) -> Value:
    value: Value = {"role": turn.role, "content": turn.text}
    if turn.tool_calls and not turn.content:
        value = with_empty({"role": turn.role}, can.empty)
    if turn.reasoning and not (turn.tool_calls and turn.content and not can.text_with_reasoning_and_calls):
        value |= dict.fromkeys(can.reasoning_keys, turn.reasoning)
    if turn.tool_calls:
        value["tool_calls"] = [
            tool_call(
                ids[call.id], call.name, _object_or_text(call.arguments) if can.object_arguments else call.arguments
            )
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        value["tool_call_id"] = ids[turn.tool_call_id]
    if turn.name is not None:
        value["name"] = turn.name
    return value


def _ids(turns: Iterable[Message], form: IdForm) -> dict[str, str]:
    """The template's form of every id: always the same for the same one."""
    ids: dict[str, str] = {}
    for turn in turns:
        for call in turn.tool_calls:
            ids.setdefault(call.id, _named_id(call, len(ids)) if form == "named" else _id(call.id, form))
        if turn.tool_call_id is not None:
            ids.setdefault(turn.tool_call_id, _id(turn.tool_call_id, form))
    return ids


def _named_id(call: ToolCall, number: int) -> str:
    return call.id if call.id.startswith(f"functions.{call.name}:") else f"functions.{call.name}:{number}"


def _id(id: str, form: IdForm) -> str:
    if form != "nine" or _SHORT_ID.fullmatch(id):
        return id
    digest = hashlib.sha256(id.encode("utf-8", "replace")).digest()
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:9])


def _object_or_text(arguments: str) -> Any:
    """The model wrote the arguments, so they may be no JSON at all; then the text itself is the best there is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value
