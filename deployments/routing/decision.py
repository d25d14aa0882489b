"""One request's decision, kept until a replica has taken the request: Serve may come back for it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar

from deployments.routing.policy import Plan

Replica = TypeVar("Replica")

BEST: Final = 3
"""Replicas that are offered one by one before all others are. Within a rank Serve goes by its own count of requests."""

REMEMBERED: Final = 4096
"""Decisions kept. Serve does not say when a request that waits is cancelled."""


class Decision:
    """`order`: ids of replicas, best first; of a large fleet the best only."""

    def __init__(self, plan: Plan, order: Sequence[str]) -> None:
        self.plan = plan
        self.order = order

    def refused_by(self, replica: str) -> None:
        self.order = [*(id_ for id_ in self.order if id_ != replica), replica]

    def ranks(self, candidates: Mapping[str, Replica], shunned: Collection[str]) -> list[list[Replica]]:
        """The best of `candidates` one by one, then all that are not to be shunned, then everybody.

        The last rank has everybody: one full or slow replica must not hold a request that others could run. But those
        that may be dead come only after all others: to Serve, a dead replica is the one with the shortest queue.
        """
        best = [id_ for id_ in self.order if id_ in candidates and id_ not in shunned][:BEST]
        if len(best) < BEST:  # others came, or came back, since
            others = [id_ for id_ in candidates if id_ not in best and id_ not in shunned]
            best += random.sample(others, min(BEST - len(best), len(others)))
        ranks = [[candidates[id_]] for id_ in best]
        if best and shunned:
            good = [replica for id_, replica in candidates.items() if id_ not in shunned]
            if len(good) < len(candidates):
                ranks.append(good)
        return [*ranks, list(candidates.values())]


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
