"""Runs llama.cpp's own server tests against `tokenyard-llama-server`, and compares with what is expected of them.

`python -m tests.peer [FILE…]` runs all files that have to do with what is served here, or those named.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.engine import llama_server
from tests.deployments.local_server import free_port
from tests.peer import models
from tests.peer.expectations import FILES, Expectations, Outcome

ROOT = Path(__file__).parents[2]
WORK = llama_server.CACHE / "peer"
MINUTES = 15
"""For one file. The longest takes a few."""


def launcher() -> Path:
    """The executable of this checkout, whatever is installed, with the flags that the plugin adds."""
    path = WORK / "llama-server"
    command = f'exec "{sys.executable}" -m deployments.llama_server $PEER_FLAGS "$@"'
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" {command}\n')
    path.chmod(0o755)
    return path


def run_file(name: str, server: Path) -> dict[str, Outcome]:
    """`test[case]` -> its outcome."""
    report, log = WORK / f"{name}.xml", WORK / f"{name}.log"
    report.unlink(missing_ok=True)
    tests = llama_server.source() / "tools" / "server" / "tests"
    command = [sys.executable, "-m", "pytest", "-p", "tests.peer.plugin", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [f"--junitxml={report}", "-q", f"unit/{name}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests)]),
        "LLAMA_SERVER_BIN_PATH": str(server),
        "PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=tests, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.wait(60 * MINUTES)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest stops the server that it has started, and reports
            process.wait(60)
            raise SystemExit(f"{name} did not end in {MINUTES} minutes: see {log}") from None
    if not report.exists():
        raise SystemExit(f"{name} did not run: see {log}")
    return dict(_outcome(case) for case in ElementTree.parse(report).getroot().iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, Outcome]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            message = child.attrib.get("message", "").partition("\n")[0]
            return case.attrib["name"], Outcome("skipped" if child.tag == "skipped" else "failed", message)
    return case.attrib["name"], Outcome("passed")


def run(names: Sequence[str]) -> dict[str, dict[str, Outcome]]:
    """As many files at a time as there are cores."""
    server = launcher()
    workers = os.cpu_count() or 1
    printing = threading.Lock()

    def one(name: str) -> dict[str, Outcome]:
        outcomes = run_file(name, server)
        with printing:
            print(f"{name}: {_counts(outcomes)}", flush=True)
        return outcomes

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _counts(outcomes: Mapping[str, Outcome]) -> str:
    counts = Counter(outcome.result for outcome in outcomes.values())
    return ", ".join(f"{counts[result]} {result}" for result in ("passed", "failed", "skipped") if counts[result])


def main() -> int:
    names = sys.argv[1:] or list(FILES)
    expected = Expectations.read(Path(__file__).with_name("expected_failures.txt"))
    llama_server.source()
    models.stand_ins()
    WORK.mkdir(parents=True, exist_ok=True)
    results = run(names)
    print()
    for name, outcomes in results.items():
        print(f"{name}: {_counts(outcomes)}")
        for case, outcome in outcomes.items():
            if outcome.result == "failed":
                print(f"  {case}: {expected.reason(name, case) or outcome.message}")
    everything = {f"{name}::{case}": outcome for name, cases in results.items() for case, outcome in cases.items()}
    print(f"\nAll files: {_counts(everything)}. Details are in {WORK}.")
    faults = [fault for name, outcomes in results.items() for fault in expected.faults(name, outcomes)]
    for fault in faults:
        print(f"NOT EXPECTED: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
