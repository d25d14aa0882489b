"""The rules of the tree, checked on the syntax of every product file. A rule is a function: a file -> its breaches."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocols", "backends", "deployments")


class Source(NamedTuple):
    """A file by its path below the root, such as `backends/llamacpp/engine.py`."""

    path: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]


class Import(NamedTuple):
    """`import a.b as n`: module a.b. `from a import b as n`: module a, member b. `name` is what the file calls it."""

    line: int
    module: str
    member: str | None
    name: str

    @property
    def full(self) -> str:
        return self.module if self.member is None else f"{self.module}.{self.member}"

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def imports(source: Source) -> Iterator[Import]:
    """Every import, in functions and under TYPE_CHECKING too; relative ones made absolute; `import_module("…")`."""
    folder = source.path.split("/")[:-1]
    for node in ast.walk(source.tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, None, alias.asname or alias.name.split(".")[0])
            case ast.ImportFrom():
                base = folder[: len(folder) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(node.lineno, module, alias.name, alias.asname or alias.name)
            case ast.Call(func=ast.Name(id="import_module" | "__import__"), args=[ast.Constant(value=str(module)), *_]):
                yield Import(node.lineno, module, None, "")
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module)), *_]):
                yield Import(node.lineno, module, None, "")


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of such an expression, else None."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            base = dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
    return None


# --- the rules ------------------------------------------------------------


def direction(source: Source) -> Iterator[str]:
    """`protocols <- backends <- deployments`"""
    allowed = PACKAGES[: PACKAGES.index(source.package) + 1]
    for found in imports(source):
        if found.top in PACKAGES and found.top not in allowed:
            yield f"{source.path}:{found.line}: {source.package} imports {found.full}"
        if found.top in ("tests", "benchmarks"):
            yield f"{source.path}:{found.line}: product code imports {found.full}"


ENGINE_HOMES = {"ray": "deployments/", "llama_cpp": "backends/llamacpp/", "vllm": "backends/vllm/"}


def homes(source: Source) -> Iterator[str]:
    """ "The only folder that imports ray"; "a model replica imports only its own engine"."""
    for found in imports(source):
        home = ENGINE_HOMES.get(found.top)
        if home is not None and not source.path.startswith(home):
            yield f"{source.path}:{found.line}: {found.top} outside {home}"


PURE = sys.stdlib_module_names | {"protocols", "pydantic", "pydantic_core", "msgspec"}


def purity(source: Source) -> Iterator[str]:
    """ "protocols/ pure: stdlib, pydantic, msgspec"; bootstrap runs before anything is installed."""
    bootstrap = source.path == "deployments/bootstrap.py"
    if source.package != "protocols" and not bootstrap:
        return
    for found in imports(source):
        if found.top not in (sys.stdlib_module_names if bootstrap else PURE):
            yield f"{source.path}:{found.line}: imports {found.full}"


ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
# bootstrap.py decides where the packages are imported from, so it cannot import the settings that would read it.
READS_ENVIRONMENT = {"deployments/settings.py", "deployments/bootstrap.py"}


def environment(source: Source) -> Iterator[str]:
    """ "settings.py (the only reader of os.environ)" """
    if source.path in READS_ENVIRONMENT:
        return
    names = {found.name for found in imports(source) if found.full == "os"}
    for found in imports(source):
        if found.full in ENVIRONMENT or found.full == "os.*":
            yield f"{source.path}:{found.line}: imports {found.full}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (path := dotted(node)) is not None:
            base, _, attribute = path.rpartition(".")
            if base in names and f"os.{attribute}" in ENVIRONMENT:
                yield f"{source.path}:{node.lineno}: {path}"


def private_ray(source: Source) -> Iterator[str]:
    """ "ray_compat.py (every private Ray name)" """
    if source.path == "deployments/ray_compat.py":
        return
    bound: set[str] = set()
    for found in imports(source):
        if found.top == "ray":
            bound.add(found.name)
            if any(_private(part) for part in found.full.split(".")):
                yield f"{source.path}:{found.line}: imports {found.full}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            path = dotted(node)
            if path is not None and path.split(".")[0] in bound:
                yield f"{source.path}:{node.lineno}: {path}"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (direction, homes, purity, environment, private_ray)


def product() -> list[Source]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), ast.parse(file.read_bytes(), str(file))) for file in files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_product(rule: Callable[[Source], Iterator[str]]) -> None:
    sources = product()
    assert {source.package for source in sources} == set(PACKAGES)
    breaches = [breach for source in sources for breach in rule(source)]
    assert not breaches, "\n".join([rule.__doc__ or "", *breaches])


def test_top_level_names_are_ours() -> None:
    """The folders are the import packages: a distribution with one of their names would hide it, or be hidden."""
    ours = {str(dist.metadata["Name"]) for dist in distributions() if dist.metadata["Name"] == "tokenyard"}
    owners = packages_distributions()
    clashes = {name: sorted(set(owners.get(name, [])) - ours) for name in PACKAGES}
    assert not any(clashes.values()), clashes
    assert not set(PACKAGES) & sys.stdlib_module_names


# --- the rules can fail ------------------------------------------------------------

BAD = [
    (direction, "protocols/x.py", "import backends"),
    (direction, "protocols/x.py", "from backends.base import Backend"),
    (direction, "backends/x.py", "def f():\n    from deployments import app"),
    (direction, "backends/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deployments.app"),
    (direction, "backends/x.py", "from importlib import import_module\nimport_module('deployments.app')"),
    (direction, "deployments/x.py", "from tests.protocols import scripts"),
    (homes, "backends/x.py", "import ray"),
    (homes, "protocols/x.py", "from ray import serve"),
    (homes, "deployments/x.py", "import llama_cpp"),
    (homes, "backends/fake.py", "import llama_cpp.llama_cpp as c"),
    (homes, "backends/vllm/x.py", "import llama_cpp"),
    (homes, "backends/llamacpp/x.py", "async def f():\n    from vllm import AsyncLLM"),
    (purity, "protocols/x.py", "import numpy"),
    (purity, "protocols/a/x.py", "from jinja2 import Template"),
    (purity, "deployments/bootstrap.py", "import pydantic"),
    (purity, "deployments/bootstrap.py", "from deployments import settings"),
    (environment, "backends/x.py", "import os\nos.environ['A']"),
    (environment, "backends/x.py", "import os as o\nprint(o.environ.get('A'))"),
    (environment, "deployments/http.py", "import os\nos.getenv('A')"),
    (environment, "deployments/http.py", "from os import environ as e"),
    (environment, "deployments/http.py", "from os import getenv"),
    (private_ray, "deployments/x.py", "import ray._private.worker"),
    (private_ray, "deployments/x.py", "from ray.serve._private.common import DeploymentID"),
    (private_ray, "deployments/x.py", "from ray.serve import _private"),
    (private_ray, "deployments/x.py", "import ray\nray._private.services.get_node_ip_address()"),
    (private_ray, "deployments/x.py", "from ray import serve as s\ns._run('x')"),
    (private_ray, "deployments/x.py", "from ray.serve import handle\nhandle.Handle._router"),
]

GOOD = [
    (direction, "deployments/x.py", "import backends.base, protocols.events"),
    (direction, "backends/llamacpp/x.py", "from . import slots\nfrom ..base import Backend\nimport protocols"),
    (homes, "deployments/x.py", "import ray"),
    (homes, "backends/llamacpp/x.py", "from llama_cpp import llama_cpp"),
    (homes, "backends/vllm/x.py", "import vllm"),
    (purity, "protocols/x.py", "import json, msgspec\nfrom pydantic import BaseModel\nfrom protocols import sse"),
    (purity, "protocols/a/x.py", "from . import wire"),
    (purity, "deployments/bootstrap.py", "import os, sys"),
    (environment, "deployments/settings.py", "import os\nos.environ"),
    (environment, "backends/x.py", "import os\nos.path.join('a')\nclass A:\n    environ = 1\nA.environ"),
    (private_ray, "deployments/ray_compat.py", "from ray.serve._private import common"),
    (
        private_ray,
        "deployments/x.py",
        "import ray\nclass A:\n    def f(self):\n        return self._x, ray.__version__",
    ),
]


def _case(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> list[str]:
    return list(rule(Source(path, ast.parse(text))))


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_breaches_are_found(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    breaches = _case(rule, path, text)
    assert breaches
    assert all(breach.startswith(f"{path}:") for breach in breaches)


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_what_is_allowed_passes(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert _case(rule, path, text) == []
