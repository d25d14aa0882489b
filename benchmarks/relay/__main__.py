"""The relay benchmark: what everything but the engine costs.

    make bench-relay        or        python -m benchmarks.relay --repeats 3

The fake backend makes a token per stream and engine step of 50 ms; 128 streams ask for 100 tokens each. The same load
runs through Serve's Python proxy and through HAProxy, with the step channel on and off, in alternating order, in one
run; with `--prototype FOLDER` also through the hand-written prototype that the design was measured with. CPU is that of
the server's processes, Ray's and the front's included. Prints a table; `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.processes import child, wait_for_output
from benchmarks.relay.load import LoadResult, load

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
SETTLE_S = 15.0
"""Ray is busy for about this long after a deployment."""
STEP_S = 0.05


class Leg(msgspec.Struct, frozen=True):
    """One way from client to engine."""

    name: str
    front: str
    step_channel: bool = True
    prototype: bool = False


OURS = (
    Leg("HAProxy + step channel", "haproxy"),
    Leg("HAProxy, channel off", "haproxy", step_channel=False),
    Leg("Python proxy + step channel", "python"),
    Leg("Python proxy, channel off", "python", step_channel=False),
)
PROTOTYPE = Leg("prototype: HAProxy + step channel", "haproxy", prototype=True)


def config(step_channel: bool) -> dict[str, object]:
    backend = {"kind": "fake", "slots": 600, "ttft_s": 0.0, "inter_token_s": STEP_S}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": PORT},
        "applications": [
            {
                "name": "gateway",
                "route_prefix": "/",
                "import_path": "deployments.app:gateway",
                "args": {"step_channel": step_channel},
            },
            {
                "name": "fake",
                "route_prefix": None,
                "import_path": "deployments.app:model",
                "args": {"backend": backend},
                "deployments": [{"name": "Model", "ray_actor_options": {"num_cpus": 0.5}}],
            },
        ],
    }


@contextmanager
def system_under_test(leg: Leg, prototype: Path | None) -> Iterator[int]:
    """A fresh Ray with the leg's front and application; yields the id of the process all others descend from."""
    with tempfile.TemporaryDirectory() as folder:
        environment: dict[str, str] = {}
        if leg.prototype:
            folder = str(prototype)
            environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1", "DT": str(STEP_S)}
            environment |= {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3", "PYTHONPATH": folder}
            command = [str(Path(sys.executable).parent / "serve"), "run", "--app-dir", folder, "step_channel:app"]
            ready = "is ready at"
        else:
            path = Path(folder) / "relay.yaml"
            path.write_text(json.dumps(config(leg.step_channel)))
            command = [sys.executable, "-m", "deployments.cli", "serve", str(path), "--front", leg.front]
            ready = "Tokenyard is ready"
        with child(command, environment) as server:
            wait_for_output(ready, server)
            time.sleep(SETTLE_S)
            yield server.pid


def measure(leg: Leg, args: argparse.Namespace) -> LoadResult:
    with system_under_test(leg, args.prototype) as pid:
        path = "/v1/chat" if leg.prototype else "/v1/chat/completions"
        # The prototype's body has its own words for "how many" and its answers one token more or less: it only counts.
        extra: dict[str, object] = {"n": args.tokens, "k": 1, "dt": STEP_S} if leg.prototype else {}
        return asyncio.run(load(URL, "fake", args.streams, args.tokens, path=path, extra=extra, server_pid=pid))


def median(results: list[LoadResult]) -> LoadResult:
    fields = {
        field: statistics.median(getattr(result, field) for result in results) for field in LoadResult.__struct_fields__
    }
    return LoadResult(**fields)


def table(rows: dict[str, LoadResult]) -> str:
    lines = [
        "| path | tokens/s | TTFT p50 | TTFT p99 | gap p50 | gap p99 | server CPU per 1,000 tokens | lost tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.tokens_per_s:,.0f} | {row.ttft_p50_ms:.0f} ms | {row.ttft_p99_ms:.0f} ms "
            f"| {row.gap_p50_ms:.0f} ms | {row.gap_p99_ms:.0f} ms | {row.server_cpu_s_per_1000_tokens:.2f} s "
            f"| {row.lost_tokens:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prototype", type=Path, help="folder with step_channel.py, to run it beside")
    parser.add_argument("--only", default="", help="run only the ways whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    legs = [leg for leg in ([*OURS, PROTOTYPE] if args.prototype else OURS) if args.only in leg.name]
    results: dict[str, list[LoadResult]] = {leg.name: [] for leg in legs}
    for repeat in range(args.repeats):
        for number, leg in enumerate(legs if repeat % 2 == 0 else legs[::-1]):
            print(
                f"[{repeat * len(legs) + number + 1}/{args.repeats * len(legs)}] {leg.name}",
                file=sys.stderr,
                flush=True,
            )
            results[leg.name].append(measure(leg, args))
    cores = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(
        f"{args.streams} streams of {1 / STEP_S:.0f} tokens/s, {args.tokens} tokens each; "
        f"median of {args.repeats}; {cores}\n"
    )
    print(table({name: median(runs) for name, runs in results.items()}))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


if __name__ == "__main__":
    main()
