"""What a template can take, found by rendering small conversations once. Its source is never looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Value = dict[str, Any]
"""A message or a tool as templates see it."""

Render = Callable[[Sequence[Value], Sequence[Value], bool, Mapping[str, Any]], str | None]
"""Messages, tools, generation prompt, variables -> text, or None if the template refuses."""

EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for how much a model thinks, from the least to the most."""

_BOOLEAN_SWITCHES = ("enable_thinking", "thinking", "reasoning", "add_thoughts")
_WORD_SWITCHES = (("thinking_mode", "enabled", "disabled"), ("reasoning_mode", "/think", "/no_think"))
_EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort")
_BUDGET_VARIABLES = ("thinking_budget",)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")

_TOOL_NAME, _CALLED, _ARGUMENT = "zzname", "zzcalled", "zzargument"  # a call that looks unlike the tools listed
_RESULT, _SYSTEM, _TEXT = "zzresult", "zzsystem", "zztext"
IdForm = Literal["any", "nine", "named"]
_IDS: dict[IdForm, tuple[str, str]] = {
    "any": ("call_zz000000000001", "call_zz000000000002"),
    "nine": ("zzid00001", "zzid00002"),
    "named": (f"functions.{_CALLED}0:0", f"functions.{_CALLED}1:1"),
}


class Switch(msgspec.Struct, frozen=True):
    """A variable that turns thinking on and off."""

    variable: str
    on: Any
    off: Any


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """`alternation`: user and assistant must take turns. `ids` of calls: any, 9 letters and digits (Mistral), or
    `functions.<name>:<number>` in place of a name (Kimi).

    `efforts`: the only words that the variable may have; if there are none, any.
    `system`: nowhere, as the first message only, or anywhere. `empty`: the content of an assistant that only calls.
    """

    typed_content: bool = False
    system: Literal["none", "first", "anywhere"] = "none"
    developer: bool = False
    alternation: bool = True
    tools: bool = False
    calls: bool = False
    parallel_calls: bool = False
    results: bool = False
    user_after_result: bool = False
    text_with_calls: bool = False
    split_calls: bool = False
    object_arguments: bool = False
    ids: IdForm = "any"
    empty: Literal["", "null", "absent"] = ""
    reasoning_keys: tuple[str, ...] = ()
    text_with_reasoning_and_calls: bool = True
    switches: tuple[Switch, ...] = ()
    effort_variable: str | None = None
    efforts: tuple[str, ...] = ()
    budget_variable: str | None = None


def probe(render: Render) -> Abilities:
    return _Probe(render).abilities()


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._typed = False
        self._tools: Sequence[Value] = ()  # of every probe: some templates are for requests with tools only

    def _try(
        self, *messages: Value, tools: Sequence[Value] = (), variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """What is rendered; nothing if it is refused."""
        if self._typed:
            messages = tuple(typed(message) for message in messages)
        return self._render(messages, tools or self._tools, True, variables) or ""

    def abilities(self) -> Abilities:
        for self._tools, self._typed in (((), False), ((), True), ((_TOOL,), False), ((_TOOL,), True)):
            if _TEXT in self._try(_user(_TEXT)):
                break
        else:
            self._tools, self._typed = (), False
        plain = Abilities(
            typed_content=self._typed,
            system=self._system(),
            developer=self._developer(),
            alternation=not self._takes_in_order(_user("zza"), _user("zzb"), _assistant("zzc"), _assistant("zzd")),
        )
        plain = msgspec.structs.replace(plain, **self._switches())
        return msgspec.structs.replace(plain, **self._calls())

    def _takes_in_order(self, *messages: Value) -> bool:
        """Whether the text of each comes once, one behind the other."""
        text = self._try(*messages)
        places = [text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)

    # --- roles ------------------------------------------------------------

    def _system(self) -> Literal["none", "first", "anywhere"]:
        system = {"role": "system", "content": _SYSTEM}
        if _SYSTEM not in self._try(system, _user("zza")):
            return "none"
        first = {"role": "system", "content": "zzfirst"}
        end = [_user("zza"), _assistant("zzb"), _user("zzc"), system]
        if self._takes_in_order(first, *end) and self._takes_in_order(*end, _assistant("zzd"), _user("zze")):
            return "anywhere"
        return "first"

    def _developer(self) -> bool:
        """A template that treats this role like any made-up one does not know it: it prints or drops them all."""
        known, unknown = (self._try({"role": r, "content": _SYSTEM}, _user("zza")) for r in ("developer", "zzrolezz"))
        return _SYSTEM in known and known != unknown.replace("zzrolezz", "developer")

    # --- tools ------------------------------------------------------------

    def _calls(self) -> dict[str, Any]:
        tools = _TOOL_NAME in self._try(_user("zza"), tools=[_TOOL])
        found: dict[str, Any] = {"tools": tools}
        forms = [
            (answered, ids, objects, empty)
            for answered in (True, False)
            for ids in _IDS
            for objects in (True, False)
            for empty in ("", "null", "absent")
        ]
        for answered, ids, objects, empty in forms:
            call = _caller(_IDS[ids][:1], objects, empty)
            result = _result(_IDS[ids][0])
            text = self._called(call, *([result, _assistant("zzb")] if answered else []), _user("zzc"))
            # An object that is printed by itself comes out as Python, and text that goes through `tojson` twice quoted.
            given = _ARGUMENT in text and f"'{_ARGUMENT}'" not in text and f'\\"{_ARGUMENT}' not in text
            if given and f"{_CALLED}0" in text:
                break
        else:
            return found | self._results_alone()
        found |= {"calls": True, "object_arguments": objects, "ids": ids, "empty": empty}
        found["results"] = text.count(_RESULT) == 1 and text.find(_RESULT) > text.find(_ARGUMENT)
        answers = [_result(id) for id in _IDS[ids]] if found["results"] else []
        pair = self._called(_caller(_IDS[ids], objects, empty), *answers)
        answer = answers[:1]
        texted = self._called(call | {"content": _TEXT}, *answer)
        apart = self._called(_assistant(_TEXT), call, *answer, _assistant("zzb"), _user("zzc"))
        found |= {
            "parallel_calls": all(f"{_CALLED}{i}" in pair for i in range(2)),
            "user_after_result": "zzlater" in self._called(call, *answer, _user("zzlater")),
            "text_with_calls": _TEXT in texted and _CALLED in texted,
            "split_calls": _TEXT in apart and _CALLED in apart,
        }
        return found | self._reasoning(call, answer)

    def _called(self, *messages: Value) -> str:
        return self._try(_user("zza"), *messages, tools=[_TOOL])

    def _results_alone(self) -> dict[str, Any]:
        """Of a template that does not show calls."""
        text = self._called(_assistant("zzb"), _result(_IDS["any"][0]), _assistant("zzc"), _user("zzd"))
        return {"results": _RESULT in text and "zzb" in text, "user_after_result": True}

    def _reasoning(self, call: Value, answer: list[Value]) -> dict[str, Any]:
        """Most templates show what was thought before a call, and nothing of what was thought before an answer."""
        keys = [key for key in _REASONING_KEYS if _TEXT in self._called(call | {key: _TEXT}, *answer)]
        both = {"content": "zzcontent"} | {key: _TEXT for key in keys[:1]}
        shown = self._called(call | both, *answer)
        return {"reasoning_keys": tuple(keys[:1]), "text_with_reasoning_and_calls": not keys or "zzcontent" in shown}

    # --- thinking ------------------------------------------------------------

    def _switches(self) -> dict[str, Any]:
        conversation = (_user("zza"),)
        switches = []
        candidates = [Switch(name, True, False) for name in _BOOLEAN_SWITCHES]
        candidates += [Switch(*words) for words in _WORD_SWITCHES]
        for switch in candidates:
            on, off = (self._try(*conversation, variables={switch.variable: v}) for v in (switch.on, switch.off))
            if on and off and on != off:
                switches.append(switch)
        found: dict[str, Any] = {"switches": tuple(switches)}
        thinking = {switch.variable: switch.on for switch in switches}
        for variable in _EFFORT_VARIABLES:
            unset, made_up, *known = (
                self._try(*conversation, variables=thinking | given)
                for given in ({}, *({variable: word} for word in ("zzword", *EFFORTS)))
            )
            if any(text not in ("", unset) for text in known):
                words = tuple(word for word, text in zip(EFFORTS, known, strict=True) if text)
                found |= {"effort_variable": variable, "efforts": () if made_up else words}
                break
        for variable in _BUDGET_VARIABLES:
            none, some = (self._try(*conversation, variables=thinking | {variable: n}) for n in (0, 512))
            if none and some and none != some:
                found["budget_variable"] = variable
        return found


def typed(message: Value) -> Value:
    """With its content as a list of one part."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _user(text: str) -> Value:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Value:
    return {"role": "assistant", "content": text}


def _caller(ids: Sequence[str], objects: bool, empty: str) -> Value:
    calls = []
    for index, id in enumerate(ids):
        arguments: Any = {_ARGUMENT: 1} if objects else f'{{"{_ARGUMENT}": 1}}'
        calls.append(tool_call(id, f"{_CALLED}{index}", arguments))
    return with_empty({"role": "assistant", "tool_calls": calls}, empty)


def _result(id: str) -> Value:
    return {"role": "tool", "content": _RESULT, "tool_call_id": id, "name": f"{_CALLED}0"}


def with_empty(message: Value, empty: str) -> Value:
    """A message without text, in the way that the template can take."""
    return message if empty == "absent" else message | {"content": None if empty == "null" else ""}


def tool_call(id: str, name: str, arguments: Any) -> Value:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


_TOOL: Value = {
    "type": "function",
    "function": {
        "name": _TOOL_NAME,
        "description": "zzdescription",
        "parameters": {"type": "object", "properties": {"zzproperty": {"type": "integer", "description": "zz"}}},
    },
}
