"""A replica that does nothing but what Serve's controller asks of one, as often and as long as ours."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import RequestRouterConfig

from backends.base import BackendStats, ModelCard
from deployments import autoscaling
from deployments.app import ROUTER, ROUTING_STATS_S
from deployments.channel import ChannelAddress
from deployments.replica import ReplicaMetadata
from deployments.routing.ask import VERSION

HEALTH_CHECK_S = 5.0
APP, DEPLOYMENT = "tiny", "Tiny"
TEMPLATE_BYTES = 4000
"""A replica's metadata has its model's card, and that the chat template: some KB for a model that can use tools."""


def metadata(port: int, template_bytes: int = TEMPLATE_BYTES) -> dict[str, Any]:
    """What a replica publishes of itself."""
    card = ModelCard(
        context_length=8192,
        slots=8,
        engine="llamacpp",
        vocab_size=49_152,
        parameters=134_515_008,
        file_bytes=98_000_000,
        chat_template="t" * template_bytes,
        path="/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        bos_text="<|im_start|>",
        eos_text="<|im_end|>",
    )
    return ReplicaMetadata(ChannelAddress("10.0.0.1", port, "s" * 32), card, VERSION, 5000.0).to_plain()


def routing_stats(count: int) -> dict[str, Any]:
    return {"v": VERSION, "g": 1_234_567_890, "q": count, "n": 3, "r": 5000, "k": 95, "a": 600}


class Tiny:
    def __init__(self) -> None:
        self._count = 0
        self._moving = False

    async def set_moving(self, moving: bool) -> None:
        """Whether every look at the stats finds new ones."""
        self._moving = moving

    async def check_health(self) -> None:
        pass

    def record_replica_metadata(self) -> dict[str, Any]:
        return metadata(40_000)

    async def record_routing_stats(self) -> dict[str, Any]:
        self._count += self._moving
        return routing_stats(self._count)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return autoscaling.report(BackendStats(slots=8, running=0, waiting=0))


def build(_: dict[str, Any]) -> Application:
    deployment = serve.deployment(
        Tiny,
        name=DEPLOYMENT,
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=64,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # type: ignore[arg-type]  # a path too, says its docstring
            request_routing_stats_period_s=ROUTING_STATS_S,  # type: ignore[arg-type]  # a float too, as in deployments/app.py
        ),
    )
    assert isinstance(deployment, Deployment)
    return deployment.bind()
