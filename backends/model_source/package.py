"""Where model files come from: a path, or a file inside an installed Python package."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from backends.base import BackendStartError

PACKAGE_SCHEME = "package:"
_GGUF_MAGIC = b"GGUF"


def resolve_model(source: str, what: str = "model") -> Path:
    """The GGUF file that `source` names: a path, or `package:<import or distribution name>/<file>`.

    Errors name it as `what` it is to be.
    """
    name = f"{what} {source!r}"
    path = _in_package(source, name) if source.startswith(PACKAGE_SCHEME) else Path(source).expanduser()
    if not path.is_file():
        raise BackendStartError(f"{name}: {_what_exists(path)}")
    with path.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise BackendStartError(f"{name}: {path} is not a GGUF file (it starts with {magic!r})")
    return path


def _in_package(source: str, what: str) -> Path:
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
    raise BackendStartError(f"{what}: the package {name!r} has no such file; it has {_listed(ggufs)}")


def _what_exists(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no file {path}, and no folder {folder}"
    found = _listed(sorted(file.name for file in folder.glob("*.gguf")))
    what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
    return f"{what}; {folder} has {found}"


def _listed(names: list[str]) -> str:
    if not names:
        return "no .gguf files"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
