"""What is simulated: legs of scenarios, and the rules that run in each."""

from __future__ import annotations

import msgspec

from benchmarks.router import workloads
from benchmarks.router.ours import OURS
from benchmarks.router.peers import PEERS
from benchmarks.router.simulation import Add, Change, Drain, Kill, RestartGateway, Rule, Scenario

RULES: dict[str, type[Rule]] = {**PEERS, **OURS}
BEST = "ours C"

LOADS = {
    "conversation": 1.0,
    "synthetic": 1.0,
    "gmi": 1.0,
    "multi": 5.0,
    "chat": 3.0,
    "agents": 7.0,
    "shared": 6.0,
    "hot": 6.0,
    "flip": 6.0,
    "rag": 0.9,
    "rag_sorted": 1.2,
    "unique": 0.7,
}
"""Prompt tokens offered, over what could be computed without caches: about 0.6 of it is left to compute at best."""

ALL = tuple(RULES)
KNOWN = tuple(rule for rule in ALL if rule not in ("random", "shortest queue", "oracle, rho 1", "oracle, rho 3"))
FEW = ("power of two", "Ray prefix", "llm-d", "Dynamo, local load", "Dynamo, global load", "oracle", BEST)
EDGE = ("power of two", "oracle", BEST)


class Leg(msgspec.Struct, frozen=True):
    """`detailed`: a table for each scenario, with all that is measured; else one, with hit and TTFT in each cell."""

    name: str
    title: str
    scenarios: dict[str, Scenario]
    rules: tuple[str, ...]
    detailed: bool = False


def scenario(name: str, load: float | None = None, **other: object) -> Scenario:
    base = name.partition("@")[0].partition("*")[0].partition("/")[0]
    few = {"replicas": 4, "gateways": 4} if base == "gmi" else {}
    plain = {"workload": name, "load": LOADS[base] if load is None else load, **few, **other}
    return msgspec.convert(plain, Scenario)


def churn(replicas: int, until: float, every: float) -> tuple[Change, ...]:
    """One replica after the other is replaced by a new one; now and then a gateway restarts."""
    changes: list[Change] = []
    oldest, at = 0, every
    while at < until:
        changes += [Add(at, 1), Drain(at, oldest)]
        if oldest % 3 == 2:
            changes.append(RestartGateway(at + every / 2, oldest % 8))
        oldest, at = oldest + 1, at + every
    return tuple(changes)


def legs(*, quick: bool = False) -> list[Leg]:
    """With `quick`: fewer workloads, the trace's first 20 minutes, no more than 64 replicas, the rules that matter."""
    main = "conversation@1200" if quick else "conversation"
    if not workloads.available(main):
        main = "chat"
    some = [main, "multi", "unique"] if quick else list(LOADS)
    found = [name for name in some if workloads.available(name)]
    rules, sweep = (("shortest queue", *FEW), EDGE) if quick else (ALL, FEW)
    out = [
        Leg("workloads", "16 replicas, 8 gateways", {name: scenario(name) for name in found}, rules, detailed=True),
        Leg(
            "gateways",
            f"more gateways, {main}",
            {f"M={m}": scenario(main, gateways=m) for m in ((1, 8) if quick else (1, 2, 4, 8, 16))},
            FEW if quick else KNOWN,
        ),
        Leg("replicas", "more replicas at the same load each", _sizes(main, quick=quick), FEW),
        Leg("asks", "slow and lost answers", _asks([main, "multi"], quick=quick), EDGE),
        Leg("changes", "failures and scaling, chat", _changes(quick=quick), sweep, detailed=True),
        Leg("sweeps", f"one setting changed, {main}", _sweeps(main, quick=quick), sweep),
    ]
    if not quick:
        seeds = {f"seed {seed}": scenario(main, seed=seed) for seed in range(1, 6)}
        out.append(Leg("seeds", f"other draws, {main}", seeds, EDGE))
    return out


def _sizes(main: str, *, quick: bool) -> dict[str, Scenario]:
    """Copies of the trace with nothing but the first block in common, the longer lists cut to what is bearable."""
    base = main.partition("@")[0]
    if base == "chat":
        return {f"N={n}": scenario(name, replicas=n) for n, name in ((16, "chat"), (64, "chat*4@300"))}
    sizes = {4: f"{base}/4", 16: base, 64: f"{base}*4@1200"}
    if quick:
        sizes = {16: f"{base}@600", 64: f"{base}*4@300"}
    else:
        sizes |= {256: f"{base}*16@240", 1000: f"{base}*62@90"}
    return {f"N={n}": scenario(name, replicas=n) for n, name in sizes.items()}


def _asks(names: list[str], *, quick: bool) -> dict[str, Scenario]:
    out: dict[str, Scenario] = {}
    for name in names:
        if not quick:
            out |= {f"{name}, {ms} ms": scenario(name, ask_s=ms / 1e3) for ms in (0.1, 3.0)}
        losses = (0.1, 1.0) if quick else (0.0, 0.01, 0.1, 1.0)
        out |= {f"{name}, {loss:.0%} lost": scenario(name, ask_loss=loss) for loss in losses}
    return out


def _changes(*, quick: bool) -> dict[str, Scenario]:
    new, gone = Add(300.0, 8), tuple(Drain(600.0, n) for n in range(8))
    restart = tuple(RestartGateway(450.0, gateway) for gateway in range(8))
    kill = (Kill(450.0, 3), Add(480.0, 1))
    scenarios = {
        "as it is": scenario("chat"),
        "churn: a replica replaced every 60 s": scenario("chat", changes=churn(16, 900, 60)),
        "1 of 8 killed": scenario("chat", replicas=8, changes=kill),
        "all gateways restart": scenario("chat", changes=restart),
    }
    if not quick:
        scenarios |= {
            "8 more, then 8 fewer": scenario("chat", changes=(new, *gone)),
            "rolling restart": scenario("chat", changes=churn(16, 16 * 30.0 + 1, 30)),
            "one replica at half its rate": scenario("chat", slow=0.5),
            "lengths and rates misjudged by 30 %": scenario("chat", misjudged=0.3),
        }
    return scenarios


def _sweeps(main: str, *, quick: bool) -> dict[str, Scenario]:
    out = {"cache/4": scenario(main, cache_tokens=500_000), "publish 10 s": scenario(main, publish_s=10.0)}
    if not quick:
        out |= {"cache*4": scenario(main, cache_tokens=8_000_000), "load*0.6": scenario(main, LOADS[main] * 0.6)}
        out |= {f"publish {s:g} s": scenario(main, publish_s=s) for s in (1.0, 5.0, 30.0)}
        out |= {"misjudged 30 %": scenario(main, misjudged=0.3), "one slow": scenario(main, slow=0.5)}
        out |= {"messages unknown": scenario(main, messages=False)}
        out |= {"engines do not count": scenario(main, engine_counts=False)}
    return out
