"""The shell around `http.py` in one Serve replica: no engine, no model, any number of copies."""

from __future__ import annotations

from deployments import asks, channel
from deployments.dispatch import Dispatcher
from deployments.held import Held, held
from deployments.http import build_app
from deployments.middleware import ASGIApp
from deployments.monitor import Monitor
from deployments.naming import NamedModels
from deployments.ray_metrics import RayMetrics
from deployments.routing.policy import PolicyOptions
from deployments.settings import GatewaySettings, ray_collects_metrics


class GatewayReplica:
    """Owns the channel hub and the dispatcher of one gateway process."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._metrics = RayMetrics() if ray_collects_metrics() else None

    async def start(self) -> ASGIApp:
        settings = self._settings
        self._hub = channel.ChannelHub(
            settings.stream_buffer_frames, settings.handover_after_s, settings.max_channel_connections
        )
        channel.install_hub(self._hub)
        self._asks = asks.Asks(self._hub, PolicyOptions(asks=settings.asks, affinity_weight=settings.affinity_weight))
        asks.install(self._asks)
        self._asks.start()
        self._dispatcher = Dispatcher(settings, self._hub, self._asks)
        self._dispatcher.catalog.start()
        pool = NamedModels(self._dispatcher)
        self._monitor = Monitor(pool) if self._metrics is None else Monitor(pool, self._metrics)
        return build_app(pool, self._settings, echo_request_id=False, monitor=self._monitor)

    def report(self) -> None:
        """Shows Ray the metrics that are not counted along the way; replicas show theirs themselves."""
        if self._metrics is not None:
            self._metrics.show(self._monitor.gauges())

    def held(self) -> Held:
        return held(self._hub.streams)

    async def aclose(self) -> None:
        channel.install_hub(None)
        asks.install(None)
        self._asks.aclose()
        await self._dispatcher.catalog.aclose()
        await self._hub.aclose()
