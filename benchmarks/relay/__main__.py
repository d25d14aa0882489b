"""The relay benchmark: what everything but the engine costs.

    make bench-relay        or        python -m benchmarks.relay --repeats 3

Engines that are not there make tokens at a set speed, and are asked through the whole of each system: ours behind
HAProxy and behind Serve's Python proxy, Ray Serve LLM on its default path and with direct streaming, and a bare
streamer as the upper bound. Each system is started afresh in every repeat, in alternating order. CPU is that of all
the server's processes. Prints the tables and the bars; `--out` has every figure, and plots. Ray Serve LLM needs an
environment of its own (`python -m benchmarks.relay.environment`) and is left out, saying why, where that is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from pathlib import Path

import msgspec
import uvloop

from benchmarks.relay import environment
from benchmarks.relay.measures import Measured, measure
from benchmarks.relay.plots import plots
from benchmarks.relay.report import bar_table, bars, summary, tables
from benchmarks.relay.systems import FALLBACKS, PORT, SETTLE_S, SYSTEMS, parts, running

OUT = Path(__file__).parents[2] / ".cache" / "relay"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the systems whose name has this in it")
    parser.add_argument("--fallbacks", action="store_true", help="ours without the step channel too")
    parser.add_argument("--shorter", type=int, default=1, help="divide the lengths of streams by this, to try it out")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds between a start and the first load")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    systems = [*SYSTEMS, *FALLBACKS] if args.fallbacks else SYSTEMS
    systems = [system for system in systems if args.only.lower() in system.name.lower()]
    if any(system.on_ray_serve_llm for system in systems) and (why := environment.missing()) is not None:
        print(f"Ray Serve LLM is left out: {why}", file=sys.stderr, flush=True)
        systems = [system for system in systems if not system.on_ray_serve_llm]
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Measured]] = {system.name: [] for system in systems}
    for repeat in range(args.repeats):
        for number, system in enumerate(systems if repeat % 2 == 0 else systems[::-1]):
            done = repeat * len(systems) + number + 1
            print(f"[{done}/{args.repeats * len(systems)}] {system.name}", file=sys.stderr, flush=True)
            found = Measured()
            for speeds in parts(system):
                with (
                    running(system, speeds, args.port, args.settle) as server,
                    asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
                ):
                    runner.run(measure(found, server, args.shorter, repeats_of_prompts=21, settle_s=args.settle / 3))
            results[system.name].append(found)
            print(f"  {summary(found)}", file=sys.stderr, flush=True)
            # What there is, also where a later one fails.
            (args.out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    for file, drawn in plots(results).items():
        (args.out / f"{file}.svg").write_text(drawn)
    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"Median (least–most) of {args.repeats}; {cores}\n\n{tables(results)}\n\n{bar_table(bars(results))}")


if __name__ == "__main__":
    main()
