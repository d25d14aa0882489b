"""Where conversations go, on a real Ray: three replicas that keep prompts in their slots, behind two gateways."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import Deployed, app, deployed, fake_app, wait_for

pytestmark = pytest.mark.cluster

CONVERSATIONS = 6
TURNS = 5


def applications() -> list[dict[str, Any]]:
    gateway = app("gateway", "gateway", {"catalog_poll_s": 0.5}, [{"name": "Gateway", "num_replicas": 2}])
    chat = fake_app("chat", slots=8, prefix_cache=True, inter_token_s=0.005)
    chat["deployments"][0] |= {"autoscaling_config": None, "num_replicas": 3}
    return [gateway, chat]


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    with deployed(applications()) as running:
        slots = f"{running.url}/slots?model=chat"
        wait_for(lambda: len(_all_slots(slots)) == 3 * 8, "the gateways know the replicas")
        yield running


def _all_slots(url: str) -> list[Any]:
    answer = httpx.get(url)
    return list(answer.json()) if answer.status_code == 200 else []


class Conversation:
    def __init__(self, client: openai.OpenAI, name: str) -> None:
        self._client = client
        self._messages: list[Any] = [{"role": "user", "content": f"{name} speaks of " + f"{name} " * 300}]
        self._before = 0
        self.possible = self.found = 0

    def turn(self, max_tokens: int = 5) -> None:
        answer = self._client.chat.completions.create(
            model="chat", messages=self._messages, max_tokens=max_tokens, timeout=60
        )
        assert answer.usage is not None and answer.usage.completion_tokens == max_tokens
        details = answer.usage.prompt_tokens_details
        self.possible += self._before
        self.found += (details.cached_tokens or 0) if details is not None else 0
        self._before = answer.usage.prompt_tokens
        self._messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        self._messages.append({"role": "user", "content": "and more " * 20})


@pytest.fixture
def conversations(system: Deployed) -> Iterator[list[Conversation]]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        yield [Conversation(client, f"user{i}") for i in range(CONVERSATIONS)]


def take_turns(conversations: list[Conversation], turns: int, **options: Any) -> None:
    """Side by side, so that the load balances too."""
    with ThreadPoolExecutor(len(conversations)) as pool:
        for _ in range(turns):
            list(pool.map(lambda conversation: conversation.turn(**options), conversations))


def share_found(conversations: list[Conversation]) -> float:
    """Of the tokens of each conversation's last prompt. Any replica at random would have about a third."""
    found = sum(c.found for c in conversations) / sum(c.possible for c in conversations)
    for conversation in conversations:
        conversation.found = conversation.possible = 0
    return found


def test_the_turns_of_a_conversation_land_on_one_replica(conversations: list[Conversation]) -> None:
    take_turns(conversations, TURNS)
    # Not all: a question that is late on a busy machine is done without.
    assert share_found(conversations) > 0.8


def test_conversations_of_a_replica_that_is_killed_go_on_elsewhere(
    system: Deployed, conversations: list[Conversation]
) -> None:
    from deployments import cluster

    take_turns(conversations, 2)
    before = cluster.replica_pids()["chat"]
    assert len(before) == 3
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(take_turns, conversations, 1, max_tokens=200)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        running.result()
    take_turns(conversations, 1)
    share_found(conversations)
    take_turns(conversations, TURNS)
    assert share_found(conversations) > 0.8
