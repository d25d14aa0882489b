"""Naming a model file, and what an operator reads when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import BackendStartError
from backends.model_source import part_paths, resolve_model


def test_a_path(tmp_path: Path) -> None:
    model = tmp_path / "a.gguf"
    model.write_bytes(b"GGUF....")
    assert resolve_model(str(model)) == model


def test_a_file_in_a_package_by_import_or_distribution_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tiny_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('a model package is not imported')")
    (package / "a.gguf").write_bytes(b"GGUF....")
    info = tmp_path / "tiny_model_dist-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model-dist\nVersion: 1\n")
    (info / "RECORD").write_text("tiny_model/__init__.py,,\ntiny_model/a.gguf,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("package:tiny_model/a.gguf") == package / "a.gguf"
    assert resolve_model("package:tiny-model-dist/a.gguf") == package / "a.gguf"
    assert resolve_model("package:tiny-model-dist/tiny_model/a.gguf") == package / "a.gguf"
    with pytest.raises(BackendStartError, match=r"has a\.gguf"):
        resolve_model("package:tiny_model/b.gguf")
    with pytest.raises(BackendStartError, match=r"it has tiny_model/a\.gguf"):
        resolve_model("package:tiny-model-dist/b.gguf")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("package:no_such_package/a.gguf", "'no_such_package' is not installed"),
        ("package:no-such-dist/a.gguf", "'no-such-dist' is not installed"),
        ("package:", "expected package:<package>/<file>"),
        ("package:x", "expected package:<package>/<file>"),
        ("{tmp}/b.gguf", "has a.gguf"),
        ("{tmp}", "is a folder"),
        ("{tmp}/nowhere/b.gguf", "no folder"),
        ("{tmp}/notes.txt", "is not a GGUF file"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BackendStartError) as caught:
        resolve_model(source.format(tmp=tmp_path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_in_several_files_needs_all_of_them(tmp_path: Path) -> None:
    names = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names[:2]:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(BackendStartError, match=r"there is no file .*m-00003-of-00003\.gguf"):
        resolve_model(str(tmp_path / names[0]))
    (tmp_path / names[2]).write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / names[0])) == tmp_path / names[0]
    assert part_paths(tmp_path / names[0]) == [tmp_path / name for name in names]
    with pytest.raises(BackendStartError, match=r"name its first part, m-00001-of-00003\.gguf"):
        resolve_model(str(tmp_path / names[1]))


def test_without_huggingface_hub_its_models_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.model_source.hub.find_spec", lambda _: None)
    with pytest.raises(BackendStartError, match="needs the Python package huggingface_hub"):
        resolve_model("hf://o/r/m.gguf")
