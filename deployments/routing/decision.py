"""One request's decision, kept until a replica has taken the request: Serve may come back for it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from deployments.routing.policy import Plan

BEST: Final = 3
"""Replicas that are offered one by one before all others are. Within a rank Serve goes by its own count of requests."""

REMEMBERED: Final = 4096
"""Decisions kept. Serve does not say when a request that waits is cancelled."""


class Decision:
    """`order`: ids of replicas, best first."""

    def __init__(self, plan: Plan, order: Sequence[str]) -> None:
        self.plan = plan
        self.order = order

    def refused_by(self, replica: str) -> None:
        self.order = [*(id_ for id_ in self.order if id_ != replica), replica]

    def ranks(self, candidates: Collection[str], shunned: Collection[str]) -> list[list[str]]:
        """The best of `candidates` one by one, the others together, and all of them if some are to be shunned.

        The last rank has everybody: one full or slow replica must not hold a request that others could run. But those
        that may be dead come only after all others: to Serve, a dead replica is the one with the shortest queue.
        """
        order = [id_ for id_ in self.order if id_ in candidates]
        new = set(candidates).difference(order)
        order += random.sample(sorted(new), len(new))  # they came, or came back, since
        good = [id_ for id_ in order if id_ not in shunned]
        ranks = [[id_] for id_ in good[:BEST]]
        if good and len(good) < len(order):
            ranks.append(good)
        return [*ranks, order]


class Decisions:
    """By request, of bounded number. `refused` may be called from any thread."""

    def __init__(self) -> None:
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._decisions)

    def get(self, request: str) -> Decision | None:
        return self._decisions.get(request)

    def keep(self, request: str, decision: Decision) -> None:
        self._decisions[request] = decision
        if len(self._decisions) > REMEMBERED:
            self._decisions.popitem(last=False)

    def done(self, request: str) -> None:
        self._decisions.pop(request, None)

    def refused(self, request: str, replica: str) -> None:
        decision = self._decisions.get(request)
        if decision is not None:
            decision.refused_by(replica)
