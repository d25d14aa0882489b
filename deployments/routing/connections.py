"""Which replicas are worth an open connection, where there are more of them than connections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

T = TypeVar("T")

INCUMBENT: Final = 1.5
"""A replica without a connection has to be used so many times as much to take another one's place."""


def most_used(wanted: Collection[T], connected: Collection[T], uses: Mapping[T, float], limit: int) -> set[T]:
    """`limit` of `wanted`, those with the most `uses` lately; the connected ones count more, and win a draw."""
    if len(wanted) <= limit:
        return set(wanted)

    def worth(item: T) -> tuple[float, bool]:
        held = item in connected
        return uses.get(item, 0.0) * (INCUMBENT if held else 1.0), held

    return set(sorted(wanted, key=worth, reverse=True)[:limit])
