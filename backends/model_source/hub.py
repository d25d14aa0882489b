"""Models from Hugging Face, in the cache that all programs of this user share (`HF_HOME`).

Which hub (`HF_ENDPOINT`), which token (`HF_TOKEN`, or what `hf auth login` left), and whether to stay offline
(`HF_HUB_OFFLINE`) is huggingface_hub's own reading of the environment.
"""

from __future__ import annotations

import hashlib
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.base import BackendStartError
from backends.model_source.parts import part_names

log = logging.getLogger(__name__)

SCHEME = "hf://"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOG_EVERY_PERCENT = 5


def fetch(source: str, what: str) -> Path:
    """The file that `source` names, in the cache. A model in several files is fetched whole. Errors are one line."""
    place, _, revision = source.removeprefix(SCHEME).partition("@")
    owner, _, rest = place.partition("/")
    repository, _, file = rest.partition("/")
    if not owner or not repository or not file or source.endswith("@"):
        raise BackendStartError(f"{what}: expected hf://<owner>/<repository>/<file>[@<revision>]")
    if find_spec("huggingface_hub") is None:
        raise BackendStartError(f"{what}: hf:// needs the Python package huggingface_hub: install it")
    paths = [_fetch_file(f"{owner}/{repository}", name, revision or "main", what) for name in part_names(file, what)]
    return paths[0]


def _fetch_file(repository: str, file: str, revision: str, what: str) -> Path:
    from httpx2 import HTTPError  # here: only models from there need these
    from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(repository, file, revision=revision)
        path = hf_hub_download(repository, file, revision=revision, tqdm_class=_progress(f"{what}: {file}"))
    except errors.GatedRepoError:
        fault = f"access to {repository} has to be asked for at {constants.ENDPOINT}/{repository}, and HF_TOKEN set"
    except errors.RepositoryNotFoundError:
        fault = f"{constants.ENDPOINT} has no {repository}, or it is private: check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        fault = f"{repository} has no revision {revision!r}"
    except errors.RemoteEntryNotFoundError:
        fault = f"{repository} has no file {file!r} at revision {revision!r}"
    except errors.LocalEntryNotFoundError:
        offline = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} does not answer"
        fault = f"{file} is not in the cache ({constants.HF_HUB_CACHE}) and {offline}"
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = ": is HF_TOKEN right?" if status in (401, 403) else ""
        fault = f"{constants.ENDPOINT} answers {status}{hint}"
    except (HTTPError, OSError, ValueError) as error:
        fault = " ".join(str(error).split()) or type(error).__name__
    else:
        if path != cached:
            _verify(Path(path), what)
        return Path(path)
    raise BackendStartError(f"{what}: {fault}")


def _verify(path: Path, what: str) -> None:
    """Large files are stored under their SHA-256. One that has another is deleted, or it would be found again."""
    blob = path.resolve()
    if _SHA256.fullmatch(blob.name) is None:
        return
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise BackendStartError(f"{what}: {path.name} arrived damaged (SHA-256 {digest}) and was deleted: start again")
    log.info("%s: %s is complete, its SHA-256 is right", what, path.name)


def _progress(label: str) -> type[Any]:
    """A progress bar of tqdm's whose picture is lines of the log."""
    from tqdm import tqdm

    class Logged(tqdm):  # type: ignore[misc]  # it has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            self._next = 0
            options.pop("name", None)
            super().__init__(*args, **options | {"disable": False, "file": _Nowhere(), "leave": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            percent = int(100 * self.n / self.total) if self.total else 0
            if self.total and percent >= self._next:
                self._next = percent - percent % _LOG_EVERY_PERCENT + _LOG_EVERY_PERCENT
                log.info("%s: downloading, %d %% of %.0f MB", label, percent, self.total / 1e6)
            return True

    return Logged


class _Nowhere:
    """What a progress bar writes to that is not drawn."""

    def write(self, text: str) -> None: ...

    def flush(self) -> None: ...
