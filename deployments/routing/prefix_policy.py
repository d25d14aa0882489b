"""Which replica a request should go to: cost in seconds over prefixes, queues and load. One `Policy` per gateway, model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from deployments.routing.ask import VERSION, AskReply, Digest, Intent
from deployments.routing.key import PrefixKey


class ReplicaFacts(msgspec.Struct, frozen=True):
    """What a replica published when it became ready. `prefill_rate`: a first guess, tokens per second."""

    slots: int
    max_ongoing: int
    prefill_rate: float
    version: int = VERSION


class PolicyOptions(msgspec.Struct, frozen=True):
    """`affinity_weight` is 1+ρ of the cost; None: learnt from the fleet's reuse."""

    asks: bool = True
    affinity_weight: float | None = None
    owners: int = 2
    others: int = 4
    adapter_load_s: float = 1.0
    seed: int | None = None


class Plan:
    """One request's decision in the making. `ask`: ids of the replicas to ask, possibly none."""

    ask: tuple[str, ...]
    key: PrefixKey
    prompt_tokens: float


class Policy:
    """All of a gateway's knowledge of one model's replicas. Thread-safe where Serve calls from threads: `complete`."""

    def __init__(self, options: PolicyOptions = PolicyOptions()) -> None: ...

    def update_replicas(self, replicas: Mapping[str, ReplicaFacts | None], now: float) -> None:
        """The replicas there are now; None: another version's, or nothing is known."""
        raise NotImplementedError

    def observe_stats(self, replica: str, plain: object, now: float) -> None:
        """What `Tracker.stats` said; anything else than that is clamped or ignored."""
        raise NotImplementedError

    def observe_digest(self, replica: str, digest: Digest, now: float) -> None:
        raise NotImplementedError

    def observe_started(self, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's first frame: bytes per token and the fleet's reuse are learnt from it."""
        raise NotImplementedError

    def lost(self, replica: str) -> None:
        """It has died: not a candidate until it is listed anew."""
        raise NotImplementedError

    def plan(self, key: PrefixKey, now: float) -> Plan:
        raise NotImplementedError

    def rank(
        self, plan: Plan, replies: Mapping[str, AskReply], now: float, asked: Collection[str] | None = None
    ) -> list[str]:
        """All replicas, best first. `asked`: those of `plan.ask` that could be reached; None: all of them."""
        raise NotImplementedError

    def charge(self, request: str, plan: Plan, replica: str, now: float) -> Intent:
        """`request` goes to `replica`: counts at once. Returns what to send there."""
        raise NotImplementedError

    def accepted(self, request: str, replica: str, now: float) -> None:
        """The replica that took it, which may be another one."""
        raise NotImplementedError

    def complete(self, request: str, now: float) -> None:
        """It is over, or was never taken. May be called from any thread, twice, or never."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        raise NotImplementedError
