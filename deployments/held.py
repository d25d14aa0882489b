"""What a process holds for the requests it has. Without any, it holds what it held before them: a leak is seen here."""

from __future__ import annotations

import asyncio
import os

import msgspec


class Held(msgspec.Struct, frozen=True):
    """`tasks` are those of the event loop that serves requests; `streams` are generations."""

    pid: int
    tasks: int
    streams: int


def held(streams: int) -> Held:
    """Called on the event loop it tells of."""
    return Held(os.getpid(), len(asyncio.all_tasks()), streams)
