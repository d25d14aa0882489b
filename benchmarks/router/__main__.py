"""The router benchmark: the production policy beside other routers' rules, in simulation.

    make bench-router        or        python -m benchmarks.router --quick

Traces are read from `../shared/data/traces` where there are any; generated workloads always run. Prints a table for
each leg, with every rule side by side, and the pass bars; writes results.json and plots to `--out`. What was simulated
once is read from there as long as the code it came from is the same, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

import deployments.routing
from benchmarks.router import report, workloads
from benchmarks.router.legs import RULES, Leg, legs
from benchmarks.router.measures import Result
from benchmarks.router.ours import OURS
from benchmarks.router.simulation import Scenario, Simulation
from deployments.bench import svg

OUT = Path(".cache/router")
HERE = Path(__file__).parent
MODEL = ("fleet", "generated", "measures", "peers", "simulation", "workloads")
"""The files that other rules' results depend on; ours depend on the adapter and the production modules too."""


def simulate(scenario: Scenario, rule: str) -> Result:
    return Simulation(scenario, workloads.load(scenario.workload), RULES[rule]).run()


class Store:
    """Results by scenario, rule, and the code they came from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "runs"
        self._folder.mkdir(parents=True, exist_ok=True)
        model = [HERE / f"{name}.py" for name in MODEL]
        production = Path(deployments.routing.__file__).parent.glob("*.py")
        ours = [*model, HERE / "ours.py", HERE / "ladder.py", *production]
        self._versions = {False: _digest(model), True: _digest(ours)}

    def _path(self, scenario: Scenario, rule: str) -> Path:
        name = msgspec.json.encode((scenario, rule, self._versions[rule in OURS]))
        return self._folder / f"{hashlib.sha256(name).hexdigest()[:24]}.json"

    def get(self, scenario: Scenario, rule: str) -> Result | None:
        path = self._path(scenario, rule)
        return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None

    def put(self, scenario: Scenario, rule: str, result: Result) -> None:
        self._path(scenario, rule).write_bytes(msgspec.json.encode(result))


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def run(todo: list[tuple[Scenario, str]], store: Store, jobs: int) -> None:
    """Simulates what the store does not have."""
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        waiting: dict[Future[Result], tuple[Scenario, str]] = {}
        for scenario, rule in todo:
            waiting[pool.submit(simulate, scenario, rule)] = scenario, rule
        for done, future in enumerate(as_completed(waiting), 1):
            scenario, rule = waiting[future]
            store.put(scenario, rule, future.result())
            progress(done, len(todo), f"{time.monotonic() - began:4.0f} s  {scenario.workload}, {rule}")


def progress(done: int, of: int, label: str) -> None:
    """A bar on a terminal; elsewhere a line now and then."""
    filled = 30 * done // of
    bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{of} {label:<60.60}"
    if sys.stderr.isatty():
        print(f"\r{bar}", end="\n" if done == of else "", file=sys.stderr, flush=True)
    elif done % 50 == 0 or done == of:
        print(bar.rstrip(), file=sys.stderr, flush=True)


def plots(results: report.Results, chosen: list[Leg], out: Path) -> None:
    for leg in chosen:
        if leg.name in ("gateways", "replicas") and results[leg.name]:
            labels = list(results[leg.name])
            by_rule = {rule: [results[leg.name][label][rule] for label in labels] for rule in leg.rules}
            shares = {rule: [result.share for result in row] for rule, row in by_rule.items()}
            times = {rule: [result.ttft_mean_s for result in row] for rule, row in by_rule.items()}
            (out / f"{leg.name}-hit.svg").write_text(svg.chart(f"Share of possible hits: {leg.title}", labels, shares))
            title = f"Mean time to first token, s: {leg.title}"
            (out / f"{leg.name}-ttft.svg").write_text(svg.chart(title, labels, times, log=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs: under two minutes")
    parser.add_argument("--only", default="", help="run only the legs whose name has this in it")
    parser.add_argument("--rules", nargs="*", help="run only these rules")
    parser.add_argument("--cached", action="store_true", help="run nothing: tables of the scenarios that are complete")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    chosen = [leg for leg in legs(quick=args.quick) if args.only in leg.name]
    if args.rules:
        chosen = [
            msgspec.structs.replace(leg, rules=tuple(rule for rule in leg.rules if rule in args.rules))
            for leg in chosen
        ]
    missing = [name for name in workloads.TRACE_FILES if not workloads.available(name)]
    if missing:
        print(f"left out, not in {workloads.TRACES}: {', '.join(missing)}", file=sys.stderr)
    store = Store(args.out)
    every = {(scenario, rule): None for leg in chosen for scenario in leg.scenarios.values() for rule in leg.rules}
    todo = [run for run in every if store.get(*run) is None]
    if todo and not args.cached:
        run(todo, store, args.jobs)
    results: dict[str, dict[str, dict[str, Result]]] = {}
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    for leg in chosen:
        results[leg.name] = {}
        for label, scenario in leg.scenarios.items():
            found = {rule: result for rule in leg.rules if (result := store.get(scenario, rule)) is not None}
            if len(found) == len(leg.rules):
                results[leg.name][label] = found
        print(f"## {leg.name}: {leg.title}\n\n{report.tables(leg, results[leg.name])}\n")
    if not args.rules:
        lines = ["| bar | value | limit | |", "|---|---|---|---|", *(bar.line() for bar in report.bars(results))]
        print("## bars\n\n" + "\n".join(lines))
    (args.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    plots(results, chosen, args.out)


if __name__ == "__main__":
    main()
