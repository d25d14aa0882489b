"""A replica's book of what its engine holds, kept from the frames that pass, and the answers to routers that ask."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from deployments.channel import GatewayLink
from deployments.routing.ask import VERSION, ToGateway, ToReplica
from deployments.routing.hint import RoutingHint
from deployments.routing.tracker import RATE_MIN_TOKENS, Tracker
from protocols.card import BackendStats, ModelCard
from protocols.events import Failed, Frame, Progress, Started

logger = logging.getLogger(__name__)

LARGE_FLEET: Final = 32
LARGE_FLEET_STATS_S: Final = 10.0
"""Serve sends every change of any replica's stats to every router: with many replicas each changes more rarely."""

_FLOPS: Final = {"llama.cpp": 5e10, "vllm": 2e14}
"""About what an engine does per second, on the machines it is made for: a first guess, until prompts were timed."""
_USUAL_RATE: Final = 1000.0

_decoder = msgspec.msgpack.Decoder(ToReplica)


class Entry:
    """One request on the book, from `Book.enter` to the end of the `async with` block, however it ends."""

    def __init__(self, book: Book, name: str, hint: RoutingHint) -> None:
        self._book = book
        self._name = name
        self._uncached = 0
        self._computing = True
        self._generated = 0
        book.tracker.admit(name, hint.key, time.monotonic())

    def observe(self, frame: Frame) -> None:
        if frame.tokens:
            self._generated += len(frame.tokens)
        if not self._computing:
            return
        for event in frame.events:
            match event:
                case Started():
                    self._uncached = event.prompt_tokens - event.cached_tokens
                    self._book.tracker.started(self._name, event.prompt_tokens, event.cached_tokens, time.monotonic())
                case Progress() | Failed():
                    pass
                case _:
                    self._end_prefill()
        if frame.tokens:
            self._end_prefill()

    def _end_prefill(self) -> None:
        if self._computing:
            self._computing = False
            self._book.tracker.first_token(self._name, time.monotonic())
            if self._uncached >= RATE_MIN_TOKENS:
                self._book.observe_rate()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._book.tracker.finish(self._name, self._generated, time.monotonic())


class Book:
    """One per replica; belongs to its event loop."""

    def __init__(self, card: ModelCard, engine: Callable[[], BackendStats], max_ongoing: int) -> None:
        """`engine`: its own counts, now."""
        self._engine = engine
        self._names = itertools.count()
        self._replicas = 1
        self._told: dict[str, Any] = {}
        self._told_at = float("-inf")
        self.expected_rate = _expected_rate(card)
        self.tracker = Tracker(
            engine().kv_tokens_capacity or card.slots * card.context_length,
            self.expected_rate,
            card.slots,
            max_ongoing,
            generation=secrets.randbits(32),
        )

    def enter(self, hint: RoutingHint) -> Entry:
        """A request has come. It counts from here on."""
        return Entry(self, str(next(self._names)), hint)

    def observe_rate(self) -> None:
        self.tracker.observe_rate(self._engine().prefill_tokens_per_s)

    def stats(self) -> dict[str, Any]:
        """For Serve's routers (`Tracker.stats`)."""
        now = time.monotonic()
        if self._replicas <= LARGE_FLEET or now - self._told_at >= LARGE_FLEET_STATS_S:
            self._told = self.tracker.stats(now, self._queued())
            self._told_at = now
        return self._told

    def on_aside(self, link: GatewayLink, message: bytes) -> None:
        """A router's message. What is not understood is another version's, and is passed over."""
        try:
            answer = self._answer(_decoder.decode(message))
        except msgspec.DecodeError:
            return
        except Exception:
            # It would end the connection, and with it the streams of requests that have nothing to do with it.
            logger.exception("a router's question could not be answered")
            return
        if answer is not None:
            link.send(answer)

    def _answer(self, message: ToReplica) -> ToGateway | None:
        now = time.monotonic()
        if message.intent is not None:
            self.tracker.intend(message.intent, now)
        if message.ask is not None:
            return ToGateway(message.number, reply=self.tracker.answer(message.ask, now, self._queued()))
        if message.pull is not None and message.pull.version == VERSION:
            self._replicas = message.pull.replicas
            return ToGateway(message.number, digest=self.tracker.digest(message.pull.since))
        return None

    def _queued(self) -> int | None:
        """None where the engine does not count them, or has nothing queued: the tracker knows as much."""
        return self._engine().uncached_tokens_queued or None


def _expected_rate(card: ModelCard) -> float:
    """Prompt tokens per second: two operations for each parameter and token."""
    flops = _FLOPS.get(card.engine)
    return flops / (2 * card.parameters) if flops and card.parameters else _USUAL_RATE
