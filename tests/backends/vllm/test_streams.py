"""Several streams as one: nothing is lost, an error ends all, and all are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from backends.vllm.streams import merged


class Streams:
    """Streams that count from 0, and remember which of them were closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def counting(self, name: str, count: int, error: Exception | None = None) -> AsyncGenerator[str, None]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield f"{name}{number}"
            if error is not None:
                raise error
        finally:
            self.closed.append(name)


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
async def test_every_item_comes_in_its_streams_order(names: str) -> None:
    streams = Streams()
    got = [item async for item in merged([streams.counting(name, 3) for name in names])]
    for name in names:
        assert [item for item in got if item[0] == name] == [f"{name}{number}" for number in range(3)]
    assert sorted(streams.closed) == list(names)


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_an_error_ends_all(names: str) -> None:
    streams = Streams()
    made = [streams.counting(name, 1 if name == "a" else 1000, ValueError(name)) for name in names]
    with pytest.raises(ValueError, match="a"):
        async for _ in merged(made):
            pass
    assert sorted(streams.closed) == list(names)


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_whoever_leaves_closes_all(names: str) -> None:
    streams = Streams()
    stream = merged([streams.counting(name, 1000) for name in names])
    await anext(stream)
    await stream.aclose()
    assert "a" in streams.closed
    assert all(task is asyncio.current_task() for task in asyncio.all_tasks())
