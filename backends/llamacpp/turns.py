"""Whose step it is, where requests with different LoRA adapters run."""

from __future__ import annotations

from collections.abc import Iterable

from backends.adapters import AdapterSet


class Turns:
    """llama.cpp applies adapters to a whole context, so a step computes tasks of one set only. Sets take turns.

    A turn is one step: everybody's tokens come at an even pace, and no set waits longer than one step of each other
    one. Changing adapters makes llama.cpp plan its computation anew, which took 2 to 4 ms in steps of 14 (SmolLM2,
    2 threads, one sequence). With one set there is nothing to change.
    """

    def __init__(self) -> None:
        self._order: list[AdapterSet] = []

    def next(self, present: Iterable[AdapterSet]) -> AdapterSet | None:
        """The set among `present` that has waited longest for its turn; newcomers queue behind. None if none is."""
        sets = dict.fromkeys(present)
        known = [adapters for adapters in self._order if adapters in sets]
        self._order = [*known, *(adapters for adapters in sets if adapters not in known)]
        if not self._order:
            return None
        first = self._order.pop(0)
        self._order.append(first)
        return first
