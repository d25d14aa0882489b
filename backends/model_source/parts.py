"""Models in several files, named as llama.cpp's splitter names them."""

from __future__ import annotations

import re
from pathlib import Path

from backends.base import BackendStartError

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str, what: str) -> list[str]:
    """The names of all files of the model whose first is `name`, which may have folders before it."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    if match["number"] != "00001":
        raise BackendStartError(f"{what}: name its first part, {match['stem']}-00001-of-{match['count']}.gguf")
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def part_paths(first: Path, what: str = "model") -> list[Path]:
    return [first.with_name(name) for name in part_names(first.name, what)]
