"""The composition root: what the `import_path` of a Serve config names.

    deployments.app:gateway    one application, route prefix `/`: HTTP, routing, every dialect
    deployments.app:model      one application per model, without a route: its name is the model id

One application per model because a change of an application's `args` restarts all its deployments: adding a model must
touch neither the gateway nor another model. All Serve options can be set in the config's `deployments:` section; what
is set here are the defaults.
"""

from __future__ import annotations

import logging
from typing import Any

import ray.util
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deployments import garbage, http_protocol, ray_compat
from deployments.autoscaling import POLICY
from deployments.gateway import GatewayReplica
from deployments.held import Held
from deployments.middleware import ASGIApp
from deployments.monitor import replica_samples
from deployments.ray_metrics import RayMetrics
from deployments.replica import Replica
from deployments.resources import replica_options
from deployments.settings import (
    GATEWAY_ENV,
    MODEL_DEPLOYMENT,
    GatewaySettings,
    HotSettings,
    ModelSettings,
    parse,
    ray_collects_metrics,
)

ROUTER = "deployments.router.ModelRouter"
STREAMS_PER_GATEWAY = 4096
SURGE_PERCENT = 25
"""Of the replicas, rounded up, are added before as many old ones stop when a deployment is updated. Serve's default is
0: it stops first. Where there is no room for one more, a config sets `max_surge_percent: 0` for the deployment."""

ROUTING_STATS_S = 2.0
DRAIN_S = 600.0
"""How long a stopping replica may finish its streams. Serve's default of 20 s cuts every longer answer."""


def _log_with_serve() -> None:
    """Send this project's log lines where Serve's go: the replica's own file, and the dashboard."""
    serve_log = logging.getLogger("ray.serve")
    for package in ("protocols", "backends", "deployments", "tokenyard"):
        log = logging.getLogger(package)
        log.handlers = list(serve_log.handlers)
        log.setLevel(serve_log.level)
        log.propagate = False


class _Model(Replica):
    """Serve's name for `Replica`. Serve awaits constructors, and calls `__del__` when the replica has drained."""

    async def __init__(self, settings: ModelSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_with_serve()
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(settings, ray.util.get_node_ip_address(), name)  # type: ignore[no-untyped-call]  # Ray does not type it
        self._metrics = RayMetrics() if ray_collects_metrics() else None
        self._of = serve.get_replica_context().app_name, name
        await self.start()
        garbage.freeze()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it behind the constructor and whenever the config's `user_config` has changed, but not when it
        is no more: an empty one takes back what the last one said.
        """
        self.change(parse(HotSettings, user_config, "user_config"))

    async def check_health(self) -> None:
        await super().check_health()
        if self._metrics is not None:
            self._metrics.show(list(replica_samples(*self._of, self.stats())))

    async def __del__(self) -> None:
        await self.aclose()


class _Entry:
    """The ingress deployment of a model application: it has no route, no replica and no caller.

    Every Serve application has one, and under HAProxy Serve refuses a request router on it. So `Model` is not it.
    """

    def __init__(self, model: object) -> None:
        self._model = model


@serve.ingress()
class _Gateway:
    """Serve's name for `GatewayReplica`; Serve asks for the ASGI app after the constructor."""

    async def __init__(self, settings: GatewaySettings) -> None:  # type: ignore[misc]  # Serve awaits it
        _log_with_serve()
        logging.getLogger("tokenyard.request").disabled = not settings.request_log
        ray_compat.leave_disconnects_to_the_app()
        http_protocol.install()
        self._gateway = GatewayReplica(settings)
        self._app = await self._gateway.start()
        garbage.freeze()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        self._gateway.report()

    async def held(self) -> Held:
        """Not a plain function: Serve would run it in a thread."""
        return self._gateway.held()

    async def __del__(self) -> None:
        await self._gateway.aclose()


def gateway(args: dict[str, Any]) -> Application:
    """The gateway application. `args` are `GatewaySettings`."""
    settings = parse(GatewaySettings, args)
    deployment = _deployment(
        _Gateway,
        name="Gateway",
        max_ongoing_requests=STREAMS_PER_GATEWAY,
        graceful_shutdown_timeout_s=DRAIN_S,
        max_surge_percent=SURGE_PERCENT,
        logging_config=LoggingConfig(enable_access_log=False),  # `request_log.py` says more, in one line
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": GATEWAY_ENV}},
    )
    return deployment.bind(settings)


def model(args: dict[str, Any]) -> Application:
    """A model's application. `args` are `ModelSettings`."""
    settings = parse(ModelSettings, args)
    deployment = _deployment(
        _Model,
        name=MODEL_DEPLOYMENT,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        autoscaling_config=_scaling(settings.backend.slots),
        graceful_shutdown_timeout_s=DRAIN_S,
        max_surge_percent=SURGE_PERCENT,
        health_check_period_s=5,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # type: ignore[arg-type]  # a path too, says its docstring
            # Replicas of a large fleet change what they say more rarely (`bookkeeping.py`).
            request_routing_stats_period_s=ROUTING_STATS_S,  # type: ignore[arg-type]
        ),
        **replica_options(settings.backend),
    )
    entry = _deployment(
        _Entry,
        name="Entry",
        autoscaling_config=AutoscalingConfig(min_replicas=0, initial_replicas=0, max_replicas=1),
        ray_actor_options={"num_cpus": 0},
    )
    return entry.bind(deployment.bind(settings))


def _scaling(slots: int) -> AutoscalingConfig:
    """One replica, until the config's `autoscaling_config` says otherwise. It takes the place of all of this, so it
    has to name the policy too: Serve does not merge the two.
    """
    return AutoscalingConfig(
        min_replicas=1,
        max_replicas=1,
        target_ongoing_requests=slots,
        upscale_delay_s=10.0,
        policy=AutoscalingPolicy(policy_function=POLICY),  # type: ignore[no-untyped-call]  # Ray does not type it
    )


def _deployment(cls: type, **options: Any) -> Deployment:
    deployment = serve.deployment(cls, **options)
    assert isinstance(deployment, Deployment)
    return deployment
