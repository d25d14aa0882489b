"""The overlays as Kustomize renders them, and the validator of manifests where there is one."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
SECRETS = K8S / "base" / "secret.example.yaml"

Document = dict[str, Any]


def kustomize(folder: Path) -> list[Document]:
    """What `kubectl apply -k` would send. Skips where kubectl is not there, or is older than components."""
    return deepcopy(_rendered(folder))


@cache
def _rendered(folder: Path) -> list[Document]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which renders the overlays, is not on the path")
    version = json.loads(_kubectl("version", "--client", "--output=json"))["kustomizeVersion"]
    if int(version.removeprefix("v").split(".")[0]) < 5:
        pytest.skip(f"kubectl has kustomize {version}; components need 5.0")
    return [document for document in yaml.safe_load_all(_kubectl("kustomize", str(folder))) if document]


def _kubectl(*arguments: str) -> str:
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def overlay(name: str) -> list[Document]:
    return kustomize(K8S / "overlays" / name)


def only(documents: list[Document], kind: str, name: str | None = None) -> Document:
    found = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def with_component(name: str, component: str, folder: Path) -> list[Document]:
    """An overlay with one more component, in a copy of `k8s/`: Kustomize takes no files from outside its folder."""
    copy = folder / "k8s"
    shutil.copytree(K8S, copy)
    kustomization = copy / "overlays" / name / "kustomization.yaml"
    data = yaml.safe_load(kustomization.read_text())
    data["components"].insert(0, f"../../components/{component}")
    kustomization.write_text(yaml.safe_dump(data))
    return kustomize(kustomization.parent)


@cache
def example_secrets() -> dict[str, set[str]]:
    """The keys of each Secret that has to exist."""
    with SECRETS.open() as file:
        return {secret["metadata"]["name"]: set(secret["stringData"]) for secret in yaml.safe_load_all(file)}


def schema_faults(documents: list[Document]) -> list[str]:
    """By the CRDs of KubeRay and the Prometheus operator and the core schemas, all closed to unknown fields.

    Both are data that lies beside the repository. Skips where they, or kubernetes-validate, are not there.
    """
    tool, data = _validator()
    with SECRETS.open() as file:
        text = yaml.safe_dump_all([*documents, *yaml.safe_load_all(file)])
    problems = tool.check_text(text, data, "1.34", set(tool.DEFAULT_GATES), mark="")
    # The Gateway API's schemas are not among the data.
    return [p for p in problems if not p.startswith("NOTE") and "no schema for gateway.networking.k8s.io/v1" not in p]


@cache
def _validator() -> tuple[Any, Any]:
    shared = ROOT.parent / "shared"
    path = shared / "tools" / "validate_k8s.py"
    if not path.exists():
        pytest.skip("the validator and the CRDs are not beside the repository")
    pytest.importorskip("jsonschema", reason="make test-k8s installs it")
    pytest.importorskip("kubernetes_validate", reason="make test-k8s installs it")
    spec = importlib.util.spec_from_file_location("validate_k8s", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules["validate_k8s"] = tool
    spec.loader.exec_module(tool)
    return tool, tool.CRDs([shared / "data" / "k8s-schemas"])
