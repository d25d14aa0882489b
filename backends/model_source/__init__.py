"""Where model files come from: a path, a file inside an installed Python package, or a repository on Hugging Face."""

from __future__ import annotations

from pathlib import Path

from backends.base import BackendStartError
from backends.model_source import hub
from backends.model_source.listing import gguf_files
from backends.model_source.package import PACKAGE_SCHEME, file_in_package
from backends.model_source.parts import part_paths

__all__ = ["part_paths", "resolve_model"]

_GGUF_MAGIC = b"GGUF"


def resolve_model(source: str, what: str = "model") -> Path:
    """The GGUF file that `source` names: a path, `package:<import or distribution name>/<file>`, or
    `hf://<owner>/<repository>/<file>[@<revision>]`, which is downloaded unless it is there. Blocks.

    Of a model in several files, `...-00001-of-00003.gguf`, it is the first; the others are there too, beside it.
    Errors name the file as `what` it is to be.
    """
    name = f"{what} {source!r}"
    if source.startswith(hub.SCHEME):
        path = hub.fetch(source, name)
    elif source.startswith(PACKAGE_SCHEME):
        path = file_in_package(source, name)
    else:
        path = Path(source).expanduser()
    for part in part_paths(path, name):
        if not part.is_file():
            raise BackendStartError(f"{name}: {_what_exists(part)}")
        with part.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
        if magic != _GGUF_MAGIC:
            raise BackendStartError(f"{name}: {part} is not a GGUF file (it starts with {magic!r})")
    return path


def _what_exists(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no file {path}, and no folder {folder}"
    found = gguf_files(sorted(file.name for file in folder.glob("*.gguf")))
    what = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
    return f"{what}; {folder} has {found}"
