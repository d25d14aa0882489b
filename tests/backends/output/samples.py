"""What models of each format write: well-formed answers, and what they mean."""

from __future__ import annotations

from typing import Any, NamedTuple

PARIS = ("get_weather", {"city": "Paris"})
TOKYO = ("get_weather", {"city": '東京 "x"\n', "days": 2})
NOW: tuple[str, Any] = ("now", {})
SAVE = (
    "save",
    {"items": [{"a": [1, -2.5e3]}, "}"], "options": {"k": {"n": None}}, "flag": True, "note": "hi", "unit": "c"},
)


class Sample(NamedTuple):
    format: str
    output: str
    calls: list[tuple[str, Any]]
    text: str = ""


_TOKYO_JSON = '{"city": "東京 \\"x\\"\\n", "days": 2}'
_SAVE_JSON = (
    '{"items": [{"a": [1, -2.5e3]}, "}"], "options": {"k": {"n": null}}, "flag": true, "note": "hi", "unit": "c"}'
)


def _json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


_ALL_JSON = [("get_weather", '{"city": "Paris"}'), ("get_weather", _TOKYO_JSON), ("now", "{}"), ("save", _SAVE_JSON)]
ALL = [PARIS, TOKYO, NOW, SAVE]


def _each(template: str) -> list[str]:
    return [template % pair for pair in _ALL_JSON]


def _xml(begin: str, end: str, line: str) -> str:
    def argument(name: str, value: str) -> str:
        return f"<parameter={name}>{line}{value}{line}</parameter>\n"

    bodies = [
        ("get_weather", argument("city", "Paris")),
        ("get_weather", argument("city", '東京 "x"\n') + argument("days", "2")),
        ("now", ""),
        (
            "save",
            argument("items", '[{"a": [1, -2.5e3]}, "}"]')
            + argument("options", '{"k": {"n": null}}')
            + argument("flag", "true")
            + argument("note", "hi")
            + argument("unit", "c"),
        ),
    ]
    return "\n".join(f"{begin}\n<function={name}>\n{body}</function>\n{end}" for name, body in bodies)


_PYTHON = (
    'get_weather(city="Paris"), get_weather(city=\'東京 "x"\\n\', days=2), now(), '
    "save(items=[{'a': [1, -2.5e3]}, '}'], options={\"k\": {\"n\": None}}, flag=True, note='hi', unit=\"c\")"
)

_GLM = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
<tool_call>get_weather<arg_key>city</arg_key><arg_value>東京 "x"
</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>
<tool_call>now
</tool_call><tool_call>save
<arg_key>items</arg_key>
<arg_value>[{"a": [1, -2.5e3]}, "}"]</arg_value>
<arg_key>options</arg_key>
<arg_value>{"k": {"n": null}}</arg_value>
<arg_key>flag</arg_key>
<arg_value>true</arg_value>
<arg_key>note</arg_key>
<arg_value>hi</arg_value>
<arg_key>unit</arg_key>
<arg_value>c</arg_value>
</tool_call>"""

_GEMMA = (
    "BEGINcall:get_weather{city:QParisQ}END"
    'BEGINcall:get_weather{city:Q東京 "x"\nQ,days:2}END'
    "BEGINcall:now{}END"
    "BEGINcall:save{items:[{a:[1,-2.5e3]},Q}Q],options:{k:{n:null}},flag:true,note:QhiQ,unit:QcQ}END"
)


def _gemma(begin: str, end: str, quote: str) -> str:
    return _GEMMA.replace("BEGIN", begin).replace("END", end).replace("Q", quote)


def _mistral_list(pairs: list[tuple[str, str]]) -> str:
    calls = ", ".join(_json(name, arguments)[:-1] + ', "id": "123456789"}' for name, arguments in pairs)
    return f"[TOOL_CALLS][{calls}]"


_DEEPSEEK_EACH = _each("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>")
_R1_EACH = _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>")

SAMPLES = [
    Sample("hermes", "".join(_each('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>\n')), ALL),
    Sample("granite", "<|tool_call|>[" + ", ".join(_each('{"name": "%s", "arguments": %s}')) + "]", ALL),
    Sample("nemotron", "<TOOLCALL>[" + ", ".join(_each('{"name": "%s", "arguments": %s}')) + "]</TOOLCALL>", ALL),
    Sample(
        "cohere",
        "<|START_ACTION|>[\n    "
        + ",\n    ".join(_each('{"tool_call_id": "0", "tool_name": "%s", "parameters": %s}'))
        + "\n]<|END_ACTION|>",
        ALL,
    ),
    Sample("generic", '{"tool_calls": [' + ", ".join(_each('{"name": "%s", "arguments": %s}')) + "]}", ALL),
    Sample("generic", '{\n  "tool_call": {"name": "now", "arguments": {}}\n}', [NOW]),
    Sample("llama3_json", "; ".join(_each('{"name": "%s", "parameters": %s}')), ALL),
    Sample(
        "llama3_json", "<|python_tag|>" + "\n".join(_each('{"type": "function", "name": "%s", "parameters": %s}')), ALL
    ),
    Sample("llama3_json", '<|python_tag|>get_weather.call(city="Paris")', [PARIS]),
    Sample("pythonic", f"[{_PYTHON}]", ALL),
    Sample("lfm2", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>", ALL),
    Sample("mistral", "".join(_each("[TOOL_CALLS]%s[ARGS]%s")), ALL),
    Sample("mistral", "".join(_each("[TOOL_CALLS]%s[CALL_ID]123456789[ARGS]%s")), ALL),
    Sample("mistral", "[TOOL_CALLS]get_weather" + '{"city": "Paris"}', [PARIS]),
    Sample("mistral_list", _mistral_list(_ALL_JSON), ALL),
    Sample("deepseek", "<｜tool▁calls▁begin｜>" + "".join(_DEEPSEEK_EACH) + "<｜tool▁calls▁end｜>", ALL),
    Sample("deepseek_r1", "<｜tool▁calls▁begin｜>" + "\n".join(_R1_EACH) + "<｜tool▁calls▁end｜>", ALL),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|>"
        + "".join(_each("<|tool_call_begin|>functions.%s:3<|tool_call_argument_begin|>%s<|tool_call_end|>"))
        + "<|tool_calls_section_end|>",
        ALL,
    ),
    Sample("qwen3_coder", _xml("<tool_call>", "</tool_call>", "\n"), ALL),
    Sample("qwen3_coder", "<function=now>\n</function>\n</tool_call>", [NOW]),
    Sample("seed_oss", _xml("<seed:tool_call>", "</seed:tool_call>", ""), ALL),
    Sample(
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [PARIS, NOW],
    ),
    Sample("glm", _GLM, ALL),
    Sample("gemma4", _gemma("<|tool_call>", "<tool_call|>", '<|"|>'), ALL),
    Sample("function_gemma", _gemma("<start_function_call>", "<end_function_call>", "<escape>"), ALL),
    Sample("gemma3", "```tool_code\n" + _PYTHON.replace("), ", ")\n") + "\n```", ALL),
    Sample(
        "harmony",
        "<|start|>assistant".join(
            _each("<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>")
        ),
        ALL,
    ),
    Sample("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}', [PARIS]),
]
