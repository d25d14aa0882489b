"""Each format: what models write, and the calls it means; cut anywhere; with text around; malformed."""

from __future__ import annotations

import json

import pytest

from backends.output.parser import MAX_HELD
from backends.output.reasoning import reasoning_format
from backends.output.selection import OutputFormats, parser_for
from backends.output.tools.table import TOOL_FORMATS, tool_format
from protocols.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnded, ToolCallStarted
from protocols.request import ChatPrompt, ToolChoice
from tests.backends.output.samples import NOW, PARIS, SAMPLES, Sample
from tests.backends.output.support import TOOLS, events_of, run, spec, values

each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.format}-{len(sample.output)}")


def test_every_format_has_a_sample() -> None:
    assert {sample.format for sample in SAMPLES} == {format.name for format in TOOL_FORMATS}


@each_sample
def test_B46_arguments_are_the_text_of_an_object(sample: Sample) -> None:
    output = run(spec(sample.format), [sample.output])
    assert values(output) == sample.calls
    assert (output.text, output.reasoning, output.reason) == ("", "", "tool_calls")
    assert len({call.id for call in output.calls}) == len(output.calls)


@each_sample
def test_B49_calls_are_the_same_however_the_text_comes(sample: Sample) -> None:
    assert run(spec(sample.format), list(sample.output)) == run(spec(sample.format), [sample.output])


@each_sample
def test_B40_B46_where_the_budget_ends_what_was_streamed_stands(sample: Sample) -> None:
    whole = run(spec(sample.format), [sample.output])
    for end in range(len(sample.output)):
        cut = run(spec(sample.format), [sample.output[:end]], "length")
        assert cut.reason == "length"
        assert len(cut.calls) <= len(whole.calls)
        for part, full in zip(cut.calls, whole.calls, strict=False):
            assert part.name == full.name and part.id == full.id
            assert full.arguments.startswith(part.arguments)
        assert sample.output[:end].endswith(cut.text) and len(cut.text) < 60, "what may begin a call"


@each_sample
def test_cut_anywhere_by_the_model_itself(sample: Sample) -> None:
    for end in range(1, len(sample.output)):
        cut = run(spec(sample.format), [sample.output[:end]])
        try:
            complete = all(isinstance(json.loads(call.arguments), dict) for call in cut.calls)
        except ValueError:
            complete = False
        assert cut.reason == ("tool_calls" if complete and cut.calls else "stop")


@each_sample
def test_B42_text_before_a_call_is_delivered(sample: Sample) -> None:
    if sample.format == "harmony":
        before = "<|channel|>commentary<|message|>Let me see. 日本<|end|><|start|>assistant"
    else:
        before = "Let me see. 日本\n\n"
    output = run(spec(sample.format), list(before + sample.output))
    assert values(output) == sample.calls
    assert output.text == "Let me see. 日本"


@each_sample
def test_B50_one_call_only_where_parallel_calls_are_off(sample: Sample) -> None:
    for pieces in ([sample.output], list(sample.output)):
        output = run(spec(sample.format, parallel=False), pieces)
        assert values(output) == sample.calls[:1]
        assert (output.text, output.reason) == ("", "tool_calls")


@each_sample
def test_arguments_are_streamed(sample: Sample) -> None:
    """A long string comes as it is written, not at its end."""
    marked = sample.output.replace("Paris", "P" + "x" * 5000)
    if marked == sample.output:
        return
    parser = spec(sample.format).make("request", 0)
    first = marked.index("xxxx")
    parser.feed(marked[:first])
    silent = 0
    for char in marked[first : first + 4900]:
        silent = 0 if parser.feed(char) else silent + 1
        assert silent <= 32


@each_sample
def test_B48_a_call_begins_with_its_id_and_name(sample: Sample) -> None:
    parser = spec(sample.format).make("request", 0)
    begun: list[int] = []
    for event in events_of(parser, list(sample.output)):
        if isinstance(event, ToolCallStarted):
            assert event.id and event.name and event.index == len(begun)
            begun.append(event.index)
        else:
            assert isinstance(event, ToolCallDelta | ToolCallEnded) and event.index == begun[-1]


@each_sample
def test_where_no_call_may_be_made_it_is_all_text(sample: Sample) -> None:
    prompt = ChatPrompt((), TOOLS, tool_choice=ToolChoice("none"))
    parser = parser_for(prompt, OutputFormats(tool_format(sample.format), reasoning_format("think")), "")
    assert parser is not None
    output = run(parser, [sample.output])
    assert (output.calls, output.reason) == ((), "stop")
    assert output.text == sample.output or sample.format == "harmony"


@each_sample
def test_without_tools_it_is_all_text(sample: Sample) -> None:
    if sample.format == "harmony":
        assert run(spec("harmony", "harmony", offered=()), [sample.output]).calls == ()
    else:
        assert run(spec(sample.format, "think", offered=()), [sample.output]).text == sample.output


def test_B37_two_calls_in_one_piece() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = spec("hermes").make("r", 0)
    events = parser.feed(call * 2)
    assert [type(event) for event in events] == [ToolCallStarted, ToolCallDelta, ToolCallEnded] * 2
    assert [event.index for event in events if isinstance(event, ToolCallStarted)] == [0, 1]  # B38
    assert parser.finish("stop") == []


def test_B43_control_tokens_reach_neither_name_nor_text() -> None:
    output = run(
        spec("harmony", "harmony"),
        ['<|channel|>commentary to=functions.get_weather<|channel|>commentary <|message|>{"city": "Paris"}<|call|>'],
    )
    assert values(output) == [PARIS]
    assert output.text == ""


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<function=now>\n</function>", [NOW]),
        ("I call it.\n<function=now>\n</function>\n</tool_call>", [NOW]),
        ("<function=unknown>\n</function>", []),
        ("Write <function=now>\n</function> to call it.", []),
    ],
)
def test_B44_calls_without_an_opening_tag(text: str, calls: list[object]) -> None:
    output = run(spec("qwen3_coder"), [text])
    assert values(output) == calls
    if not calls:
        assert output.text == text


def test_a_call_of_a_tool_that_was_not_offered_is_still_a_call() -> None:
    output = run(spec("hermes"), ['<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>'])
    assert values(output) == [("unknown", {"a": 1})]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "Use <tool_call> and </tool_call>."),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": 7}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": '.replace('{"a": ', "{no")),
        ("hermes", "<tool_call>" + " " * MAX_HELD + "x"),
        ("hermes", '<tool_call>{"name": "' + "x" * MAX_HELD),
        ("llama3_json", '{"name": "Bob", "age": 7}'),
        ("llama3_json", 'A dict: {"name": "now", "parameters": {}}'),
        ("llama3_json", '{"city": "Paris"}'),
        ("generic", '{"response": "hello"}'),
        ("pythonic", "[link](https://example.com) and [1, 2]"),
        ("pythonic", "[now, later]"),
        ("pythonic", '[get_weather("Paris")]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]nothing"),
        ("mistral", "[TOOL_CALLS] is a token."),
        ("deepseek", "<｜tool▁calls▁begin｜>now"),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call>\n<function>now</function>"),
        ("glm", "<tool_call>two words\n<arg_key>"),
        ("gemma4", "<|tool_call>now{}"),
        ("granite", "<|tool_call|>soon"),
        ("harmony", "No header at all."),
        ("harmony", "To be < or not."),
    ],
)
def test_what_is_no_call_is_text(format: str, text: str) -> None:
    for pieces in ([text], list(text)):
        output = run(spec(format), pieces)
        assert output.text == text
        assert (output.calls, output.reason) == ((), "stop")


@pytest.mark.parametrize(
    ("format", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> so.', '{"a": ', "1</tool_call> so."),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a" 1}}', '{"a" ', "1}}"),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": 1] then', '{"a": ', "1] then"),
        ("pythonic", "[now(a=1, b c)]", '{"a": 1', "b c)]"),
        ("gemma4", "<|tool_call>call:now{a:1]] so", '{"a":1', "] so"),
        ("qwen3_coder", "<tool_call><function=now><parameter=a>1</parameter>oops", '{"a": 1', "oops"),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a": tru}<|call|>', '{"a": ', "tru}"),
    ],
)
def test_a_call_that_breaks_ends_and_what_follows_is_text(format: str, text: str, arguments: str, rest: str) -> None:
    for pieces in ([text], list(text)):
        output = run(spec(format), pieces)
        assert [(call.name, call.arguments) for call in output.calls] == [("now", arguments)]
        assert output.text.strip() == rest.strip()
        assert output.reason == "stop"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}',
        ),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {\'city\': \'Paris\',}}</tool_call>'),
        ("hermes", '<tool_call>\n<tool_call>\n{"name": "functions.get_weather", "arguments": {"city": "Paris"}}'),
        ("qwen3_coder", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'),
        ("glm", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'),
        ("gemma4", '<|tool_call>call:get_weather{"city":"Paris"}<tool_call|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
    ],
)
def test_other_ways_to_write_it(format: str, text: str) -> None:
    output = run(spec(format), list(text))
    assert values(output) == [PARIS]
    assert output.reason == "tool_calls"


def test_no_arguments() -> None:
    for text in ('{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": "{}"}'):
        assert values(run(spec("hermes"), list(f"<tool_call>{text}</tool_call>"))) == [NOW]


@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        ("city", "7", "7"),
        ("city", "null", "null"),
        ("city", ' "a" \n b ', ' "a" \n b '),
        ("days", "7", 7),
        ("days", "soon", "soon"),
        ("flag", "True", True),
        ("note", "null", None),
        ("note", "7", "7"),
        ("note", "None of it", "None of it"),
        ("options", "{'a': True}", {"a": True}),
        ("items", "nothing", "nothing"),
        ("unit", "c", "c"),
        ("any", "7", 7),
        ("any", '"7"', "7"),
        ("any", '{"a": 1', '{"a": 1'),
        ("any", "x" * 3000, "x" * 3000),
        ("any", json.dumps(["x" * 3000]), ["x" * 3000]),
        ("unheard_of", "7 dwarfs", "7 dwarfs"),
    ],
)
def test_bare_values_have_the_types_of_the_schema(argument: str, text: str, value: object) -> None:
    tool = next((tool.name for tool in TOOLS if argument in tool.parameters.get("properties", {})), "now")
    output = f"<tool_call>\n<function={tool}>\n<parameter={argument}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert values(run(spec("qwen3_coder"), list(output))) == [(tool, {argument: value})]


def test_ids() -> None:
    def ids(format: str, text: str, request: str = "request", choice: int = 0) -> list[str]:
        parser = spec(format).make(request, choice)
        return [event.id for event in events_of(parser, [text]) if isinstance(event, ToolCallStarted)]

    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    first, second = ids("hermes", call * 2)
    assert first.startswith("call_") and first != second
    assert ids("hermes", call) == [first], "another replica that continues the request gives the same"
    assert first not in ids("hermes", call, "other") + ids("hermes", call, "request", 1)
    kimi = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert ids("kimi_k2", kimi) == ["functions.now:7"]
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}") == ["abc123XYZ"]
    (id,) = ids("mistral", "[TOOL_CALLS]now[ARGS]{}")
    assert len(id) == 9 and id.isalnum() and id.isascii()


def test_nothing_inside_a_call_is_markup() -> None:
    code = "<think>\n<tool_call>\n</think> [TOOL_CALLS] {"
    text = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{code}\n</parameter>\n</function>\n</tool_call>"
    output = run(spec("qwen3_coder", "think"), list(text))
    assert values(output) == [("get_weather", {"city": code})]
    assert (output.text, output.reasoning) == ("", "")


def test_deltas_are_merged_and_never_empty() -> None:
    for sample in SAMPLES:
        events = spec(sample.format).make("r", 0).feed("Hi.\n" + sample.output)
        for before, event in zip(events, events[1:], strict=False):
            if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
                assert type(before) is not type(event)
                assert event.arguments if isinstance(event, ToolCallDelta) else event.text
