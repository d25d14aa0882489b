"""How all models are doing, for whoever looks: metrics and the page. Looking wakes no model and keeps none awake."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from deployments.models import ModelEntry, ModelPool
from protocols.calls import GetAllStats, ReplicaStats
from protocols.errors import ServingError

logger = logging.getLogger(__name__)

KEPT_S = 1.0
"""How long an answer is given again: many may be looking."""

WITHIN_S = 2.0
"""How long a model's replicas may take to say how they are. Then the look goes on without them."""

SILENT_S = 15.0
"""How long a model is left alone that did not answer in time. Such calls of Serve's cannot be taken back."""


class ModelState(msgspec.Struct, frozen=True):
    """`replicas` is None where there are some and they do not say."""

    entry: ModelEntry
    names: tuple[str, ...]
    replicas: tuple[ReplicaStats, ...] | None


class ModelStates:
    def __init__(self, pool: ModelPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._states: Sequence[ModelState] = ()
        self._looked_at = float("-inf")
        self._silent_until: dict[str, float] = {}
        self._looking = asyncio.Lock()

    async def look(self) -> Sequence[ModelState]:
        """All models in order of their ids, at most `KEPT_S` old."""
        async with self._looking:
            if self._clock() - self._looked_at >= KEPT_S:
                entries = self._pool.models()
                names = {entry.id: tuple(e.id for e in entries if e.of == entry.id) for entry in entries}
                self._states = await asyncio.gather(
                    *(self._state(entry, names[entry.id]) for entry in entries if not entry.of)
                )
                self._looked_at = self._clock()
            return self._states

    async def _state(self, entry: ModelEntry, names: tuple[str, ...]) -> ModelState:
        return ModelState(entry, names, await self._ask(entry.id) if entry.replicas else ())

    async def _ask(self, model: str) -> tuple[ReplicaStats, ...] | None:
        if self._clock() < self._silent_until.get(model, 0.0):
            return None
        try:
            async with asyncio.timeout(WITHIN_S):
                answers: list[ReplicaStats] = await self._pool.call(GetAllStats("states", model))
                return tuple(answers)
        except TimeoutError:
            logger.warning("%s did not say within %g s how it is", model, WITHIN_S)
            self._silent_until[model] = self._clock() + SILENT_S
        except ServingError as error:
            logger.debug("%s does not say how it is: %s", model, error.message)
        return None
