"""What one rendering may cost: steps of work, and the size of any value that a template makes.

A step is about a microsecond: one turn of a loop, one call, one element of a list, or 64 characters of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

CHARS_PER_STEP = 64
MAX_WEIGHT = 1_000_000
"""Of one value, in steps. Text alone may have `MAX_CHARS`."""
MAX_CHARS = 16 * 1024 * 1024
BASE_STEPS = 2_000_000
_STEPS_PER_WEIGHT = 1_000
"""Some templates look back at all messages from each; they then take a hundred steps or so for every pair."""


class TooExpensive(ValueError):
    """The template does more than any real one needs to."""


class Budget:
    def __init__(self, *inputs: object, steps: int = BASE_STEPS) -> None:
        """`inputs` are what the template is given: long conversations may take longer."""
        self._left = steps + _STEPS_PER_WEIGHT * sum(map(_weight, inputs))

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooExpensive("it runs for too long")

    def measured(self, value: Any) -> Any:
        """`value`, once it is paid for. One that is computed on demand is paid for item by item."""
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return self._counted(value)
        self.spend(1 if value is None or isinstance(value, bool | int | float) else _weight(value))
        return value

    def iterated(self, value: Any) -> Any:
        """For a loop, which may skip items without a step of its own."""
        if isinstance(value, Iterator) and not isinstance(value, LoopContext):
            return self._counted(value)
        if isinstance(value, Sized):
            self.spend(len(value))
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item


def check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TooExpensive(f"it makes a text of more than {MAX_CHARS} characters")


def _weight(value: object) -> int:
    """Every element counts as often as it is met: a list that holds another one twice is printed with both."""
    weight = 0
    todo: list[object] = [value]
    while todo:
        item = todo.pop()
        weight += 1
        if isinstance(item, str):
            check_chars(len(item))
            weight += len(item) // CHARS_PER_STEP
        elif isinstance(item, range):
            weight += len(item)
        elif isinstance(item, Namespace):
            todo.append(item._Namespace__attrs)  # printed with all that is in it
        elif isinstance(item, Mapping):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, Iterable) and not isinstance(item, Iterator | Undefined):
            todo += item
        if weight + len(todo) > MAX_WEIGHT:
            raise TooExpensive("it makes a value that is too large")
    return weight
