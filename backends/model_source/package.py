"""A model that is a file inside an installed Python package."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from backends.base import BackendStartError
from backends.model_source.listing import gguf_files

PACKAGE_SCHEME = "package:"


def file_in_package(source: str, what: str) -> Path:
    """The package is not imported."""
    name, _, inner = source.removeprefix(PACKAGE_SCHEME).partition("/")
    if not name or not inner:
        raise BackendStartError(f"{what}: expected package:<package>/<file>")
    if name.isidentifier() and (spec := find_spec(name)) is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / inner
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise BackendStartError(f"{what}: the Python package {name!r} is not installed") from None
    files = distribution.files or []
    inside = [file for file in files if str(file) == inner or str(file).partition("/")[2] == inner]
    if inside:
        return Path(str(distribution.locate_file(inside[0])))
    ggufs = sorted(str(file) for file in files if file.suffix == ".gguf")
    raise BackendStartError(f"{what}: the package {name!r} has no such file; it has {gguf_files(ggufs)}")
