"""Calls that a client demands, and arguments that satisfy a schema: what the grammars admit, and what a model makes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import msgspec
import pytest
import pytest_asyncio

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from backends.chat_template import ChatTemplate
from backends.llamacpp.backend import LlamaCppBackend
from backends.llamacpp.settings import LlamaCppSettings
from backends.llamacpp.tool_grammar import (
    GENERIC,
    HERMES,
    CallSyntax,
    Thinking,
    call_syntax,
    demands_grammar,
    open_thinking,
    tool_grammar,
)
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
from tests.backends.llamacpp.helpers import greedy
from tests.backends.llamacpp.test_json_schema import matches

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "Tells the weather of a city.", CITY)
CLOCK = Tool("get_time", "Tells the time.", {})
REQUIRED, ONE = ToolChoice("required"), ToolChoice("required", parallel=False)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def forced(tools: list[Tool], choice: ToolChoice = REQUIRED, syntax: CallSyntax = HERMES) -> str:
    constraint = tool_grammar(tools, choice, syntax)
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


def test_names_are_written_as_the_syntax_says() -> None:
    tool = Tool('say "hi"')
    assert matches(forced([tool], ONE, GENERIC), '{"name": "say \\"hi\\"", "arguments": {}}')
    xml = CallSyntax(name_before="<f=", name_after=">", after="</f>", json_name=False)
    assert matches(forced([tool], ONE, xml), '<f=say "hi">{}</f>')


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
    for index, tool in enumerate(tools):
        assert f"arguments-{index} ::=" in grammar or not tool.parameters.get("properties"), tool.name


def test_B18_schemas_that_are_too_large_together_are_any_object() -> None:
    names = [f"property_number_{i}_{'x' * 60}" for i in range(200)]
    large = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    tools = [Tool(f"f{i}", parameters=large) for i in range(40)]
    assert matches(forced([*tools, msgspec.structs.replace(WEATHER, strict=True)], ONE), hermes("f3", "{}"))


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
    assert tool_grammar([strict], ToolChoice(), GENERIC) is None
    assert not demands_grammar(greedy(TextPrompt("x")))


@pytest.mark.parametrize(("tools", "name"), [([], None), ([WEATHER], "get_rain")])
def test_a_call_of_what_is_not_there(tools: list[Tool], name: str | None) -> None:
    with pytest.raises(InvalidRequest, match=name or "no tools") as caught:
        tool_grammar(tools, ToolChoice("required", name), HERMES)
    assert caught.value.param == "tool_choice"


def test_a_model_thinks_before_the_call_that_it_must_make() -> None:
    assert open_thinking("<|im_start|>assistant\n<think>\n") == Thinking("</think>")
    assert open_thinking("<think>\n\n</think>\n\n") is None
    constraint = tool_grammar([CLOCK], ONE, HERMES, Thinking("</think>"))
    assert constraint is not None
    assert constraint.lazy
    assert [trigger.value for trigger in constraint.triggers] == ["</think>"]
    assert matches(constraint.text, "</think>\n\n" + hermes("get_time", "{}"))
    assert not matches(constraint.text, "</think>\n\nHello")


def test_the_syntax_is_the_templates() -> None:
    def syntax(source: str) -> CallSyntax:
        return call_syntax(ChatTemplate(source, clock=datetime.now))

    message = "{% for m in messages %}{{ m.content }}"
    calls = "{% for c in m.tool_calls or [] %}%s{{ c.function | tojson }}{% endfor %}{% endfor %}"
    assert syntax(message + "{% endfor %}") is HERMES
    assert syntax(message + calls.replace("%s", "<tool_call>")) is HERMES
    assert syntax(message + calls.replace("%s", "")) is GENERIC


# --- with a model ------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(demo_model: str) -> AsyncIterator[LlamaCppBackend]:
    """It leaves calls in the text, to be looked at."""
    settings = LlamaCppSettings(model=demo_model, slots=1, context_length=1024, tool_format="none")
    backend = LlamaCppBackend(settings)
    await backend.start()
    yield backend
    await backend.aclose()


def prompt(choice: ToolChoice, *tools: Tool) -> ChatPrompt:
    return ChatPrompt((Message("user", (TextPart("What is the weather in Paris?"),)),), tools, tool_choice=choice)


async def called(backend: LlamaCppBackend, chat: ChatPrompt, **fields: Any) -> str:
    request = greedy(chat, 120, ignore_eos=False, **fields)
    return (await answer(backend, request)).choice.text


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
class TestWithModel:
    async def test_a_named_call_is_made(self, backend: LlamaCppBackend) -> None:
        kinds = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
        for tool, key in ((WEATHER, "city"), (Tool("convert", "Converts.", kinds), "unit")):
            text = await called(backend, prompt(ToolChoice("required", tool.name, parallel=False), WEATHER, tool))
            assert text.startswith("<tool_call>\n")
            assert text.endswith("\n</tool_call>")
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert call["name"] == tool.name
            assert set(call["arguments"]) == {key}
            assert key != "unit" or call["arguments"]["unit"] in ("c", "f")

    async def test_a_call_that_is_resumed_ends_the_same(self, backend: LlamaCppBackend) -> None:
        request = greedy(prompt(ONE, WEATHER), 120, ignore_eos=False)
        whole = await answer(backend, request)
        rest = await answer(backend, msgspec.structs.replace(request, resume=whole.tokens[:9]))
        assert json.loads(whole.choice.text[11:-12])["name"] == "get_weather"
        assert whole.choice.text.endswith(rest.choice.text)

    async def test_a_strict_tool_lets_the_model_speak(self, backend: LlamaCppBackend) -> None:
        free = await called(backend, prompt(ToolChoice("none"), WEATHER))
        strict = msgspec.structs.replace(WEATHER, strict=True)
        assert demands_grammar(greedy(prompt(ToolChoice(), strict)))
        text = await called(backend, prompt(ToolChoice(), strict))
        assert text == free or "<tool_call>" in text

    async def test_a_call_cannot_follow_a_format(self, backend: LlamaCppBackend) -> None:
        for constraint in (JsonSchemaConstraint({}), GbnfConstraint('root ::= "a"')):
            with pytest.raises(InvalidRequest, match="format"):
                await called(backend, prompt(REQUIRED, WEATHER), constraint=constraint)
