"""What grows with replicas and gateways, to 1,000 replicas of one model: from what was measured, and by simulation.

    make bench-scaling        or        python -m benchmarks.scaling

Measured figures are in `inputs.py`, with the commands they are from. Everything printed here is extrapolated from them.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

from benchmarks.scaling.inputs import INPUTS, Inputs
from benchmarks.scaling.simulation import Simulated, simulate
from benchmarks.scaling.tiny import HEALTH_CHECK_S, TEMPLATE_BYTES
from deployments.app import ROUTING_STATS_S
from deployments.asks import DIGESTS_S, LARGE_FLEET, LARGE_FLEET_TURNS
from deployments.bench.svg import chart
from deployments.settings import CONTROL_LOOP_S, GatewaySettings

OUT = Path(__file__).parents[2] / ".cache" / "scaling"
SIZES = (10, 32, 100, 200, 300, 500, 700, 1000)
REPORTS_S = 10.0
"""How often a replica reports for autoscaling: Serve's default."""
ASKED = 6
"""Replicas that a router asks for each request: two owners and four others."""
REQUESTS_PER_REPLICA_S = 0.5
TOKENS = 300
"""Of an answer: with the line above, 150 tokens/s of each replica."""
GATEWAY_LOAD = 0.5
"""Cores that a gateway should have to do: the rest is for bursts."""
CONNECTIONS = int(GatewaySettings().max_channel_connections)


def gateways_for(replicas: int, inputs: Inputs = INPUTS) -> int:
    """As many as the tokens and decisions need; two at least. It takes fewer: the parts that HAProxy and the replica
    have in a token's cost are counted as the gateway's.
    """
    requests = replicas * REQUESTS_PER_REPLICA_S
    return max(2, math.ceil(requests * (TOKENS * inputs.token_s + inputs.decision_s) / GATEWAY_LOAD))


def controller(rows: list[Simulated], title: str) -> str:
    lines = [
        f"### {title}\n",
        "| replicas | gateways | controller busy | turns apart | lists/s | a replica's word is old, p50 | p99 | sent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.replicas:,} | {row.gateways} | {row.busy:.0%} | {row.turn_s:.2f} s | {row.lists_per_s:.1f} "
            f"| {row.age_p50_s:.1f} s | {row.age_p99_s:.1f} s | {row.sent_bytes_per_s / 1e6:,.1f} MB/s |"
        )
    return "\n".join(lines)


def traffic(inputs: Inputs = INPUTS) -> str:
    """One column for each size; what grows with requests is at `REQUESTS_PER_REPLICA_S`."""
    digests_s = DIGESTS_S * LARGE_FLEET_TURNS

    def row(name: str, value: Callable[[int, int], float], form: str = ",.0f") -> str:
        return f"| {name} | {' | '.join(format(value(n, gateways_for(n)), form) for n in SIZES)} |"

    def linked(replicas: int) -> int:
        return min(replicas, CONNECTIONS)

    def requests(replicas: int) -> float:
        return replicas * REQUESTS_PER_REPLICA_S

    def digests(replicas: int, gateways: int) -> float:
        return gateways * linked(replicas) / (digests_s if replicas > LARGE_FLEET else DIGESTS_S)

    def gateway_cores(n: int, m: int) -> float:
        return requests(n) / m * (TOKENS * inputs.token_s + inputs.decision_s)

    def replica_share(n: int, m: int) -> float:
        asks = requests(n) * ASKED * inputs.ask_s + requests(n) * inputs.intent_s
        return 100 * (asks + digests(n, m) * inputs.digest_s) / n

    def list_cores(n: int, m: int) -> float:
        return simulate(n, m, TEMPLATE_BYTES, inputs).lists_per_s * inputs.receiving_s(n)

    rows = [
        f"| | {' | '.join(f'N={n:,}' for n in SIZES)} |",
        "|---|" + "---|" * len(SIZES),
        row("gateways M", lambda _, m: m),
        row("requests/s", lambda n, _: requests(n)),
        row("tokens/s", lambda n, _: requests(n) * TOKENS),
        row("a gateway's cores for them", gateway_cores, ".2f"),
        row("connections, M·min(N, bound)", lambda n, m: m * linked(n)),
        row("of a gateway", lambda n, _: linked(n)),
        row("MB of memory for all, both ends", lambda n, m: m * linked(n) * inputs.connection_bytes / 1e6, ",.1f"),
        row("asks/s", lambda n, _: requests(n) * ASKED),
        row("intents/s", lambda n, _: requests(n)),
        row("digests/s", digests),
        row("of them, of a gateway", lambda n, m: digests(n, m) / m, ",.1f"),
        row("their MB/s at most", lambda n, m: digests(n, m) * inputs.digest_bytes / 1e6, ",.2f"),
        row("% of a replica's core for all three", replica_share, ".3f"),
        row("controller's health checks/s", lambda n, _: n / HEALTH_CHECK_S),
        row("its questions for stats/s", lambda n, _: n / ROUTING_STATS_S),
        row("reports for autoscaling/s", lambda n, _: n / REPORTS_S),
        row("Serve's probes when all start", lambda n, m: n * m),
        row("list, KB", lambda n, _: inputs.list_bytes(n, TEMPLATE_BYTES) / 1e3),
        row("it holds up a gateway's streams, ms", lambda n, _: 1e3 * n * inputs.held_up_per_replica_s, ".1f"),
        row("a gateway's cores for lists", list_cores, ".2f"),
    ]
    return "\n".join(rows)


def limit(reached: Callable[[int], bool], most: int = 3000) -> str:
    """The least number of replicas at which `reached`, for good."""
    if not reached(most):
        return f"more than {most:,}"
    return f"{bisect_left(range(2, most), True, key=reached) + 2:,}"


def limits(inputs: Inputs = INPUTS) -> str:
    def late(seconds: float, gateways: int | None, template_bytes: int) -> str:
        def reached(n: int) -> bool:
            return simulate(n, gateways or gateways_for(n), template_bytes, inputs).turn_s >= seconds

        return limit(reached)

    def sent(bytes_per_s: float, template_bytes: int) -> str:
        return limit(lambda n: simulate(n, gateways_for(n), template_bytes, inputs).sent_bytes_per_s >= bytes_per_s)

    found = {
        "the controller is half busy without sending any list": limit(
            lambda n: inputs.turn_s + n * inputs.turn_per_replica_s >= CONTROL_LOOP_S
        ),
        "more replicas than a gateway keeps connections to": limit(lambda n: n > CONNECTIONS),
        "a list holds up a gateway's streams for 5 ms": limit(lambda n: n * inputs.held_up_per_replica_s >= 0.005),
        "for 20 ms": limit(lambda n: n * inputs.held_up_per_replica_s >= 0.020),
    }
    for name, template_bytes in (("no template in the list", 0), ("templates of 4 KB", TEMPLATE_BYTES)):
        found |= {
            f"the controller's turns are 1 s apart: 2 gateways, {name}": late(1.0, 2, template_bytes),
            f"1 s apart: gateways as needed, {name}": late(1.0, None, template_bytes),
            f"2 s apart: gateways as needed, {name}": late(2.0, None, template_bytes),
            f"its node sends 1 Gbit/s of lists: gateways as needed, {name}": sent(125e6, template_bytes),
        }
    lines = ["| limit | replicas |", "|---|---|", *(f"| {name} | {value} |" for name, value in found.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    cases = {
        "2 gateways": (2, 0),
        "2 gateways, templates": (2, TEMPLATE_BYTES),
        "M as needed": (None, 0),
        "M as needed, templates": (None, TEMPLATE_BYTES),
    }
    print(
        f"M as needed: {GATEWAY_LOAD} cores of requests for each gateway. Templates: {TEMPLATE_BYTES:,} bytes each.\n"
    )
    lines: dict[str, list[float]] = {}
    for title, (gateways, template_bytes) in cases.items():
        rows = [simulate(n, gateways or gateways_for(n), template_bytes) for n in SIZES]
        lines[title] = [100 * row.busy for row in rows]
        print(controller(rows, title) + "\n")
    print(f"### Traffic\n\n{traffic()}\n\n### Limits\n\n{limits()}")
    labels = [f"{n:,}" for n in SIZES]
    (args.out / "controller.svg").write_text(chart("How busy the controller is, %, by replicas", labels, lines))


if __name__ == "__main__":
    main()
