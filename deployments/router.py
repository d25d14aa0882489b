"""The thin shell between Serve's request router and `deployments.routing`.

It runs in the gateway's process, one per model. Serve pickles this module by value: keep state and decisions elsewhere.
Above all no msgspec struct may be defined here: its copy has no fields.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import asks, channel
from deployments.channel_call import ChannelReplica
from deployments.replica import ReplicaMetadata
from deployments.routing.ask import VERSION, Ask, Digest
from deployments.routing.decision import Decision, Decisions
from deployments.routing.fleet import ReplicaFacts
from deployments.routing.hint import UNKNOWN, RoutingHint
from deployments.routing.key import PrefixKey
from deployments.routing.policy import Policy, PolicyOptions

logger = logging.getLogger(__name__)

STATS_AT_ONCE = 100


class ModelRouter(RequestRouter):
    """Routes a model's requests by `Policy`, and tells the gateway's channel hub which replicas there are."""

    def initialize_state(self, **_: Any) -> None:
        self._asks = asks.current()
        self._policy = Policy(PolicyOptions(asks=False) if self._asks is None else self._asks.options)
        self._metadata: dict[str, ReplicaMetadata | None] = {}
        self._decisions = Decisions()
        self._candidates: list[RunningReplica] = []
        self._by_id: dict[str, RunningReplica] = {}
        self._unread: dict[str, object] = {}  # what replicas said last, until the policy has heard it
        self._masked: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._asks is not None:
            self._asks.observe(self.app_name, self)

    # --- which replicas there are ------------------------------------------------

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        return ChannelReplica(replica_info)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        known = self._metadata
        self._metadata = {
            id_: known[id_] if id_ in known else ReplicaMetadata.from_plain(running.replica_metadata)
            for running in replicas
            for id_ in (running.replica_id.unique_id,)
        }
        _tell_hub(self.app_name, replicas, self._metadata)
        try:
            self._loop = asyncio.get_running_loop()
            self._list_replicas(replicas)
            feeding = bool(self._unread)
            self._unread = {running.replica_id.unique_id: running.routing_stats for running in replicas}
            if not feeding:
                self._read_stats()
        except Exception:
            # It would end Serve's updates, and the router would never learn of another replica.
            logger.exception("what %s's replicas say of themselves is of no use", self.app_name)

    def _read_stats(self) -> None:
        """Serve brings all replicas' at once. A thousand would hold up the event loop and every stream with it."""
        turn = [(id_, self._unread.pop(id_)) for id_ in list(islice(self._unread, STATS_AT_ONCE))]
        if self._unread and self._loop is not None:
            self._loop.call_soon(self._read_stats)  # first of all: whatever fails below, the others are read
        for id_, stats in turn:
            self._policy.observe_stats(id_, stats, time.monotonic())

    def _list_replicas(self, replicas: Collection[RunningReplica]) -> None:
        self._policy.update_replicas({r.replica_id.unique_id: self._facts(r) for r in replicas}, time.monotonic())
        self._masked = frozenset()

    def _mask(self, broken: frozenset[str]) -> None:
        """These may have died: they are no candidates, until they have a connection again or are thought to live."""
        if self._masked - broken:
            self._list_replicas(self.curr_replicas.values())
        for id_ in broken - self._masked:
            self._policy.lost(id_)
        self._masked = broken

    def _facts(self, running: RunningReplica) -> ReplicaFacts | None:
        metadata = self._metadata[running.replica_id.unique_id]
        if metadata is None:
            return None
        return ReplicaFacts(
            metadata.card.slots, running.max_ongoing_requests, metadata.prefill_rate, metadata.routing_version
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.lost(replica_id.unique_id)

    # --- one request --------------------------------------------------------------

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks for Serve, which takes the first that has room: the best replicas one by one, then all."""
        if pending_request is None:
            return _power_of_two(candidate_replicas)
        # Without it, a turn in which every rank is full is repeated at once, and starves the event loop.
        pending_request.routing_context.should_backoff = True
        try:
            return await self._ranks(candidate_replicas, pending_request)
        except Exception:
            # Serve drops a request whose router raises, and its caller waits forever. Any replica is better than that.
            logger.exception("routing failed; a request of %s goes by the shorter queue of two", self.app_name)
            return _power_of_two(candidate_replicas)

    async def _ranks(self, candidates: list[RunningReplica], pending: PendingRequest) -> list[list[RunningReplica]]:
        hint, name = _hint(pending), pending.metadata.internal_request_id
        if len(candidates) == 1:
            self._policy.take(name, hint.key, candidates[0].replica_id.unique_id, time.monotonic())
            return [candidates]
        broken = frozenset() if self._asks is None else frozenset(self._asks.broken(self.app_name))
        if broken != self._masked:
            self._mask(broken)
        decision = self._decisions.get(name)
        if decision is None:
            decision = await self._decide(hint.key)
            self._decisions.keep(name, decision)
        if candidates is not self._candidates:  # Serve makes a new list when there are others
            self._candidates = candidates
            self._by_id = {running.replica_id.unique_id: running for running in candidates}
        ranks = decision.ranks(self._by_id, broken.union(hint.avoid))
        for best in ranks[0][:1]:
            id_ = best.replica_id.unique_id
            intent = self._policy.charge(name, decision.plan, id_, time.monotonic())
            if self._asks is not None:
                self._asks.chosen(self.app_name, id_, intent)
        return ranks

    async def _decide(self, key: PrefixKey) -> Decision:
        plan = self._policy.plan(key, time.monotonic())
        heard = asks.Heard()
        if plan.ask and self._asks is not None:
            question = Ask(VERSION, key.rungs, key.adapter)
            heard = await self._asks.ask(self.app_name, plan.ask, question, plan.patience_s)
        return Decision(plan, self._policy.rank(plan, heard.replies, time.monotonic(), heard.asked))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        name = pending_request.metadata.internal_request_id
        self._decisions.done(name)
        self._policy.accepted(name, replica_id.unique_id, time.monotonic())
        call = _hint(pending_request).call
        if call and self._asks is not None:
            self._asks.routed(call, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls it from any thread, and for a replica that has refused a request too."""
        self._policy.complete(internal_request_id, time.monotonic())
        self._decisions.refused(internal_request_id, replica_id.unique_id)

    # --- what the gateway tells (`asks.Observer`) ------------------------------------

    def observe_started(self, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None:
        self._on_loop(self._policy.observe_started, key, prompt_tokens, cached_tokens)

    def observe_digest(self, replica: str, digest: Digest) -> None:
        self._on_loop(self._policy.observe_digest, replica, digest, time.monotonic())

    def _on_loop(self, observe: Any, *args: Any) -> None:
        """The policy belongs to the loop Serve runs this router on, which need not be the gateway's."""
        if self._loop is None or self._loop is asyncio.get_running_loop():
            observe(*args)
        else:
            self._loop.call_soon_threadsafe(observe, *args)


def tell_hub(model: str, replicas: list[RunningReplica]) -> None:
    """Tells this process's channel hub which replicas `model` has, and how many requests they take."""
    found = {r.replica_id.unique_id: ReplicaMetadata.from_plain(r.replica_metadata) for r in replicas}
    _tell_hub(model, replicas, found)


def _tell_hub(model: str, replicas: Collection[RunningReplica], metadata: Mapping[str, ReplicaMetadata | None]) -> None:
    hub = channel.current_hub()
    if hub is None:
        return
    addresses = {id_: known.channel for id_, known in metadata.items() if known is not None}
    nodes = {running.replica_id.unique_id: running.node_id for running in replicas}
    hub.set_replicas(model, addresses, sum(running.max_ongoing_requests for running in replicas), nodes)


def _power_of_two(candidates: list[RunningReplica]) -> list[list[RunningReplica]]:
    """Serve takes the shorter queue within a rank."""
    return [random.sample(candidates, 2), candidates] if len(candidates) > 2 else [candidates]


def _hint(pending: PendingRequest) -> RoutingHint:
    hint = pending.kwargs.get("hint")
    return hint if isinstance(hint, RoutingHint) else UNKNOWN
