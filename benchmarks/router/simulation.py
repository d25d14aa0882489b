"""The event loop: requests arrive at gateways, a rule chooses, replicas serve; and what is measured on the way."""

from __future__ import annotations

import enum
import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import msgspec
import numpy as np

from benchmarks.router.fleet import Fleet, Floats, Ints, Served
from benchmarks.router.measures import Recorder, Result
from benchmarks.router.workloads import Request, Workload

RETRY_S = 0.1
"""Seconds after which a gateway sends a request again whose replica died before the first token."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """The replica dies with its cache. Its requests without a first token are sent again, the others are cut."""

    at: float
    replica: int


class Add(msgspec.Struct, frozen=True, tag=True):
    at: float
    replicas: int


class Drain(msgspec.Struct, frozen=True, tag=True):
    at: float
    replica: int


class RestartGateway(msgspec.Struct, frozen=True, tag=True):
    """The gateway begins again with what a new process knows."""

    at: float
    gateway: int


Change = Kill | Add | Drain | RestartGateway


class Scenario(msgspec.Struct, frozen=True):
    """All that decides a run but the rule. `load`: prompt tokens offered, over what all replicas could compute without
    caches. `slow`: replica 0's rate over the others'. `misjudged`: by how much gateways err, either way, about the
    length of a prompt, and about a replica's rate until it has measured it. `messages`: the ends of messages are known.
    `engine_counts`: engines say how many tokens they have yet to compute; else replicas keep book of it.
    """

    workload: str
    load: float
    replicas: int = 16
    gateways: int = 8
    cache_tokens: int = 2_000_000
    publish_s: float = 2.0
    ask_s: float = 0.0005
    ask_loss: float = 0.0
    seed: int = 1
    decode_s: float = 0.03
    max_sequences: int = 256
    slow: float = 1.0
    misjudged: float = 0.0
    messages: bool = True
    engine_counts: bool = True
    changes: tuple[Change, ...] = ()


class World:
    """What rules can look at. Those that claim to know the truth read `fleet`; others only what a gateway saw."""

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        self.scenario = scenario
        self.workload = workload
        self.random = random.Random(scenario.seed)
        self.rate = workload.tokens / workload.span_s / scenario.replicas / scenario.load
        added = sum(change.replicas for change in scenario.changes if isinstance(change, Add))
        total = scenario.replicas + added
        capacity = max(1, scenario.cache_tokens // workload.block_tokens)
        self.fleet = Fleet(total, self.rate, capacity, scenario.max_sequences)
        self.fleet.start(range(scenario.replicas))
        self.sent_requests: list[Ints] = [np.zeros(total, np.int64) for _ in range(scenario.gateways)]
        """By gateway: requests it sent to each replica and that are not finished."""
        self.sent_tokens: list[Ints] = [np.zeros(total, np.int64) for _ in range(scenario.gateways)]
        """By gateway: uncached tokens of those that have no first token."""
        self._resident: tuple[int, int, Ints] | None = None
        self._served = itertools.count()
        self._version = -1

    def resident(self, request: Request) -> Ints:
        """Exact: tokens of the prompt that each replica need not compute."""
        if self._resident is None or self._resident[:2] != (request.index, self._version):
            depths = self.fleet.resident.depths(request.blocks)
            tokens = np.minimum(depths * self.workload.block_tokens, request.tokens - 1)
            self._resident = (request.index, self._version, tokens)
        return self._resident[2]

    def caches_changed(self) -> None:
        self._version = next(self._served)

    def least(self, costs: Floats | Ints) -> int:
        """The replica of least cost among those alive; ties are drawn."""
        masked = np.where(self.fleet.alive, costs, np.inf)
        ties = np.flatnonzero(masked == masked.min())
        return int(ties[0]) if len(ties) == 1 else int(self.random.choice(ties.tolist()))


class Rule:
    """A routing rule, as all gateways run it. Only `choose` has to be there."""

    def __init__(self, world: World) -> None:
        self.world = world

    def ask(self, request: Request, gateway: int, now: float) -> Sequence[int]:
        """The replicas to ask before `choose`; with none, `choose` is called at once."""
        return ()

    def answer(self, request: Request, replica: int, now: float) -> object:
        """What the replica says; the time is that at which the question reaches it."""
        raise NotImplementedError

    def choose(self, request: Request, gateway: int, answers: Mapping[int, object], now: float) -> int:
        raise NotImplementedError

    def routed(self, request: Request, gateway: int, served: Served, now: float) -> None: ...

    def first_token(self, request: Request, gateway: int, served: Served, now: float) -> None: ...

    def finished(self, request: Request, gateway: int, served: Served, now: float) -> None: ...

    def published(self, now: float) -> None:
        """The moment for replicas to tell all gateways about themselves."""

    def died(self, request: Request, gateway: int, served: Served, now: float) -> None:
        """Its replica did, in place of `first_token` and `finished` as far as they are to come."""

    def replicas_changed(self, now: float) -> None: ...

    def gateway_restarted(self, gateway: int, now: float) -> None: ...


class _Kind(enum.Enum):
    ARRIVE = enum.auto()
    ASKED = enum.auto()
    DECIDE = enum.auto()
    FIRST_TOKEN = enum.auto()
    FINISH = enum.auto()
    PUBLISH = enum.auto()
    CHANGE = enum.auto()


class _Flight(msgspec.Struct):
    """A request on its way. `over`: its replica died, and its later events mean nothing."""

    request: Request
    gateway: int
    heard: tuple[int, ...] = ()
    answers: dict[int, object] = {}
    served: Served | None = None
    over: bool = False


ASK_DEADLINE_S = 0.003


class Simulation:
    def __init__(self, scenario: Scenario, workload: Workload, rule: Callable[[World], Rule]) -> None:
        self.scenario = scenario
        self.world = World(scenario, workload)
        if scenario.slow != 1.0:
            self.world.fleet.slow_down(0, scenario.slow)
        self.rule = rule(self.world)
        self.recorder = Recorder(self.world.fleet, workload, [change.at for change in scenario.changes])
        self._events: list[tuple[float, int, _Kind, object]] = []
        self._order = itertools.count()
        self._in_flight: dict[int, _Flight] = {}
        self._next_replica = scenario.replicas
        # Apart, so that every rule meets the same gateways and the same losses.
        self._losses = random.Random(scenario.seed + 1)
        self._gateways = random.Random(scenario.seed + 2)
        self._left = len(workload.requests)

    def run(self) -> Result:
        scenario, workload = self.scenario, self.world.workload
        for request in workload.requests:
            flight = _Flight(request, self._gateways.randrange(scenario.gateways))
            self._at(request.at, _Kind.ARRIVE, flight)
        for change in scenario.changes:
            self._at(change.at, _Kind.CHANGE, change)
        self._at(0.0, _Kind.PUBLISH, None)
        while self._events:
            now, _, kind, payload = heapq.heappop(self._events)
            self._handle(now, kind, payload)
        return self.recorder.result()

    def _at(self, at: float, kind: _Kind, payload: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), kind, payload))

    def _handle(self, now: float, kind: _Kind, payload: object) -> None:
        match kind:
            case _Kind.PUBLISH:
                self.rule.published(now)
                if self._left:
                    self._at(now + self.scenario.publish_s, _Kind.PUBLISH, None)
            case _Kind.CHANGE:
                assert isinstance(payload, Change)
                self._change(payload, now)
            case _Kind.ARRIVE | _Kind.ASKED | _Kind.DECIDE | _Kind.FIRST_TOKEN | _Kind.FINISH:
                assert isinstance(payload, _Flight)
                if not payload.over:
                    self._step(payload, kind, now)
            case _:
                assert_never(kind)

    def _step(self, flight: _Flight, kind: _Kind, now: float) -> None:
        request, gateway, world = flight.request, flight.gateway, self.world
        if kind is _Kind.ARRIVE:
            asked = self.rule.ask(request, gateway, now)
            if not asked:
                self._route(flight, now)
                return
            loss, delay = self.scenario.ask_loss, self.scenario.ask_s
            flight.heard = tuple(replica for replica in asked if self._losses.random() >= loss)
            flight.answers = {}
            self._at(now + delay / 2, _Kind.ASKED, flight)
            wait = delay if len(flight.heard) == len(asked) else max(delay, ASK_DEADLINE_S)
            self._at(now + wait, _Kind.DECIDE, flight)
        elif kind is _Kind.ASKED:
            alive = [replica for replica in flight.heard if world.fleet.alive[replica]]
            flight.answers = {replica: self.rule.answer(request, replica, now) for replica in alive}
        elif kind is _Kind.DECIDE:
            self._route(flight, now)
        elif kind is _Kind.FIRST_TOKEN:
            assert flight.served is not None
            world.fleet.prefilled(flight.served)
            world.sent_tokens[gateway][flight.served.replica] -= flight.served.uncached_tokens
            self.rule.first_token(request, gateway, flight.served, now)
        else:
            assert flight.served is not None
            world.fleet.finished(flight.served)
            world.sent_requests[gateway][flight.served.replica] -= 1
            self.rule.finished(request, gateway, flight.served, now)
            self._end(flight)
            self.recorder.completed(request, flight.served)

    def _route(self, flight: _Flight, now: float) -> None:
        request, gateway, world = flight.request, flight.gateway, self.world
        replica = self.rule.choose(request, gateway, flight.answers, now)
        assert world.fleet.alive[replica], replica
        resident = world.resident(request)
        self.recorder.chosen(request, replica, resident, world.fleet.waits(now), now)
        decode_s = request.output_tokens * self.scenario.decode_s
        cached = int(resident[replica])
        served = world.fleet.serve(replica, request.blocks, cached, request.tokens - cached, decode_s, now)
        world.caches_changed()
        world.sent_requests[gateway][replica] += 1
        world.sent_tokens[gateway][replica] += served.uncached_tokens
        flight.served = served
        self._in_flight[request.index] = flight
        self.rule.routed(request, gateway, served, now)
        self._at(served.first_token_at, _Kind.FIRST_TOKEN, flight)
        self._at(served.finished_at, _Kind.FINISH, flight)

    def _end(self, flight: _Flight) -> None:
        del self._in_flight[flight.request.index]
        self._left -= 1

    def _change(self, change: Change, now: float) -> None:
        match change:
            case Kill():
                self._kill(change.replica, now)
                self.rule.replicas_changed(now)
            case Add():
                self.world.fleet.start(range(self._next_replica, self._next_replica + change.replicas))
                self._next_replica += change.replicas
                self.rule.replicas_changed(now)
            case Drain():
                self.world.fleet.drain(change.replica)
                self.rule.replicas_changed(now)
            case RestartGateway():
                self.rule.gateway_restarted(change.gateway, now)
            case _:
                assert_never(change)

    def _kill(self, replica: int, now: float) -> None:
        fleet = self.world.fleet
        fleet.kill(replica)
        self.world.caches_changed()
        for flight in list(self._in_flight.values()):
            if flight.served is None or flight.served.replica != replica:
                continue
            flight.over = True
            self.rule.died(flight.request, flight.gateway, flight.served, now)
            fleet.finished(flight.served)
            self.world.sent_requests[flight.gateway][replica] -= 1
            if flight.served.first_token_at > now:
                fleet.prefilled(flight.served)
                self.world.sent_tokens[flight.gateway][replica] -= flight.served.uncached_tokens
                del self._in_flight[flight.request.index]
                self._at(now + RETRY_S, _Kind.ARRIVE, _Flight(flight.request, flight.gateway))
                self.recorder.sent_again()
            else:
                self._end(flight)
                self.recorder.cut(flight.request, flight.served)
