"""How a format of tool calls is read: a generator that is sent one character after the other.

That makes a parser plain code from top to bottom, and where pieces of text begin cannot make a difference. Functions
that have to read one character too many return it; those that know their own end return nothing, or an empty string.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from backends.output.stops import StopMatcher

T = TypeVar("T")
Reading = Generator[None, str, T]


class NotACall(Exception):
    """The text is not what the format writes. What has been read since the last output becomes text."""


def skip_space(char: str = "") -> Reading[str]:
    """The first character that is no white space, from `char` on if it is given."""
    if not char:
        char = yield
    while char.isspace():
        char = yield
    return char


def choose(literals: tuple[str, ...], char: str = "") -> Reading[str]:
    """Which of `literals` comes next. None of them may be the beginning of another."""
    if not char:
        char = yield
    text = char
    while text not in literals:
        if not any(literal.startswith(text) for literal in literals):
            raise NotACall
        text += yield
    return text


def expect(literal: str, char: str = "") -> Reading[None]:
    yield from choose((literal,), char)


def until(stops: tuple[str, ...], char: str = "") -> Reading[tuple[str, str]]:
    """The text up to the first of `stops`, and which one it was. For what is short, as names are."""
    matcher = StopMatcher(stops)
    text = matcher.feed(char)
    while matcher.matched is None:
        text += matcher.feed((yield))
    return text, matcher.matched
