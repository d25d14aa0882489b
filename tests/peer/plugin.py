"""A pytest plugin for llama.cpp's server tests, which stay as they are: local models in place of those on the hub."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from backends.model_source import resolve_model
from tests.peer.models import DOWNLOADS, stand_ins

sys.modules["wget"] = ModuleType("wget")  # what their helpers would download with; it need not be installed

import utils  # type: ignore[import-not-found]  # noqa: E402  # theirs

_start = utils.ServerProcess.start


def download(url: str, output_file_path: str | None = None) -> str:
    path = DOWNLOADS.get(url.rpartition("/")[2])
    if path is None:
        raise OSError(f"nothing is downloaded here: {url}")
    return str(resolve_model(path))


ENDLESS = ("test_completion_unified", "test_ctx_shift_disabled_short_prompt")
"""Tests of answers that only a limit ends. The model they were written for ends none, and SmolLM2 does: what stands for
it here is SmolLM2 with `--ignore-eos`. Nothing that they ask or check is changed."""


def start(server: Any, *args: Any, **options: Any) -> None:
    """With one thread: several servers share a machine, and threads that wait for each other waste it."""
    # A server without a model would be llama.cpp's router: here it has a model all the same.
    path = stand_ins().get((server.model_hf_repo, server.model_hf_file))
    if path is not None and server.model_file is None:
        server.model_file, server.model_hf_repo, server.model_hf_file = str(path), None, None
    server.n_threads = 1
    endless = any(f"::{test}" in os.environ["PYTEST_CURRENT_TEST"] for test in ENDLESS)
    os.environ["PEER_FLAGS"] = "--ignore-eos" if endless else ""
    _start(server, *args, **options)


utils.ServerProcess.start = start
utils.download_file = download
utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would fetch every model from the hub
