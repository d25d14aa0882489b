"""The reader of GBNF, and the matcher that follows a text through it. Neither needs llama.cpp."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.grammar import gbnf_matcher
from backends.grammar.gbnf import parse
from backends.grammar.gbnf_matcher import Matcher, State
from protocols.errors import InvalidRequest

VALUES = r"""
# JSON without the details
root   ::= value
value  ::= "{" (string ":" value ("," string ":" value)*)? "}" | "[" (value ("," value)*)? "]" |
           string | [0-9]+
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\n])* "\""
"""


def read(text: str | bytes, gbnf: str, size: int = 1) -> tuple[Matcher, State | None]:
    """In pieces of `size` bytes, which split characters."""
    data = text.encode() if isinstance(text, str) else text
    matcher = Matcher(parse(gbnf), {})
    state: State | None = matcher.start
    for start in range(0, len(data), size):
        if state is not None:
            state = matcher.advance(state, -1, data[start : start + size])
    return matcher, state


def complete(text: str | bytes, gbnf: str, size: int = 1) -> bool:
    matcher, state = read(text, gbnf, size)
    return state is not None and matcher.complete(state)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_documents(size: int) -> None:
    assert complete('{"é":[1,2,{"🙂\\n":"日本"}],"c":[[[[]]]]}', VALUES, size)
    assert not complete('{"é":[1,2', VALUES, size)
    assert read('{"é":[1,,', VALUES, size)[1] is None
    assert read(b'"\xff"', VALUES, size)[1] is None
    assert read(b'"\xc3(', VALUES, size)[1] is None


@pytest.mark.parametrize(
    ("gbnf", "yes", "no"),
    [
        ('root ::= "a"{2,3} "b"{2} "c"{0} "d"{1,}', ["aabbd", "aaabbddd"], ["abbd", "aabbcd", "aabb"]),
        ('root ::= ("a" | "b" "c"?)+', ["a", "bcba"], ["", "ac"]),
        ("root ::= [^\\n\\]\\-x]*", ["abc", "🙂"], ["]", "-", "x"]),
        ("root ::= [\\x41-\\u0043\\U0001F642-]", ["A", "B", "🙂", "-"], ["D"]),
        ("root ::= .", ["a", "\n", "🙂"], ["", "ab"]),
        ('root ::= ( # a comment\n "a" |\r\n\t"b")\n', ["a", "b"], ["c"]),
        ('root ::= a | b\na ::= "x" a | ""\nb ::= "y"', ["", "xxx", "y"], ["xy"]),
        ('root ::= (("a"?)?)*', ["", "aaa"], ["b"]),
        ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ],
)
def test_syntax(gbnf: str, yes: list[str], no: list[str]) -> None:
    for text in yes:
        assert complete(text, gbnf), text
    for text in no:
        assert not complete(text, gbnf), text


@pytest.mark.parametrize(
    ("gbnf", "message"),
    [
        ("", "no rule 'root'"),
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= foo", "'foo' is used but not defined"),
        ('a_b ::= "c"', "line 1, column 2: expected '::='"),
        ('root ::= "a" )', "unexpected ')'"),
        ('root ::= "a"\n | "b"', "line 2, column 2: expected the name of a rule"),
        ('root ::= ("a"', "expected ')'"),
        ('root ::= "a', "unexpected end"),
        ("root ::= [a", "unexpected end"),
        ("root ::= []", "empty"),
        ("root ::= [z-a]", "backwards"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\x4"', "takes 2 hexadecimal digits"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{}', "expected a number"),
        ('root ::= "a"{1,2', "unexpected end"),
        ('root ::= "a"{5,2}', "at least 5 and at most 2"),
        ('root ::= "a"{2001}', "more than 2000"),
        ('root ::= "a"{99999999999999999999}', "at most 9 digits"),
        ('root ::= "a"{2000}{2}', "multiply"),
        ('root ::= ("a"{0,50}){0,50}', "multiply"),
        ("root ::= " + '"abcdefghij"*' * 15_000, "unfolds"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "nested parentheses"),
        ("root ::= " + '"a"' * 100_000, "bytes"),
        ('root ::= "\0"', "NUL"),
        ('root ::= "\ud800"', "surrogate"),
        ("root ::= <a", "unexpected end"),
        ("root ::= !a", "expected '<'"),
        ('root ::= root "a" | "b"', "'root' is left-recursive"),
        ('root ::= a\na ::= b "x"\nb ::= a | "y"', "left-recursive"),
        ('root ::= a | "x"\na ::= root', "left-recursive"),
        ('root ::= a root "z" | "x"\na ::= b\nb ::= "" | "y"', "left-recursive"),
        ('root ::= n root\nn ::= m\nm ::= ""', "leads to itself"),
        (
            "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} | a{i + 1}\n" for i in range(40)) + 'a40 ::= "a"',
            "ways to begin",
        ),
        ("root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(5000)) + 'a5000 ::= "a"', "deeply nested"),
    ],
)
def test_refused(gbnf: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^Invalid grammar: ") as caught:
        parse(gbnf)
    assert message in caught.value.message
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 200


def test_rules_without_an_end() -> None:
    assert parse('root ::= "a" root').endless == ("root",)
    assert parse('root ::= "a" root | x\nx ::= "b"').endless == ()


def test_ambiguity_is_bounded() -> None:
    """One way to read the text more per character would be fine; twice as many is not."""
    doubling = 'root ::= e\ne ::= " " e x | " " e y | "b"\nx ::= "x"\ny ::= "y"'
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        read(" " * 30, doubling)
    assert complete("a" * 30, 'root ::= "a"* "a"* "a"*')


def test_a_large_matcher_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, state = read("[" * 50 + '{"é":[1', VALUES)
    assert state is not None
    assert matcher.renewed(state) == (matcher, state)
    monkeypatch.setattr(gbnf_matcher, "_MAX_INTERNED", 1)
    renewed, state = matcher.renewed(state)
    assert renewed is not matcher
    end = renewed.advance(state, -1, b"]}" + b"]" * 50)
    assert end is not None
    assert renewed.complete(end)


@settings(max_examples=50, deadline=None)
@given(st.text('root:= "a[]^-\\()|*+?{},0123<>!.#\n', max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for gbnf in (text, f'root ::= {text}\na ::= "a"', f'root ::= "a" {text}'):
        try:
            rules = parse(gbnf)
        except InvalidRequest:
            continue
        Matcher(rules, {token.token: 1 for token in rules.tokens if isinstance(token.token, str)})
