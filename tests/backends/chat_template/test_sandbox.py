"""What a template that came from anywhere may do, and what it may not."""

from __future__ import annotations

from datetime import datetime

import pytest

from backends.chat_template import ChatTemplate
from backends.chat_template.budget import Budget, TooExpensive
from backends.chat_template.sandbox import FAILURES, Sandbox
from protocols.errors import InvalidRequest
from protocols.request import ChatPrompt, Message, TextPart

NOW = datetime(2026, 2, 3)
HELLO = ChatPrompt((Message("user", (TextPart("Hello"),)),))


def run(source: str, **variables: object) -> str:
    sandbox = Sandbox()
    return sandbox.run(sandbox.compiled(source), variables, NOW, max_chars=100_000, steps=200_000)


def test_whitespace_and_loop_controls_as_in_transformers() -> None:
    source = """
    {%- for m in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{{ m }}
    {% endfor %}
end"""
    assert run(source, messages=["Hello", "Hello"]) == "Hello\nend"


def test_training_marks_are_transparent() -> None:
    assert run("{% generation %}{{ x }}{% endgeneration %}", x="Hello") == "Hello"


def test_tojson_does_not_escape() -> None:
    assert run("{{ x | tojson }}", x="a < b & 'c' ü") == "\"a < b & 'c' ü\""
    assert run("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{{ [3, 1, 2] | sort | join(', ') }}", "1, 2, 3"),
        ("{{ '%s-%05.1f' % ('a', 2) }}{{ ' {:>3}'.format(1) }}{{ ' %d' | format(5) }}", "a-002.0   1 5"),
        ("{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'equalto', 2) | map(attribute='a') | list }}", "[2]"),
        ("{{ [1, 2] | sum }}{{ 'abc'[1:] }}{{ 'b' in 'abc' }}{{ (1, 2) == (1, 2) }}", "3bcTrueTrue"),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}!{% endcall %}", "<1!>"),
        ("{% for x in t recursive %}{{ x.n }}{{ loop(x.t) }}{% endfor %}", "123"),
        ("{% set l = [] %}{% set _ = l.append(1) %}{{ l }}{{ l.pop(0) }}", "[1]1"),
        (
            "{{ 'aXb'.split('X') | last }}{{ ' x '.strip() }}{{ 'x'.replace('x', 'y') }}{{ '-'.join(['a', 'b']) }}",
            "bxya-b",
        ),
        ("{{ x is defined }}{{ x is none }}{{ 'a' is string }}", "FalseFalseTrue"),
        ("{{ ['a', 'b'] | map('upper') | join }}", "AB"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
    ],
)
def test_what_real_templates_do(source: str, text: str) -> None:
    tree = [{"n": 1, "t": [{"n": 2, "t": []}]}, {"n": 3, "t": []}]
    assert run(source, t=tree) == text


BIG = "{% set x = 'x' * 1000000 %}"

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ x.clear() }}",
    "{{ x.update({'a': 2}) }}",
    "{% include 'secrets' %}",
    "{% extends 'secrets' %}",
    "{% import 'secrets' as s %}",
    "{{ lipsum() }}",
    "{{ self.__init__.__globals__.os }}",
]
TIME = [
    "{% for i in range(10000000) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{% set _ = f(n - 1) ~ f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(100000) %}{% set _ = range(100000) | select | list %}{% endfor %}",
    BIG + "{% for i in range(100000) %}{% set _ = 'y' in x %}{% endfor %}",
    BIG + "{% for i in range(100000) %}{% set _ = x.count('y') %}{% endfor %}",
    BIG + "{% for i in range(100000) %}{% set _ = x | upper | length %}{% endfor %}",
    BIG + "{% for i in range(100000) %}{% set _ = x[1:] | length %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 9 ** (9 ** 9) if true }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
]
MEMORY = [
    "{% for i in range(100000) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 1000000000 * 'x' }}",
    "{{ [1] * 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x' | center(width=1000000000) }}",
    "{{ 'x\n' | indent(1000000000) }}",
    "{{ 1 | tojson(indent=1000000000) }}",
    "{{ [] | slice(1000000000) | list }}",
    "{{ strftime_now('%1000000000d') }}",
    BIG + "{{ x.replace('x', x) }}",
    BIG + "{{ x | replace('x', x) }}",
    BIG + "{{ ([x] * 10000) | join }}",
    BIG + "{{ ''.join([x] * 10000) }}",
    BIG + "{{ x.join(['a'] * 10000) }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x | string }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
    "{% set x %}{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}{% endset %}{{ x | length }}",
    "{{ [[1] * 1000] * 1000 | sum(start=[]) }}",
]


@pytest.mark.parametrize("source", [*ESCAPES, *TIME, *MEMORY])
def test_what_no_template_may_do(source: str) -> None:
    with pytest.raises(FAILURES):
        run(source, x={"a": 1})


def test_an_attribute_that_is_not_there_is_nothing() -> None:
    assert run("{{ x._private }}{{ x.__class__ is defined }}", x="a") == "False"


def test_long_conversations_may_take_longer() -> None:
    with pytest.raises(TooExpensive):
        Budget(["short"], steps=1_000).spend(1_000_000)
    Budget([{"content": "x"}] * 2_000, steps=1_000).spend(1_000_000)


def test_the_budget_is_one_rendering_s() -> None:
    sandbox = Sandbox()
    template = sandbox.compiled("{% for i in range(30000) %}{% endfor %}done")
    for _ in range(10):
        assert sandbox.run(template, {}, NOW, steps=200_000) == "done"


@pytest.mark.parametrize("source", ["\n{% if %}", "\n{{ 1 | nofilter }}"])
def test_a_broken_template_is_one_line(source: str) -> None:
    with pytest.raises(ValueError, match="line 2") as caught:
        Sandbox().compiled(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{% for i in x %}" * 40 + "{% endfor %}" * 40, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * 2**21],
)
def test_a_template_that_cannot_be_compiled_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        Sandbox().compiled(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Conversation roles must alternate') }}",
        "{{ messages[7].content.text }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_failing_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        ChatTemplate(source, clock=lambda: NOW).render(HELLO)
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate"):
        ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}", clock=lambda: NOW).render(HELLO)
