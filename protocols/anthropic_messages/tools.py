"""The tools of a request -> those that are offered to the model, and whether it has to call one."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.anthropic_messages.content import ToolUpdate
from protocols.anthropic_messages.wire import InTool, InToolChoice
from protocols.body import plain_json
from protocols.errors import InvalidRequest
from protocols.request import Tool, ToolChoice

_NEED_A_CLIENT = ("bash_", "text_editor_", "computer_", "memory_", "browser_")
"""Types of tools whose schema only Anthropic's models know, while the client runs them."""

_SEARCH = "tool_search_tool_"


class ToolBox:
    """Which tools there are at the end of a conversation.

    "If true, tool will not be included in initial system prompt. Only loaded when returned via tool_reference from tool
    search." Tools that join later are put behind the others, so that what stands before them stays as it was.
    """

    def __init__(self, tools: Sequence[InTool]) -> None:
        self._known: dict[str, Tool] = {}
        self._foreign: set[str] = set()  # tools that run at Anthropic
        self._offered: dict[str, Tool] = {}
        # Anthropic's own search is not here, and without it nobody would find what it is to find.
        searched = not any((tool.type or "").startswith(_SEARCH) for tool in tools)
        for i, wire in enumerate(tools):
            tool = self._define(wire, f"tools[{i}]")
            if tool is not None and not (wire.defer_loading and searched):
                self._offered[tool.name] = tool

    def update(self, update: ToolUpdate) -> None:
        if update.tool.definition is not None:
            tool = self._define(update.tool.definition, f"{update.path}.definition")
        else:
            tool = self._known.get(update.tool.name or "")
        if tool is None:
            return  # told of, but never defined: the model cannot call it
        if update.offered:
            self._offered.setdefault(tool.name, tool)
        else:
            self._offered.pop(tool.name, None)

    def choice(self, wire: InToolChoice | None) -> ToolChoice:
        """May bring in the tool that has to be called."""
        if wire is None:
            return ToolChoice()
        parallel = not wire.disable_parallel_tool_use
        match wire.type:
            case "auto" | "none":
                return ToolChoice(wire.type, parallel=parallel)
            case "any":
                if not self._offered:
                    raise InvalidRequest(
                        "Invalid 'tool_choice.type': 'any' needs 'tools' that this model can call.",
                        param="tool_choice.type",
                    )
                return ToolChoice("required", parallel=parallel)
            case "tool":
                return ToolChoice("required", self._forced(wire.name), parallel)

    @property
    def offered(self) -> tuple[Tool, ...]:
        return tuple(self._offered.values())

    def _forced(self, name: str | None) -> str:
        path = "tool_choice.name"
        if name is None:
            raise InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
        if name in self._foreign:
            raise InvalidRequest(f"Invalid '{path}': '{name}' runs on Anthropic's servers, not here.", param=path)
        if name not in self._known:
            raise InvalidRequest(f"Invalid '{path}': there is no such tool in 'tools'.", param=path)
        self._offered.setdefault(name, self._known[name])
        return name

    def _define(self, wire: InTool, path: str) -> Tool | None:
        """None for a tool that runs on Anthropic's servers: it is left out, as nobody here could run it."""
        if wire.input_schema is None and wire.type not in (None, "custom"):
            if wire.type.startswith(_NEED_A_CLIENT):
                raise InvalidRequest(
                    f"Invalid '{path}.type': '{wire.type[:40]}' is known to Anthropic's models only; give the tool a "
                    "'description' and an 'input_schema'.",
                    param=f"{path}.type",
                )
            self._foreign.add(wire.name or "")
            return None
        if not wire.name:
            raise InvalidRequest(f"Missing required parameter: '{path}.name'.", param=f"{path}.name")
        if wire.input_schema is None:
            raise InvalidRequest(f"Missing required parameter: '{path}.input_schema'.", param=f"{path}.input_schema")
        schema = plain_json(wire.input_schema, f"{path}.input_schema")
        if wire.name in self._known:
            raise InvalidRequest(f"Invalid '{path}.name': another tool has this name.", param=f"{path}.name")
        tool = Tool(wire.name, wire.description or "", schema, bool(wire.strict))
        self._known[tool.name] = tool
        return tool
