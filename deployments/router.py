"""The thin shell between Serve's request router and `deployments.routing`.

It runs in the gateway's process, one per model. Serve pickles this module by value: keep state and decisions elsewhere.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import channel, replica
from deployments.routing import policy
from deployments.routing.load import TokenLoad

logger = logging.getLogger(__name__)


class ModelRouter(RequestRouter):
    """Routes a model's requests by `policy.rank`, and tells the gateway's channel hub which replicas there are."""

    def initialize_state(self, **_: Any) -> None:
        self._load = TokenLoad()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._load.keep_only(running.replica_id.unique_id for running in replicas)
        tell_hub(self.app_name, replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks for Serve: the best replica, the next best, then all. Serve takes the first that has room."""
        if pending_request is not None:
            # Without it, a turn in which every rank is full is repeated at once, and starves the event loop.
            pending_request.routing_context.should_backoff = True
        try:
            ranked = self._rank(candidate_replicas, pending_request)
        except Exception:
            # Serve drops a request whose router raises, and its caller waits forever. Any replica is better than that.
            logger.exception("routing failed; any replica of %s may take the request", self.app_name)
            return [candidate_replicas]
        # The last rank is everybody: one full or slow replica must not hold a request that others could run.
        return [[best] for best in ranked[:2]] + [candidate_replicas]

    def _rank(self, candidates: list[RunningReplica], pending: PendingRequest | None) -> list[RunningReplica]:
        by_id = {running.replica_id.unique_id: running for running in candidates}
        ids = list(by_id)
        random.shuffle(ids)
        now = time.monotonic()
        ranked = policy.rank(ids, self._load.snapshot(now))
        if pending is not None and ranked:
            self._load.reserve(pending.metadata.internal_request_id, ranked[0], _hint(pending).tokens, now)
        return [by_id[replica_id] for replica_id in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._load.accept(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._load.release(internal_request_id)


def tell_hub(model: str, replicas: list[RunningReplica]) -> None:
    """Tells this process's channel hub which replicas `model` has, and how many requests they take."""
    hub = channel.current_hub()
    if hub is None:
        return
    addresses = {}
    for running in replicas:
        metadata = replica.ReplicaMetadata.from_plain(running.replica_metadata)
        if metadata is not None:
            addresses[running.replica_id.unique_id] = metadata.channel
    hub.set_replicas(model, addresses, sum(running.max_ongoing_requests for running in replicas))


def _hint(pending: PendingRequest) -> policy.RoutingHint:
    hint = pending.kwargs.get("hint")
    return hint if isinstance(hint, policy.RoutingHint) else policy.RoutingHint(tokens=policy.TYPICAL_OUTPUT_TOKENS)
