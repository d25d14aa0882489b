"""Which parser an answer gets."""

from __future__ import annotations

from typing import get_args

import pytest

from backends.output.reasoning import REASONING_FORMATS
from backends.output.selection import OutputFormats, ReasoningFormatName, ToolFormatName, parser_for
from backends.output.tools.table import TOOL_FORMATS
from protocols.request import ChatPrompt, ToolChoice
from tests.backends.output.support import TOOLS, spec


def test_settings_know_every_format() -> None:
    assert set(get_args(ToolFormatName)) == {*(format.name for format in TOOL_FORMATS), "none"}
    assert set(get_args(ReasoningFormatName)) == {*(format.name for format in REASONING_FORMATS), "none"}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name", "deepseek"),
        ("'<｜tool▁call▁begin｜>' + name + '\\n```json\\n'", "deepseek_r1"),
        ("'<|tool_call>call:' + name", "gemma4"),
        ("'<start_function_call>call:'", "function_gemma"),
        ("'[TOOL_CALLS]' + name + '[ARGS]'", "mistral"),
        ("'[TOOL_CALLS]['", "mistral_list"),
        ("<|START_ACTION|>", "cohere"),
        ('<minimax:tool_call>\n<invoke name="', "minimax"),
        ("'<seed:tool_call>\\n<function='", "seed_oss"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ("<tool_call>\n<function=name>\n<parameter=key>", "qwen3_coder"),
        ("<TOOLCALL>", "nemotron"),
        ("respond only with <|tool_call|> followed by", "granite"),
        ("<|tool_call_start|>[", "lfm2"),
        ('<tool_call>\n{"name": <function-name>', "hermes"),
        ('{"name": function name, "parameters": dictionary', "llama3_json"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("{{ messages }}", "generic"),
        ("", "generic"),
    ],
)
def test_detection(template: str, name: str) -> None:
    found = OutputFormats.of(template).tools
    assert found is not None and found.name == name


def test_settings_come_before_what_the_template_shows() -> None:
    formats = OutputFormats.of("<tool_call><think>", "mistral", "seed")
    assert formats.tools is not None and formats.tools.name == "mistral"
    assert formats.reasoning is not None and formats.reasoning.name == "seed"
    assert OutputFormats.of("<tool_call><think>", "none", "none") == OutputFormats(None, None)


def test_an_answer_of_text_alone_has_no_parser() -> None:
    formats = OutputFormats.of("<tool_call>")
    assert parser_for(ChatPrompt(()), formats, "") is None
    assert parser_for(ChatPrompt((), TOOLS, tool_choice=ToolChoice("none")), formats, "") is None
    assert parser_for(ChatPrompt((), TOOLS), formats, "") is not None
    assert parser_for(ChatPrompt(()), OutputFormats.of("<think>"), "") is not None
    assert parser_for(ChatPrompt(()), OutputFormats.of("<|channel|><|message|>"), "") is not None
    assert parser_for(ChatPrompt((), TOOLS), OutputFormats(None, None), "") is None


def test_tokens_that_need_a_text() -> None:
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} == set(spec("hermes", "think").special_tokens)
    assert spec(None, "mistral").special_tokens == ("[THINK]", "[/THINK]")
