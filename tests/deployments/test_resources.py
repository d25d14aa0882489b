"""What of the cluster a vLLM model's replicas take, and configs that cannot work, refused before anything starts."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from backends.fake import FakeSettings
from backends.vllm.settings import VllmSettings
from deployments import config
from deployments.cli import main
from deployments.resources import replica_options
from tests.deployments.test_config import CONFIGS

CONFIG: dict[str, Any] = {
    "http_options": {"host": "127.0.0.1", "port": 8123},
    "applications": [
        {"name": "gateway", "route_prefix": "/", "import_path": config.GATEWAY_IMPORT, "args": {}},
        {
            "name": "large",
            "route_prefix": None,
            "import_path": config.MODEL_IMPORT,
            "args": {"backend": {"kind": "vllm", "model": "some/model"}},
        },
    ],
}


def checked(tmp_path: Path, backend: dict[str, Any], deployment: dict[str, Any] | None = None) -> tuple[int, str]:
    raw = deepcopy(CONFIG)
    app = raw["applications"][1]
    app["args"]["backend"] |= backend
    if deployment is not None:
        app["deployments"] = [{"name": "Model", **deployment}]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    result = CliRunner().invoke(main, ["check", str(path)])
    return result.exit_code, result.output


def options(**backend: Any) -> dict[str, Any]:
    chosen = replica_options(VllmSettings(model="m", **backend))
    chosen["ray_actor_options"].pop("runtime_env")
    return chosen


def test_every_shipped_config_passes() -> None:
    for path in CONFIGS:
        result = CliRunner().invoke(main, ["check", str(path)])
        assert result.exit_code == 0, result.output


def test_one_gpu() -> None:
    assert options() == {"ray_actor_options": {"num_cpus": 1, "num_gpus": 1}}


def test_all_gpus_of_a_node_belong_to_the_replica() -> None:
    assert options(tensor_parallel=4, accelerator_type="H200") == {
        "ray_actor_options": {"num_cpus": 4, "num_gpus": 4, "accelerator_type": "H200"}
    }


def test_gpus_of_several_nodes_are_a_placement_group() -> None:
    chosen = options(tensor_parallel=2, pipeline_parallel=2, across_nodes=True)
    assert chosen == {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [{"CPU": 2, "GPU": 1}, *[{"CPU": 1, "GPU": 1}] * 3],
        "placement_group_strategy": "PACK",
    }


def test_a_cpu_has_no_gpu() -> None:
    assert options(device="cpu", cpus=2) == {"ray_actor_options": {"num_cpus": 2}}


def test_other_engines_need_nothing_special() -> None:
    assert replica_options(FakeSettings()) == {}


@pytest.mark.parametrize(
    ("backend", "deployment", "said"),
    [
        ({"tensor_parallel": 4}, {"ray_actor_options": {"num_gpus": 1}}, "num_gpus: 1, but tensor_parallel 4 by"),
        ({"device": "cpu"}, {"ray_actor_options": {"num_gpus": 1}}, "num_gpus: 1, but device cpu needs 0"),
        (
            {},
            {"ray_actor_options": {"num_cpus": 8}},
            "has no num_gpus: tensor_parallel 1 by pipeline_parallel 1 needs 1",
        ),
        (
            {},
            {"placement_group_bundles": [{"GPU": 1, "CPU": 1}]},
            "only a model with across_nodes has a placement group",
        ),
        (
            {"tensor_parallel": 4, "across_nodes": True},
            {"placement_group_bundles": [{"CPU": 1, "GPU": 2}] * 2},
            "needs 4 bundles, each with 1 GPU, and these have 2, 2",
        ),
        ({"across_nodes": True}, None, "across_nodes needs more than one GPU"),
        (
            {"device": "cpu", "accelerator_type": "H200"},
            None,
            "accelerator_type 'H200' is a GPU, and the device is cpu",
        ),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, None, "gpu_memory_utilization means nothing on device cpu"),
        ({"device": "cpu", "pipeline_parallel": 2}, None, "pipeline_parallel needs device gpu"),
        ({"device": "cpu", "quantization": "fp8"}, None, "quantization 'fp8' needs device gpu"),
        ({"kv_cache_mib": 64, "gpu_memory_utilization": 0.5}, None, "say the same in two ways"),
        ({"slots": 64, "batch_size": 32}, None, "no room for one token of each of 64 slots"),
        ({"task": "embed", "adapters": [{"path": "a"}]}, None, "adapters need a model that generates"),
        ({"task": "rerank", "tool_format": "hermes"}, None, "need a model that generates, and the task is rerank"),
        ({"adapters": [{"path": "a"}, {"path": "b"}]}, None, "at most one can have scale 1"),
        ({"adapters": [{"path": "a", "scale": 0.5}]}, None, "adapters[0].scale"),
        ({"tensor_paralel": 4}, None, "unknown key, did you mean 'tensor_parallel'?"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, backend: dict[str, Any], deployment: dict[str, Any] | None, said: str
) -> None:
    code, output = checked(tmp_path, backend, deployment)
    assert code == 2
    assert said in output


LLAMA = {"num_attention_heads": 32, "num_hidden_layers": 16, "max_position_embeddings": 4096}
STRETCHED = LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}


@pytest.mark.parametrize(
    ("checkpoint", "backend", "said"),
    [
        (LLAMA, {"tensor_parallel": 3}, "backend.tensor_parallel: 3 does not divide the model's 32 attention heads"),
        ({"text_config": LLAMA}, {"tensor_parallel": 5}, "backend.tensor_parallel: 5 does not divide the model's 32"),
        (LLAMA, {"pipeline_parallel": 17}, "backend.pipeline_parallel: 17 groups, and the model has 16 layers"),
        (LLAMA, {"context_length": 8192}, "backend.context_length: 8192, and the model knows 4096 positions"),
        ({"num_attention_heads": "many"}, {}, "config.json: Expected `int | null`, got `str`"),
        (None, {}, "is a folder without a checkpoint: there is no config.json in it"),
        (
            LLAMA,
            {"adapters": [{"path": "ADAPTER"}]},
            "adapters[0].path: its rank is 64, and max_lora_rank is 16",
        ),
    ],
)
def test_what_a_checkpoint_cannot_do_is_refused(
    tmp_path: Path, checkpoint: dict[str, Any] | None, backend: dict[str, Any], said: str
) -> None:
    code, output = checked(tmp_path, _on_disk(tmp_path, checkpoint, backend))
    assert code == 2
    assert said in output


@pytest.mark.parametrize(
    ("checkpoint", "backend"),
    [
        (LLAMA, {"tensor_parallel": 4, "pipeline_parallel": 2, "context_length": 4096}),
        (STRETCHED, {"context_length": 16384}),
        ({}, {"tensor_parallel": 3}),
        (LLAMA, {"adapters": [{"path": "ADAPTER"}], "max_lora_rank": 64}),
    ],
)
def test_what_a_checkpoint_can_do_passes(tmp_path: Path, checkpoint: dict[str, Any], backend: dict[str, Any]) -> None:
    code, output = checked(tmp_path, _on_disk(tmp_path, checkpoint, backend))
    assert code == 0, output


def _on_disk(tmp_path: Path, checkpoint: dict[str, Any] | None, backend: dict[str, Any]) -> dict[str, Any]:
    """`backend` with a model, and an adapter of rank 64 where it has one."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    if checkpoint is not None:
        (model / "config.json").write_text(json.dumps(checkpoint))
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 64}))
    adapters = {"adapters": [{"path": str(adapter)}]} if "adapters" in backend else {}
    return backend | adapters | {"model": str(model)}


def test_a_deployment_may_repeat_what_follows(tmp_path: Path) -> None:
    code, output = checked(tmp_path, {"tensor_parallel": 4}, {"ray_actor_options": {"num_gpus": 4, "num_cpus": 8}})
    assert code == 0, output
