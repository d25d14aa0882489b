"""LoRA adapters: chosen by a request, one at most, and nothing computed with one is taken for another."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from backends.base import BackendStartError
from backends.vllm.settings import VllmSettings
from protocols.errors import InvalidRequest
from protocols.request import LoraScale
from tests.backends.contract import answer
from tests.backends.vllm.conftest import cpu_settings, greedy

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = pytest.mark.vllm

RANK = 8


def write_adapter(checkpoint: Path, folder: Path, seed: int) -> Path:
    """Random changes of every layer's queries, as PEFT writes them; large enough to change an answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((checkpoint / "config.json").read_text())
    torch.manual_seed(seed)
    size, heads = config["hidden_size"], config["num_attention_heads"]
    out = heads * config.get("head_dim", size // heads)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, size) * 0.2
        weights[f"{name}.lora_B.weight"] = torch.randn(out, RANK) * 0.2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(peft | {"base_model_name_or_path": str(checkpoint)}))
    return folder


async def test_adapters(checkpoint: Path, tmp_path: Path) -> None:
    from backends.vllm.backend import VllmBackend

    folders = [write_adapter(checkpoint, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    adapters = [{"path": str(folder), "scale": 0} for folder in folders]
    backend = VllmBackend(cpu_settings(adapters=adapters, max_lora_rank=RANK))
    await backend.start()
    try:
        request = greedy("Tell me a long story about a fox and a hen, please, and leave nothing out of it.", 12)
        plain = await answer(backend, request)
        with_one, with_other = [
            await answer(backend, msgspec.structs.replace(request, lora=(LoraScale(id, 1.0),))) for id in (0, 1)
        ]
        assert len({plain.tokens, with_one.tokens, with_other.tokens}) == 3
        assert with_one.completion.usage.cached_tokens == 0, "cached without the adapter, so of no use with it"
        again = await answer(backend, msgspec.structs.replace(request, lora=(LoraScale(0, 1.0),)))
        assert again.completion.usage.cached_tokens > 0
        await backend.set_adapters([LoraScale(1, 1.0)])
        assert [adapter.scale for adapter in backend.adapters()] == [0.0, 1.0]
        named = msgspec.structs.replace(request, lora=(LoraScale(1, 1.0),))
        first, second = [(await answer(backend, given)).tokens for given in (named, request)]  # both find it cached
        assert first == second
        for lora in ((LoraScale(0, 0.5),), (LoraScale(0, 1.0), LoraScale(1, 1.0)), (LoraScale(7, 1.0),)):
            with pytest.raises(InvalidRequest) as refusal:
                await answer(backend, msgspec.structs.replace(request, lora=lora))
            assert refusal.value.param == "lora"
    finally:
        await backend.aclose()


async def test_a_device_that_is_none() -> None:
    from backends.vllm.backend import VllmBackend

    with pytest.raises(BackendStartError, match="computes on the CPU, and the device is gpu"):
        await VllmBackend(VllmSettings(model="/nowhere")).start()


async def test_a_model_that_is_none() -> None:
    from backends.vllm.backend import VllmBackend

    with pytest.raises(BackendStartError, match="/nowhere") as failure:
        await VllmBackend(cpu_settings(model="/nowhere")).start()
    assert "\n" not in str(failure.value)


async def test_an_adapter_that_is_none() -> None:
    from backends.vllm.backend import VllmBackend

    with pytest.raises(BackendStartError, match="adapter_config.json"):
        await VllmBackend(cpu_settings(adapters=[{"path": "/nowhere"}])).start()
