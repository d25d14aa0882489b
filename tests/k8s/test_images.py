"""The images' files: linted, pinned alike, and their steps run in a clean folder. No Docker engine is needed."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import ray_compat
from tests.k8s.render import K8S, OVERLAYS, ROOT

DOCKER = ROOT / "docker"


def pins(path: Path) -> dict[str, str]:
    """Exact versions by normalised name; extras are left out."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return {
        _normal(name.partition("[")[0]): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tool(name: str) -> str:
    """The path of a program of the extra `k8s`; skips where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not here: make test-k8s installs it")
    return found


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_an_image_is_linted(name: str) -> None:
    done = subprocess.run([tool("hadolint"), str(DOCKER / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_both_images_have_the_same_python_and_the_products_ray() -> None:
    bases = {
        re.findall(r"^ARG PYTHON=(.+)$", (DOCKER / f"Dockerfile.{k}").read_text(), re.M)[0] for k in ("cpu", "gpu")
    }
    assert len(bases) == 1 and re.fullmatch(r"python:3\.1[1-3]\.\d+-slim-\w+", bases.pop())
    for name in ("requirements.txt", "requirements-gpu.txt"):
        assert pins(DOCKER / name)["ray"] == ray_compat.PINNED_RAY_VERSION


def test_what_both_images_pin_is_pinned_alike() -> None:
    ours = pins(ROOT / "constraints.txt")
    for name in ("requirements.txt", "requirements-gpu.txt"):
        for package, version in pins(DOCKER / name).items():
            assert version, f"{name}: {package} has no exact version"
            assert ours.get(package, version) == version, f"{name}: {package}"
    assert pins(DOCKER / "requirements-gpu.txt").items() <= pins(DOCKER / "constraints-gpu.txt").items()


def test_what_is_in_the_GPU_image_fits_together_and_is_all_pinned() -> None:
    """Resolved from packages' metadata, for the image's Python: its 4 GB are not installed by any test."""
    if not os.environ.get("K8S_LIVE"):
        pytest.skip("asks a package index: make test-k8s")
    lines = (DOCKER / "constraints-gpu.txt").read_text().splitlines()
    command = re.sub(
        r"[#\\\s]+", " ", "".join(line for line in lines if line.startswith("#")).partition("by")[2]
    ).split()
    python = re.findall(r"^ARG PYTHON=python:(\d+\.\d+)", (DOCKER / "Dockerfile.gpu").read_text(), re.M)
    assert [command[command.index("--python-version") + 1]] == python
    command = [tool(command[0]), *command[1:], "--constraint", "docker/constraints-gpu.txt", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {line for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.gpu"])
def test_an_image_runs_as_the_user_that_pods_run_as(name: str) -> None:
    assert re.findall(r"^USER (.+)$", (DOCKER / name).read_text(), re.M) == ["1000:1000"]


def in_the_build_context(path: str) -> bool:
    """By `.dockerignore`, of which the last line that matches a file or a folder above it decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = path.split("/")
        above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if pattern.startswith("**/"):
            matched = any(fnmatch.fnmatch(part, pattern.removeprefix("**/")) for part in parts)
        else:
            matched = any(
                fnmatch.fnmatch(folder, pattern) and folder.count("/") == pattern.count("/") for folder in above
            )
        if matched:
            kept = line.startswith("!")
    return kept


def test_the_build_context_has_the_sources_and_nothing_else() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a checkout")
    kept = {path for path in tracked.stdout.splitlines() if in_the_build_context(path)}
    tops = {path.split("/")[0] for path in kept}
    assert tops == {
        "protocols", "backends", "deployments", "docker", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"
    }  # fmt: skip
    assert not in_the_build_context(".venv/bin/python")
    assert not in_the_build_context("deployments/__pycache__/app.pyc")
    assert not in_the_build_context("model.gguf")


def test_the_steps_end_in_a_command_that_works(tmp_path: Path) -> None:
    """What `docker build` would run for the CPU image, from the files it would have."""
    if not os.environ.get("K8S_LIVE"):
        pytest.skip("compiles llama.cpp unless pip has it: make test-k8s")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = tmp_path / "source"
    for path in filter(in_the_build_context, tracked.splitlines()):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    venv, wheels = tmp_path / "venv", tmp_path / "wheels"
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHON": sys.executable}
    # A proxy or another index, and the certificates for it: the machine's own.
    environment |= {k: v for k, v in os.environ.items() if re.match(r"PIP_|(https?|no)_proxy$|SSL_CERT", k, re.I)}
    for step in (["wheels", str(wheels)], ["cpu", str(venv), str(wheels)]):
        done = subprocess.run(["docker/install.sh", *step], cwd=source, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    frozen = subprocess.run(
        [venv / "bin" / "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "frozen.txt").write_text(frozen)
    pinned = pins(ROOT / "constraints.txt")
    installed = pins(tmp_path / "frozen.txt")
    loose = installed.keys() - pinned.keys() - {"tokenyard", "pip"}
    assert not loose, f"without a pin in constraints.txt: {sorted(loose)}"
    shutil.rmtree(source)  # an image has only what was installed
    for name in OVERLAYS:
        config = K8S / "overlays" / name / "serve.yaml"
        done = subprocess.run(
            [venv / "bin" / "tokenyard", "check", str(config)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    ray = subprocess.run([venv / "bin" / "ray", "--version"], capture_output=True, text=True, check=True)
    assert ray_compat.PINNED_RAY_VERSION in ray.stdout
