"""JSON calls between tags: one object in each pair, or a list of them."""

from __future__ import annotations

from collections.abc import Callable

from backends.output.reading import NotACall, Reading, expect, skip_space
from backends.output.tools.json_calls import json_calls
from backends.output.writer import Writer


def tagged_json(end: str) -> Callable[[Writer, str], Reading[str]]:
    """A parser of what stands behind the opening tag. A missing `end` is forgiven."""

    def read(out: Writer, marker: str) -> Reading[str]:
        char = yield from skip_space()
        if char not in "{[":
            raise NotACall
        while True:
            if char in "{[":
                yield from json_calls(out, char)
            elif end and char == end[0]:
                yield from expect(end, char)
                return ""
            elif char not in ",;":
                return char
            char = yield from skip_space()

    return read
