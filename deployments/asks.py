"""The router's questions to replicas, over the step channel's connections: what they hold, how long they would take.

A question has a deadline (`Plan.patience_s`) and no retry. Who is not connected is not asked, and whose answer is late
goes without: that costs prefix hits, and nothing else. Beside it, digests are fetched now and then
(`routing/policy.py` says what for).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec

from deployments.channel import ChannelHub, ReplicaLink, framed
from deployments.routing.ask import VERSION, Ask, AskReply, Digest, DigestPull, Intent, ToGateway, ToReplica
from deployments.routing.key import PrefixKey
from deployments.routing.policy import PolicyOptions

logger = logging.getLogger(__name__)

OTHER_LOOP_S: Final = 0.05
"""So much longer a router waits that is on another event loop than the hub's, which may be busy."""
DIGESTS_S: Final = 2.0
LARGE_FLEET: Final = 32
LARGE_FLEET_TURNS: Final = 5
"""Of more than `LARGE_FLEET` replicas a digest is fetched each 5th time, every 10 s."""

_decoder = msgspec.msgpack.Decoder(ToGateway)


class Observer(Protocol):
    """A model's router, told of what the gateway sees. On the hub's loop."""

    def observe_started(self, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None: ...

    def observe_digest(self, replica: str, digest: Digest) -> None: ...


class Heard(msgspec.Struct, frozen=True):
    """`asked`: those that could be asked; `replies` of those that answered in time. Both by replica id."""

    asked: Collection[str] = ()
    replies: Mapping[str, AskReply] = {}


class _Round:
    def __init__(self, waiting: dict[ReplicaLink, str], done: asyncio.Future[None]) -> None:
        self.waiting = waiting
        self.replies: dict[str, AskReply] = {}
        self.done = done

    def settle(self, link: ReplicaLink, reply: AskReply | None) -> None:
        replica = self.waiting.pop(link, None)
        if replica is not None and reply is not None:
            self.replies[replica] = reply
        if not self.waiting:
            self.end()

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Asks:
    """One per gateway. Belongs to the hub's loop, except `ask`, `chosen` and `observe`, which any thread may call."""

    def __init__(self, hub: ChannelHub, options: PolicyOptions) -> None:
        """`options` are for the routers, which Serve makes."""
        self.options = options
        self._hub = hub
        self._loop = hub.loop
        self._numbers = itertools.count(1)
        self._rounds: dict[int, _Round] = {}
        self._observers: dict[str, Observer] = {}
        self._positions: dict[ReplicaLink, int] = {}
        self._pulls: dict[int, tuple[str, str]] = {}  # number -> model and replica
        self._turn = 0
        self._timer: asyncio.TimerHandle | None = None
        hub.on_aside = self._hear
        hub.on_lost = self._lost

    def start(self) -> None:
        """Begin to fetch digests. Without asks nobody would know what to make of them."""
        if self.options.asks:
            self._timer = self._loop.call_later(DIGESTS_S, self._pull)

    def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, model: str, observer: Observer) -> None:
        self._observers[model] = observer

    def started(self, model: str, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None:
        """A request of `model` has begun at some replica."""
        observer = self._observers.get(model)
        if observer is not None:
            observer.observe_started(key, prompt_tokens, cached_tokens)

    async def ask(self, model: str, replicas: Collection[str], ask: Ask, within_s: float) -> Heard:
        """Asks those of `replicas` that are connected. Returns when all have answered, or after `within_s`."""
        if asyncio.get_running_loop() is self._loop:
            return await self._ask(model, replicas, ask, within_s)
        answers = asyncio.run_coroutine_threadsafe(self._ask(model, replicas, ask, within_s), self._loop)
        try:
            async with asyncio.timeout(within_s + OTHER_LOOP_S):
                return await asyncio.wrap_future(answers)
        except TimeoutError:
            return Heard()

    def chosen(self, model: str, replica: str, intent: Intent | None) -> None:
        """A request is going to `replica`. It is told first, so that it counts the request in its next answers."""
        if _running_loop() is self._loop:
            self._tell(model, replica, intent)
        else:
            self._loop.call_soon_threadsafe(self._tell, model, replica, intent)

    def routed(self, call: int, replica: str) -> None:
        """`replica` has taken the gateway's call of this number."""
        self._hub.routed(call, replica)

    def broken(self, model: str) -> Collection[str]:
        """Replicas that may have died just now."""
        return self._hub.broken(model)

    async def _ask(self, model: str, replicas: Collection[str], ask: Ask, within_s: float) -> Heard:
        self._hub.use(model, replicas)
        links = {link: id_ for id_ in replicas if (link := self._hub.link(model, id_)) is not None}
        if not links:
            return Heard()
        number = next(self._numbers)
        round_ = self._rounds[number] = _Round(dict(links), self._loop.create_future())
        message = bytes(framed(ToReplica(number, ask=ask)))
        for link in links:
            link.transport.write(message)
        deadline = self._loop.call_later(within_s, self._late, round_)
        try:
            await round_.done
        finally:
            deadline.cancel()
            del self._rounds[number]
        return Heard(links.values(), round_.replies)

    def _late(self, round_: _Round) -> None:
        # What came while this loop was busy has arrived in time. Two turns: some loops look at sockets after timers.
        self._loop.call_soon(self._loop.call_soon, round_.end)

    def _tell(self, model: str, replica: str, intent: Intent | None) -> None:
        self._hub.use(model, (replica,))
        link = self._hub.link(model, replica)
        if intent is not None and link is not None:
            link.send(ToReplica(intent=intent))

    def _hear(self, link: ReplicaLink, message: bytes) -> None:
        try:
            answer = _decoder.decode(message)
        except msgspec.DecodeError:
            return  # another version's
        if answer.reply is not None and (round_ := self._rounds.get(answer.number)) is not None:
            round_.settle(link, answer.reply)
        if answer.digest is not None and (asked := self._pulls.pop(answer.number, None)) is not None:
            self._observe(link, *asked, answer.digest)

    def _observe(self, link: ReplicaLink, model: str, replica: str, digest: Digest) -> None:
        try:
            self._observers[model].observe_digest(replica, digest)
            self._positions[link] = digest.position
        except Exception:
            # It would end the connection, and with it streams that have nothing to do with it.
            logger.exception("a digest of %s is of no use", model)

    def _lost(self, link: ReplicaLink) -> None:
        self._positions.pop(link, None)
        for round_ in list(self._rounds.values()):
            round_.settle(link, None)

    def _pull(self) -> None:
        self._timer = self._loop.call_later(DIGESTS_S, self._pull)
        self._turn += 1
        self._pulls.clear()
        for model, replicas in self._hub.replicas().items():
            if len(replicas) < 2 or model not in self._observers:
                continue
            if len(replicas) > LARGE_FLEET and self._turn % LARGE_FLEET_TURNS:
                continue
            for replica in replicas:
                link = self._hub.link(model, replica)
                if link is not None:
                    number = next(self._numbers)
                    self._pulls[number] = (model, replica)
                    pull = DigestPull(VERSION, self._positions.get(link, 0), len(replicas))
                    link.send(ToReplica(number, pull=pull))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_asks: Asks | None = None


def install(asks: Asks | None) -> None:
    """Make `asks` the ones of this process's routers. Serve builds routers: nothing can be passed."""
    global _asks
    _asks = asks


def current() -> Asks | None:
    return _asks
