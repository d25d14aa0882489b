"""Runs llama.cpp's own server tests against `tokenyard-llama-server`, and compares with what is expected of them.

`python -m tests.peer [FILE…]` runs all files that have to do with what is served here, or those named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from benchmarks.engine import llama_server
from tests.peer import models
from tests.peer.expectations import FILES, Expectations

ROOT = Path(__file__).parents[2]
WORK = llama_server.CACHE / "peer"
MINUTES = 30


def launcher() -> Path:
    """The executable of this checkout, whatever is installed."""
    path = WORK / "llama-server"
    command = f'exec "{sys.executable}" -m deployments.llama_server "$@"'
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" {command}\n')
    path.chmod(0o755)
    return path


def run_file(name: str, port: int, server: Path) -> dict[str, tuple[str, str]]:
    """`test[case]` -> its outcome (passed, failed or skipped) and the first line of why."""
    report, log = WORK / f"{name}.xml", WORK / f"{name}.log"
    report.unlink(missing_ok=True)
    tests = llama_server.source() / "tools" / "server" / "tests"
    command = [sys.executable, "-m", "pytest", "-p", "tests.peer.plugin", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [f"--junitxml={report}", "-q", f"unit/{name}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests)]),
        "LLAMA_SERVER_BIN_PATH": str(server),
        "PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("w") as out:
        subprocess.run(
            command, cwd=tests, env=environment, stdout=out, stderr=subprocess.STDOUT, timeout=60 * MINUTES, check=False
        )
    if not report.exists():
        raise SystemExit(f"{name} did not run: see {log}")
    return dict(_outcome(case) for case in ElementTree.parse(report).getroot().iter("testcase"))


def _outcome(case: ElementTree.Element) -> tuple[str, tuple[str, str]]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            outcome = "skipped" if child.tag == "skipped" else "failed"
            return case.attrib["name"], (outcome, child.attrib.get("message", "").partition("\n")[0])
    return case.attrib["name"], ("passed", "")


def run(names: Sequence[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """As many files at a time as there are cores."""
    server = launcher()
    workers = os.cpu_count() or 1
    ports: SimpleQueue[int] = SimpleQueue()
    for number in range(workers):
        ports.put(8180 + 10 * number)
    printing = threading.Lock()

    def one(name: str) -> dict[str, tuple[str, str]]:
        port = ports.get()
        try:
            outcomes = run_file(name, port, server)
        finally:
            ports.put(port)
        with printing:
            print(f"{name}: {_counts(outcomes)}", flush=True)
        return outcomes

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _counts(outcomes: Mapping[str, tuple[str, str]]) -> str:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])


def main() -> int:
    names = sys.argv[1:] or list(FILES)
    expected = Expectations.read(Path(__file__).with_name("expected_failures.txt"))
    llama_server.source()
    models.stand_ins()
    WORK.mkdir(parents=True, exist_ok=True)
    results = run(names)
    print()
    faults = []
    for name, outcomes in results.items():
        print(f"{name}: {_counts(outcomes)}")
        for case, (outcome, message) in outcomes.items():
            reason = expected.reason(name, case)
            if outcome == "failed":
                print(f"  {case}: {reason or 'NOT EXPECTED: ' + message}")
            if (outcome == "failed") != (reason is not None) and outcome != "skipped":
                faults.append(f"{name}::{case} {outcome}, which is not expected{message and ': ' + message}")
        faults += [f"{name}::{case} is expected to fail, and is not there" for case in expected.unseen(name, outcomes)]
    everything = {f"{name}::{case}": outcome for name, cases in results.items() for case, outcome in cases.items()}
    print(f"\nAll files: {_counts(everything)}. Details are in {WORK}.")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
