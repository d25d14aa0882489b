"""The step channel is tested on the standard loop and on uvloop, whose transports differ; the rest on the former."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from deployments.channel import ChannelHub

Factory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Factory]:
    standard: dict[str, Factory] = {"asyncio": asyncio.new_event_loop}
    return standard | {"uvloop": uvloop.new_event_loop} if item.path.name == "test_channel.py" else standard


@pytest.fixture
async def hub() -> AsyncIterator[ChannelHub]:
    hub = ChannelHub(1000)
    yield hub
    await hub.aclose()
