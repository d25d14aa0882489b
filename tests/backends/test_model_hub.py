"""Models from Hugging Face, against a hub of our own: what is fetched, and what an operator reads when it cannot be."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("huggingface_hub", reason="models from Hugging Face need huggingface_hub")
from huggingface_hub import constants

from backends.base import BackendStartError
from backends.model_source import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = b"GGUF" + bytes(300_000)


class Hub(msgspec.Struct):
    """Files by `owner/repository/resolve/revision/path`; errors are (status, X-Error-Code) by the same or its start."""

    url: str = ""
    files: dict[str, bytes] = {}
    errors: dict[str, tuple[int, str]] = {}
    etags: dict[str, str] = {}
    downloads: list[str] = []

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _answer(self, with_body: bool) -> None:
                path = self.path.lstrip("/")
                for start, (status, code) in hub.errors.items():
                    if path.startswith(start):
                        return self._head(status, 0, {"X-Error-Code": code})
                body = hub.files.get(path)
                if body is None:
                    return self._head(404, 0, {"X-Error-Code": "EntryNotFound"})
                etag = hub.etags.get(path, hashlib.sha256(body).hexdigest())
                self._head(200, len(body), {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
                if with_body:
                    hub.downloads.append(path)
                    self.wfile.write(body)

            def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(length), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(files={"o/r/resolve/main/m.gguf": MODEL})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub.handler())
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"  # made of ENDPOINT when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def fault(source: str) -> str:
    with pytest.raises(BackendStartError) as caught:
        resolve_model(source)
    text = str(caught.value)
    assert text.startswith(f"model {source!r}: ") and "\n" not in text
    return text


def test_a_file_is_fetched_once_and_its_checksum_and_progress_are_logged(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "backends.model_source")
    path = resolve_model("hf://o/r/m.gguf")
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(tmp_path / "cache")
    assert "m.gguf: downloading, 0 % of 0 MB" in caplog.text
    assert "m.gguf is complete, its SHA-256 is right" in caplog.text
    assert resolve_model("hf://o/r/m.gguf") == path
    assert len(hub.downloads) == 1


def test_a_revision_and_folders(hub: Hub) -> None:
    hub.files = {"o/r/resolve/v1/q4/m.gguf": MODEL}
    assert resolve_model("hf://o/r/q4/m.gguf@v1").read_bytes() == MODEL


def test_all_parts_of_a_model_are_fetched(hub: Hub) -> None:
    names = [f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    hub.files = {f"o/r/resolve/main/{name}": MODEL + bytes([i]) for i, name in enumerate(names)}
    path = resolve_model(f"hf://o/r/{names[0]}")
    assert path.name == names[0]
    assert [path.with_name(name).read_bytes()[-1] for name in names] == [0, 1, 2]
    assert "name its first part, big-00001-of-00003.gguf" in fault(f"hf://o/r/{names[1]}")


def test_a_file_that_arrives_damaged_is_deleted_and_fetched_again(hub: Hub) -> None:
    place = "o/r/resolve/main/m.gguf"
    hub.etags[place] = hashlib.sha256(b"another").hexdigest()
    assert "m.gguf arrived damaged" in fault("hf://o/r/m.gguf")
    hub.files[place] = b"another"
    assert "is not a GGUF file" in fault("hf://o/r/m.gguf"), "it is there now, whole"
    assert len(hub.downloads) == 2


def test_a_small_file_has_no_checksum(hub: Hub) -> None:
    hub.etags["o/r/resolve/main/m.gguf"] = "a" * 40
    assert resolve_model("hf://o/r/m.gguf").read_bytes() == MODEL


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (401, "GatedRepo", "access to o/r has to be asked for at {hub}/o/r, and HF_TOKEN set"),
        (403, "GatedRepo", "access to o/r has to be asked for at {hub}/o/r, and HF_TOKEN set"),
        (401, "RepoNotFound", "{hub} has no o/r, or it is private: check the name, or set HF_TOKEN"),
        (404, "RepoNotFound", "{hub} has no o/r, or it is private: check the name, or set HF_TOKEN"),
        (404, "RevisionNotFound", "o/r has no revision 'main'"),
        (404, "EntryNotFound", "o/r has no file 'm.gguf' at revision 'main'"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, status: int, code: str, says: str) -> None:
    hub.errors["o/r/"] = (status, code)
    assert fault("hf://o/r/m.gguf").endswith(f": {says.format(hub=hub.url)}")


def test_offline_what_was_fetched_is_found_and_nothing_else(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("hf://o/r/m.gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("hf://o/r/m.gguf") == path
    assert f"other.gguf is not in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set" in fault(
        "hf://o/r/other.gguf"
    )


@pytest.mark.parametrize("source", ["hf://", "hf://o", "hf://o/r", "hf://o/r/", "hf:///r/m.gguf", "hf://o/r/m.gguf@"])
def test_a_name_that_is_none(source: str) -> None:
    assert "expected hf://<owner>/<repository>/<file>[@<revision>]" in fault(source)


def test_a_repository_name_the_hub_does_not_allow(hub: Hub) -> None:
    assert "Repo id" in fault("hf://o/r%/m.gguf")
