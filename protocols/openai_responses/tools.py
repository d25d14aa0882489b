"""Tools and tool choice: everything the model is offered is a function; `names` leads back to what the client declared.

* `function`: itself. Of a `namespace`, by the name `namespace__function`.
* `custom` (free text in): a function with one string argument, `CUSTOM_ARGUMENT`.
* everything else runs on OpenAI's servers (web search, …), and is left out unless the choice requires it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from protocols.body import validated_at
from protocols.errors import InvalidRequest
from protocols.openai_responses.wire import CustomTool, FunctionTool, NamespaceTool
from protocols.request import Tool, ToolChoice

CUSTOM_ARGUMENT = "input"


class Declared(msgspec.Struct, frozen=True):
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


def flat_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """A custom tool's free text as the arguments of the function that stands for it."""
    return msgspec.json.encode({CUSTOM_ARGUMENT: text}).decode()


class ToolSet:
    """The tools of one request by their flat names, in the order they were declared; a later one replaces its namesake.

    Clients that add tools during a conversation send them again with every turn.
    """

    def __init__(self) -> None:
        self.names: dict[str, Declared] = {}
        self._tools: dict[str, Tool] = {}

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._tools.values())

    def add(self, tools: Iterable[dict[str, Any]], path: str, namespace: str | None = None) -> None:
        for index, raw in enumerate(tools):
            at = f"{path}[{index}]"
            match _type(raw, at):
                case "function":
                    wire = validated_at(at, FunctionTool, raw)
                    # "`strict` default true"
                    strict = wire.strict is None or wire.strict
                    tool = Tool(wire.name, wire.description or "", wire.parameters or {}, strict)
                    self._add(tool, Declared(wire.name, namespace))
                case "custom":
                    custom = validated_at(at, CustomTool, raw)
                    self._add(_function_of(custom), Declared(custom.name, namespace, custom=True))
                case "namespace" if namespace is None:
                    group = validated_at(at, NamespaceTool, raw)
                    self.add(group.tools, f"{at}.tools", group.name)
                case _:
                    pass  # "ignore hosted ones"

    def _add(self, tool: Tool, declared: Declared) -> None:
        name = flat_name(declared.name, declared.namespace)
        self._tools[name] = msgspec.structs.replace(tool, name=name)
        self.names[name] = declared

    def choose(self, choice: object, parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
        """The tools to offer and how they are to be used."""
        tools = self.tools
        match choice:
            case None | "auto":
                return tools, ToolChoice(parallel=parallel)
            case "none":
                return tools, ToolChoice("none", parallel=parallel)
            case "required":
                return _some(tools, "tool_choice"), ToolChoice("required", parallel=parallel)
            case dict():
                pass
            case _:
                raise InvalidRequest(
                    "Invalid 'tool_choice': expected 'auto', 'none', 'required' or an object.", param="tool_choice"
                )
        match _type(choice, "tool_choice"):
            case "function" | "custom":
                name = self._named(choice, "tool_choice")
                return tools, ToolChoice("required", name, parallel)
            case "allowed_tools":
                return self._allowed(choice, parallel)
            case other:
                raise InvalidRequest(
                    f"Invalid 'tool_choice.type': a tool of type '{other}' runs on OpenAI's servers; "
                    "here only functions and custom tools can be chosen.",
                    param="tool_choice.type",
                )

    def _allowed(self, choice: dict[str, Any], parallel: bool) -> tuple[tuple[Tool, ...], ToolChoice]:
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise InvalidRequest(
                "Invalid 'tool_choice.mode': expected one of 'auto' or 'required'.", param="tool_choice.mode"
            )
        entries = choice.get("tools")
        if not isinstance(entries, list):
            raise InvalidRequest("Invalid 'tool_choice.tools': expected a list.", param="tool_choice.tools")
        allowed: set[str] = set()
        for index, entry in enumerate(entries):
            at = f"tool_choice.tools[{index}]"
            match _type(entry, at):
                case "function" | "custom":
                    allowed.add(self._named(entry, at))
                case "namespace":
                    allowed |= {flat for flat, tool in self.names.items() if tool.namespace == entry.get("name")}
                case _:
                    pass  # hosted, as in `tools`
        tools = tuple(tool for tool in self.tools if tool.name in allowed)
        if mode == "required":
            _some(tools, "tool_choice.tools")
        return tools, ToolChoice(mode, parallel=parallel)

    def _named(self, entry: dict[str, Any], path: str) -> str:
        name, namespace = entry.get("name"), entry.get("namespace")
        for flat, tool in self.names.items():
            if tool.name == name and namespace in (None, tool.namespace):
                return flat
        raise InvalidRequest(
            f"Invalid '{path}.name': it is not the name of a function or custom tool in 'tools'.", param=f"{path}.name"
        )


def _function_of(tool: CustomTool) -> Tool:
    description = tool.description or ""
    if tool.format is not None and tool.format.type == "grammar":
        # The model is told, not held to it: clients check what comes, and such tools must not be refused.
        rules = f"The {CUSTOM_ARGUMENT} must match this {tool.format.syntax} grammar:\n{tool.format.definition}"
        description = f"{description}\n\n{rules}".lstrip()
    parameters = {
        "type": "object",
        "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
        "required": [CUSTOM_ARGUMENT],
        "additionalProperties": False,
    }
    return Tool(tool.name, description, parameters, strict=True)


def _some(tools: Sequence[Tool], path: str) -> tuple[Tool, ...]:
    if not tools:
        raise InvalidRequest(f"Invalid '{path}': a call is required, but there is no tool to call.", param=path)
    return tuple(tools)


def _type(raw: object, path: str) -> str:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"Invalid '{path}': expected an object.", param=path)
    match raw.get("type"):
        case str(type_):
            return type_
        case None:
            raise InvalidRequest(f"Missing required parameter: '{path}.type'.", param=f"{path}.type")
        case _:
            raise InvalidRequest(f"Invalid '{path}.type': expected a string.", param=f"{path}.type")
