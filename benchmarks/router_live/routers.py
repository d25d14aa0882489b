"""The rules ours is compared with, as Serve ships them. Each also tells the channel hub where the replicas are, so that
tokens travel the same way under every rule and only the choice of the replica differs.
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter as RayPrefixRouter,
)
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.router import tell_hub
from protocols.request import ChatPrompt, Request


class _TellsHub(RequestRouter):
    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        tell_hub(self.app_name, replicas)


class PowerOfTwo(_TellsHub, PowerOfTwoChoicesRequestRouter):
    """Serve's default: the shorter queue of two random replicas, by requests."""


class PrefixAffinity(_TellsHub, RayPrefixRouter):
    """Ray Serve LLM's `PrefixCacheAffinityRouter`, with the text of our requests instead of its own."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        payload: Any = pending_request.args[0]
        # Serve pickles this module by value, and a decoder cannot be.
        request = msgspec.msgpack.decode(payload, type=Request)
        assert isinstance(request.prompt, ChatPrompt)
        return "".join(getattr(part, "text", "") for message in request.prompt.messages for part in message.content)
