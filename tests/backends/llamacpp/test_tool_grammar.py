"""Calls that a client demands, and arguments that satisfy a schema: what the grammars admit, and what a model makes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.grammar.tool_grammar import demands_grammar, tool_grammar, with_tool_grammar
from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from backends.output.selection import OutputFormats, parser_for
from backends.output.tools.format import ToolFormat
from backends.output.tools.hermes import HERMES
from backends.output.tools.mistral import MISTRAL
from backends.output.tools.table import TOOL_FORMATS
from protocols.errors import InvalidRequest
from protocols.request import (
    ChatPrompt,
    GbnfConstraint,
    JsonSchemaConstraint,
    Message,
    TextPart,
    TextPrompt,
    Tool,
    ToolChoice,
)
from tests.backends.chat_template import captures
from tests.backends.contract import answer
from tests.backends.grammar.test_json_schema import matches
from tests.backends.llamacpp.helpers import greedy

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "Tells the weather of a city.", CITY)
CLOCK = Tool("get_time", "Tells the time.", {})
REQUIRED, ONE = ToolChoice("required"), ToolChoice("required", parallel=False)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def forced(tools: list[Tool], choice: ToolChoice = REQUIRED, format: ToolFormat = HERMES) -> str:
    constraint = tool_grammar(tools, choice, format)
    assert constraint is not None
    assert not constraint.lazy
    return constraint.text


def test_a_required_call_is_one_of_the_tools() -> None:
    grammar = forced([WEATHER, CLOCK], ONE)
    assert matches(grammar, hermes("get_weather", '{"city": "Ulm"}'))
    assert matches(grammar, hermes("get_time", "{}"))
    assert matches(grammar, hermes("get_time", '{"zone": {"a": [1]}}'))
    for wrong in (
        "Hello",
        "",
        hermes("get_rain", "{}"),
        hermes("get_weather", "{}"),
        hermes("get_weather", '{"city": 1}'),
        hermes("get_time", "[]"),
    ):
        assert not matches(grammar, wrong)


def test_a_named_call_is_of_that_tool() -> None:
    grammar = forced([WEATHER, CLOCK], ToolChoice("required", "get_time", parallel=False))
    assert matches(grammar, hermes("get_time", "{}"))
    assert not matches(grammar, hermes("get_weather", '{"city": "Ulm"}'))


def test_B50_several_calls_only_where_they_are_allowed() -> None:
    two = hermes("get_time", "{}") + "\n" + hermes("get_weather", '{"city": "Ulm"}')
    assert matches(forced([WEATHER, CLOCK]), two)
    assert not matches(forced([WEATHER, CLOCK], ONE), two)


def test_names_are_written_as_the_form_says() -> None:
    tool = Tool('say "é"')
    assert matches(forced([tool], ONE), hermes('say \\"é\\"', "{}"))
    assert matches(forced([tool], ONE, MISTRAL), '[TOOL_CALLS]say "é"[ARGS]{}')


def test_schemas_of_several_tools_do_not_mix() -> None:
    def tree(kind: str) -> dict[str, Any]:
        node = {"type": "object", "properties": {"v": {"type": kind}, "next": {"$ref": "#/$defs/node"}}}
        return {"$defs": {"node": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}}

    grammar = forced([Tool("a", parameters=tree("string")), Tool("b", parameters=tree("boolean"))], ONE)
    for name, value, other in (("a", '"x"', "true"), ("b", "true", '"x"')):
        text = '{"root": {"v": %s,"next": {"v": %s}}}'
        assert matches(grammar, hermes(name, text % (value, value)))
        assert not matches(grammar, hermes(name, text % (value, other)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema.json"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "string"},
        {"type": 7},
    ],
)
def test_B18_a_schema_that_cannot_be_compiled_is_any_object(schema: dict[str, Any]) -> None:
    grammar = forced([WEATHER, Tool("f", parameters=schema, strict=True)], ONE)
    assert matches(grammar, hermes("f", '{"a": [{}]}'))
    assert not matches(grammar, hermes("f", '"x"'))
    assert not matches(grammar, hermes("get_weather", "{}"))


@pytest.mark.parametrize("client", captures.NAMES)
def test_B18_the_tools_of_real_clients(client: str) -> None:
    tools = list(captures.recorded(client)[0].tools)
    grammar = forced(tools)
    for tool in tools:
        if required := tool.parameters.get("required"):
            assert not matches(grammar, hermes(tool.name, "{}")), (tool.name, required)


def test_B18_schemas_that_are_too_large_together_are_any_object() -> None:
    def large(tool: int) -> dict[str, Any]:
        names = [f"property_{tool}_{i}_{'x' * 60}" for i in range(200)]
        return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}

    tools = [Tool(f"f{i}", parameters=large(i)) for i in range(40)]
    grammar = forced([*tools, msgspec.structs.replace(WEATHER, strict=True)], ONE)
    assert matches(grammar, hermes("f3", "{}"))
    assert not matches(grammar, hermes("get_weather", "{}"))


def test_the_same_schema_is_written_once() -> None:
    assert forced([WEATHER, msgspec.structs.replace(WEATHER, name="f")], ONE).count(r"\"city\"") == 1


def test_a_model_may_speak_before_a_strict_call() -> None:
    strict = msgspec.structs.replace(WEATHER, strict=True)
    constraint = tool_grammar([strict, CLOCK], ToolChoice(), HERMES)
    assert constraint is not None
    assert constraint.lazy
    assert [trigger.value for trigger in constraint.triggers] == ["<tool_call>"]
    assert set(constraint.preserved_tokens) == {"<tool_call>", "</tool_call>"}
    assert matches(constraint.text, hermes("get_weather", '{"city": "Ulm"}'))
    assert not matches(constraint.text, hermes("get_weather", "{}"))
    assert matches(constraint.text, hermes("get_time", '{"any": 1}'))


def test_nothing_is_constrained_that_need_not_be() -> None:
    strict = msgspec.structs.replace(WEATHER, strict=True)
    assert tool_grammar([WEATHER], ToolChoice(), HERMES) is None
    assert tool_grammar([strict], ToolChoice("none"), HERMES) is None
    assert not demands_grammar(greedy(TextPrompt("x")))


@pytest.mark.parametrize(("tools", "name"), [([], None), ([WEATHER], "get_rain")])
def test_a_call_of_what_is_not_there(tools: list[Tool], name: str | None) -> None:
    with pytest.raises(InvalidRequest, match=name or "no tools") as caught:
        tool_grammar(tools, ToolChoice("required", name), HERMES)
    assert caught.value.param == "tool_choice"


def test_the_form_is_the_parsers() -> None:
    """Also where the settings say another than the template, and where they say that calls are text."""
    for format in TOOL_FORMATS:
        asked = greedy(prompt(REQUIRED, WEATHER))
        assert isinstance(asked.prompt, ChatPrompt)
        parser = parser_for(asked.prompt, OutputFormats(format, None), "")
        constraint = with_tool_grammar(asked, parser).constraint
        assert isinstance(constraint, GbnfConstraint)
        assert constraint.text == forced([WEATHER], REQUIRED, format)
        assert set(constraint.preserved_tokens) == set(format.special_tokens)
    with pytest.raises(InvalidRequest, match="left in its text") as caught:
        with_tool_grammar(greedy(prompt(REQUIRED, WEATHER)), None)
    assert caught.value.param == "tool_choice"
    strict = greedy(prompt(ToolChoice(), msgspec.structs.replace(WEATHER, strict=True)))
    assert with_tool_grammar(strict, None) is strict


# --- with a model ------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    settings = LlamaCppSettings(model=demo_model, slots=1, context_length=1024)
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


def prompt(choice: ToolChoice, *tools: Tool) -> ChatPrompt:
    return ChatPrompt((Message("user", (TextPart("What is the weather in Paris?"),)),), tools, tool_choice=choice)


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
class TestWithModel:
    async def test_a_named_call_is_made(self, backend: LlamaCppBackend) -> None:
        kinds = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
        for tool, key in ((WEATHER, "city"), (Tool("convert", "Converts.", kinds), "unit")):
            choice = ToolChoice("required", tool.name, parallel=False)
            made = (await answer(backend, greedy(prompt(choice, WEATHER, tool), 120, ignore_eos=False))).choice
            assert (made.text, made.reason) == ("", "tool_calls")
            (call,) = made.tool_calls
            arguments = json.loads(call.arguments)
            assert (call.name, set(arguments)) == (tool.name, {key})
            assert key != "unit" or arguments["unit"] in ("c", "f")

    async def test_a_call_that_is_resumed_ends_the_same(self, backend: LlamaCppBackend) -> None:
        request = greedy(prompt(ONE, WEATHER), 120, ignore_eos=False)
        whole = await answer(backend, request)
        assert [call.name for call in whole.choice.tool_calls] == ["get_weather"]
        for at in (1, 9, len(whole.tokens) - 1):
            rest = [f async for f in backend.generate(msgspec.structs.replace(request, resume=whole.tokens[:at]))]
            assert tuple(token for frame in rest for token in frame.tokens) == whole.tokens[at:]

    async def test_a_strict_tool_lets_the_model_speak(self, backend: LlamaCppBackend) -> None:
        """Until it writes what a call begins with, which it is made to here."""
        strict = msgspec.structs.replace(WEATHER, strict=True)
        free, bound = [
            (await answer(backend, greedy(prompt(ToolChoice(), tool), 40))).choice for tool in (WEATHER, strict)
        ]
        assert bound.text == free.text or bound.tool_calls
        (first, *_) = await backend.tokenize("<tool_call>")
        begun = [piece.token for piece in await backend.tokenize("I look.\n<tool_call>")]
        assert first.token in begun
        request = greedy(prompt(ToolChoice(parallel=False), strict), 120, ignore_eos=False, resume=tuple(begun))
        events = [event async for frame in backend.generate(request) for event in frame.events]
        arguments = "".join(getattr(event, "arguments", "") for event in events)
        assert set(json.loads(arguments)) == {"city"}

    async def test_a_call_cannot_follow_a_format(self, backend: LlamaCppBackend) -> None:
        for constraint in (JsonSchemaConstraint({}), GbnfConstraint('root ::= "a"')):
            with pytest.raises(InvalidRequest, match="format"):
                await answer(backend, greedy(prompt(REQUIRED, WEATHER), constraint=constraint))

    async def test_no_call_may_be_made(self, backend: LlamaCppBackend) -> None:
        """The tools stay in the prompt, and what looks like a call is text."""
        text = hermes("get_weather", '{"city": "Ulm"}')
        written = text.replace("\n", "\\n").replace('"', '\\"')
        none, auto = prompt(ToolChoice("none"), WEATHER), prompt(ToolChoice(), WEATHER)
        assert await backend.apply_template(none) == await backend.apply_template(auto)
        only = GbnfConstraint(f'root ::= "{written}"')
        for chat, calls in ((none, 0), (auto, 1)):
            made = (await answer(backend, greedy(chat, 120, ignore_eos=False, constraint=only))).choice
            assert (len(made.tool_calls), made.text) == (calls, "" if calls else text)
            assert made.reason == ("tool_calls" if calls else "stop")
