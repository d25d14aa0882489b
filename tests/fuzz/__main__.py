"""Sends random requests to every route for a while: python -m tests.fuzz --seconds 120

Ends with 1 if there was a fault. `--again SEED-NUMBER` sends the request of a fault once more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter

from tests.fuzz.fuzzer import Report, fuzzer


async def run(seed: int, seconds: float, again: str | None) -> Report:
    async with fuzzer(seed) as fuzz:
        return await (fuzz.run(seconds=seconds) if again is None else fuzz.one(again))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--again", metavar="SEED-NUMBER")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    report = asyncio.run(run(args.seed, args.seconds, args.again))
    statuses: Counter[str] = Counter()
    for (_, status), count in report.statuses.items():
        statuses[status] += count
    print(f"{report.requests} requests; " + ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items())))
    for kind, fault in report.faults.items():
        print(f"\n=== {kind}\n{fault}")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
