"""Regular expressions, and the search for triggers with them."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.grammar import regex_syntax
from backends.grammar.regex_syntax import RegexError
from backends.grammar.triggers import MAX_TRIGGERS, Trigger, Watch
from protocols.errors import InvalidRequest


def found(trigger: Trigger, text: str, size: int = 1000) -> tuple[int, int] | None:
    """Where the grammar's text begins, and after how many bytes that is known; fed in pieces of `size`."""
    watch = Watch.of([trigger])
    data = text.encode()
    for at in range(0, len(data), size):
        watch, start = watch.feed(data[at : at + size])
        if start is not None:
            return start, min(at + size, len(data))
    return None


def test_words_are_not_patterns() -> None:
    assert found(Trigger("word", "<a.b>(|"), "é x<aXb>(| <a.b>(| y", 1) == (12, 19)
    assert found(Trigger("word", "<a.b>"), "<a.b") is None
    assert found(Trigger("word", "日本"), "a日" + "日本", 1) == (4, 10)


def test_patterns_begin_at_their_first_group() -> None:
    assert found(Trigger("pattern", "b+(c)"), "abbc") == (3, 4)
    assert found(Trigger("pattern", "(x)?b(c)?"), "abc") == (2, 3)
    assert found(Trigger("pattern", "(x)?b"), "ab", 1) == (1, 2)
    assert found(Trigger("pattern", "^b"), "ab") is None
    assert found(Trigger("pattern", r"\bb\b"), "ab b") == (3, 4)


def test_full_patterns_match_all_of_the_text() -> None:
    trigger = Trigger("pattern_full", r"a|think[\s\S]*end\s*(\{)")
    assert found(trigger, "think é end {", 1) == (13, 14)
    assert found(trigger, "x think end {", 1) is None
    assert found(trigger, "think end {}", 1000) is None


def test_long_texts_take_their_time_once() -> None:
    """C++'s std::regex overflows the stack here."""
    watch = Watch.of([Trigger("pattern_full", r"[\s\S]*?(<tool>[\s\S]*)"), Trigger("pattern", "(a+)+b")])
    started = time.process_time()
    watch, start = watch.feed(b"a" * 30_000)
    assert start is None
    assert watch.feed(b"<tool>")[1] == 30_000
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "[", "]", "{", "}", "a{", "a{x}", "a{2,1}", "a{9999}", "*", "a**", "a+?+", "^*", "\\", "[z-a]"),
        *("[]", "[^]", r"[^\s\S]", r"[a-\d]", "[[:alpha:]]", r"\1", r"\01", r"\p{L}", r"\k", r"\x1", r"\u12", r"\c1"),
        *("(?=a)", "(?!a)", "(?<=a)", "(?<n>a)", "(?i)a", "(?", "(a{1000}){1000}", "(" * 99 + ")" * 99, "a" * 9999),
    ],
)
def test_refused_patterns(pattern: str) -> None:
    with pytest.raises(RegexError):
        regex_syntax.parse(pattern)
    with pytest.raises(InvalidRequest, match="Invalid grammar trigger pattern") as caught:
        Trigger("pattern", pattern).compiled()
    assert caught.value.param == "grammar_triggers"


def test_native_triggers() -> None:
    assert Trigger.of_native(1, "a") == Trigger("word", "a")
    assert Trigger.of_native(2, "a") == Trigger("pattern", "a")
    assert Trigger.of_native(3, "a") == Trigger("pattern_full", "a")
    for kind in (0, 4, -1):
        with pytest.raises(InvalidRequest, match="Unknown grammar trigger type"):
            Trigger.of_native(kind, "a")
    with pytest.raises(InvalidRequest, match="More than"):
        Watch.of([Trigger("word", "a")] * (MAX_TRIGGERS + 1))


ATOMS = st.sampled_from(["a", "b", "é", ".", "[ab]", "[^a]", r"\d", r"\W", r"\b", r"\x61", r"\."])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("({})".format, inner),
        st.builds(
            "{}{}".format, ATOMS.filter(lambda atom: atom != r"\b"), st.sampled_from(["*", "+", "?", "{1,2}", "*?"])
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(PATTERNS, st.text("abé1 .", max_size=8))
def test_like_backtracking(pattern: str, text: str) -> None:
    match = re.search(pattern, text, re.ASCII)
    expected = None
    if match is not None:
        start = next((match.start(i) for i in range(1, match.re.groups + 1) if match[i]), match.start())
        expected = len(text[:start].encode())
    _, start_found = Watch.of([Trigger("pattern", pattern)]).feed(text.encode())
    assert start_found == expected
