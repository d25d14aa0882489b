"""Which replica a request should go to: the one where it costs least, in seconds.

    cost(r) = W + (1+ρ)·u/Rp + D + X + A

    W    seconds until the replica has done what it has: its own word (queued tokens / Rp) and what was sent there since
    u    prompt tokens to compute there: L - k·c, with c tokens held (asked; else own evidence, else what all hold) and
         k how much of what it believes to hold its engine really finds
    Rp   its prefill rate, tokens per second
    ρ    what an evicted token would have saved others: 1, or 2 where the fleet reuses 60 % and more
    D    (n - n_sat)/n_sat · seconds per request, for requests beyond its slots; a full replica comes last
    X    0.5 s for a new replica, fading over 30 s: a cold one with an empty queue would draw everybody at once
    A    seconds to load the request's adapter, where it said that it would have to

Lower is better; equals go to the owner by rendezvous hashing (`owners.py`). There is no threshold and no gate: a
request leaves its owner when the wait it saves is worth more than the prefix it computes again.

What is known comes in tiers, and each does without the next:

A  `Tracker.stats` by way of Serve (seconds old) and this gateway's own requests.
B  Two owners and the four cheapest others are asked what they hold and how long their queue is, now.
C  Digests: what other gateways sent elsewhere than to its first owner (`Digest`).

Without asks (switched off, or more than half lost in 10 s) guesses about other replicas are worth little: candidates
are the two owners, thought to hold .6 and .3 of what lies below the hot prefix, and those this gateway has sent the
prefix to; a request leaves them only if that saves more than its whole prompt costs to compute. Without keys only W
and D are left. What replicas say is clamped, and what is no number is ignored.

All replicas are weighed once per decision, in arrays; what is known of a few only (who holds more, who has answered)
is computed for those alone, in plain numbers, which is much faster than small arrays are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.random import default_rng

from deployments.routing.ask import VERSION, AskFlag, AskReply, Digest, Intent
from deployments.routing.fleet import RATE_BOUNDS, Fleet, Floats, ReplicaFacts, bounded
from deployments.routing.index import Index
from deployments.routing.key import UNITS_PER_TOKEN, PrefixKey
from deployments.routing.load import Load
from deployments.routing.owners import Owners, Place, ShareSketch, place, rank_in, weight_of

EVIDENCE_AGE: Final = 0.9
"""Of the age at which a replica forgets: what was sent there earlier may be gone."""
SLOW_START_S: Final = 0.5
SLOW_START_FADES_S: Final = 30.0
FRESH_S: Final = 0.05
CHEAP_S: Final = 0.005
"""A prompt that is computed in this time everywhere is not worth a question."""
PATIENCE_S: Final = (0.003, 0.05)
PATIENCE: Final = 0.01
"""Of the seconds that the whole prompt takes: for so long answers are waited for, within `PATIENCE_S`.

On a CPU a prompt takes seconds and the replica's engine the cores: answers were seen to need 10 ms.
"""
STATS_DELAY_S: Final = 0.5
"""About how old `Tracker.stats` are when they arrive."""
DRAINING_S: Final = 30.0
LOSS_WINDOW_S: Final = 5.0
LOSS_LIMIT: Final = 0.5
LOSS_MIN_ASKS: Final = 12
OWNER_PRIOR: Final = (0.6, 0.3)
REUSE_HIGH: Final = 0.6
_SMOOTH: Final = 0.02
_REUSE_KEEP: Final = 0.995
_MAX_TOKENS: Final = 1e9
_MAX_ONGOING: Final = 1e6
# Numbers: an operation on a flag takes longer than the rest of what is done with an answer.
_FULL: Final = AskFlag.FULL.value
_DRAINING: Final = AskFlag.DRAINING.value
_ADAPTER_COLD: Final = AskFlag.ADAPTER_COLD.value
_JITTER_S: Final = 1e-9
"""Below it costs are equal, and the order is random."""
_JITTERS: Final = 4096
_HEAD: Final = 16
"""As many replicas are put in order for each request."""


class PolicyOptions(msgspec.Struct, frozen=True):
    """`affinity_weight` is 1+ρ of the cost; None: as the fleet's reuse suggests. `seed` is for simulations."""

    asks: bool = True
    affinity_weight: float | None = None
    owners: int = 2
    others: int = 4
    adapter_load_s: float = 1.0
    seed: int | None = None


class Plan:
    """One request's decision in the making. `ask`: ids of the replicas to ask, possibly none.

    `patience_s`: for how long to wait for their answers.
    """

    __slots__ = (
        "ask", "costs", "evidence", "head", "held", "hot", "jitter", "key", "made_at", "owners", "patience_s", "place",
        "prompt_tokens", "safe", "version"
    )  # fmt: skip

    def __init__(self, key: PrefixKey, prompt_tokens: float, made_at: float) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.made_at = made_at
        self.ask: tuple[str, ...] = ()
        self.patience_s = PATIENCE_S[0]
        self.safe = False
        self.place: Place | None = None
        self.owners: list[int] = []  # slots, best first
        self.evidence: list[int] = []  # slots this gateway has sent more than the hot prefix to
        self.hot = 0.0  # tokens that are common enough to be held everywhere
        self.held: dict[int, float] = {}  # tokens by slot, where it is another number
        self.version = -1  # of the fleet, for these:
        self.costs: Floats = np.zeros(0)  # seconds by slot, before anybody was asked; nan without a replica
        self.jitter: Floats = np.zeros(0)  # what breaks ties, by slot
        self.head: list[int] = []  # the cheapest slots, best first


class Policy:
    """All of a gateway's knowledge of one model's replicas.

    For one event loop or thread, except `accepted` and `complete`, which Serve may call from any. `now` is in seconds
    of one clock that only goes forward.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self._options = options or PolicyOptions()
        self._random = random.Random(self._options.seed)
        self._jitters: Floats = np.zeros(0)
        self._fleet = Fleet()
        self._load = Load(slots=0)
        self._owners = Owners()
        self._members: dict[int, int] = {}  # slot -> `weight_of` the replica in it, of those that speak this version
        self._sketch = ShareSketch()
        self._index = Index()
        self._stats: dict[str, object] = {}
        self._strangers = np.zeros(0, np.intp)  # slots with a replica of another version
        self._units_per_token = UNITS_PER_TOKEN
        self._prompt_sum = self._cached_sum = 0.0
        self._window_began = 0.0
        self._asks = [0, 0]  # sent and lost, in this window
        self._asks_before = [0, 0]

    # --- what there is --------------------------------------------------------

    def update_replicas(self, replicas: Mapping[str, ReplicaFacts | None], now: float) -> None:
        """The replicas there are now; None: another version's, or nothing is known of it."""
        gone, come = self._fleet.update(replicas, now)
        self._load.grow(len(self._fleet))
        self._load.forget(gone)
        for replica in self._stats.keys() - replicas.keys():
            del self._stats[replica]
        if gone or come:
            members, fleet = self._members, self._fleet
            for slot in gone:
                members.pop(slot, None)
            members.update({slot: weight_of(fleet.ids[slot]) for slot in come if fleet.keyed[slot]})
            self._owners.set_members(members)
            self._strangers = np.array([slot for slot in fleet.slot_of.values() if slot not in members], np.intp)
            draw = default_rng(self._random.getrandbits(64))
            self._jitters = _JITTER_S * draw.random(_JITTERS + len(self._fleet))

    def observe_stats(self, replica: str, plain: object, now: float) -> None:
        """What `Tracker.stats` said; anything else than that is clamped or ignored."""
        slot = self._fleet.slot_of.get(replica)
        if slot is None or not isinstance(plain, dict) or plain.get("v") != VERSION:
            return
        if self._stats.get(replica) == plain:
            return  # Serve repeats all replicas' stats when one of them changes
        self._stats[replica] = dict(plain)
        fleet = self._fleet
        rate = bounded(plain.get("r"), 0.0, 0.0, RATE_BOUNDS[1])
        if rate > 0:
            fleet.tell_rate(slot, max(rate, RATE_BOUNDS[0]), now)
        if fleet.keyed[slot]:
            fleet.calibration[slot] = bounded(plain.get("k"), 100.0, 0.0, 100.0) / 100.0
        self._learn_generation(slot, plain.get("g"), now)
        age = bounded(plain.get("a"), 0.0, 0.0, 1e9)
        fleet.horizon[slot] = age if age > 0 else math.inf
        measured_at = now - STATS_DELAY_S
        if fleet.told_at[slot] < measured_at:
            queued = bounded(plain.get("q"), 0.0, 0.0, _MAX_TOKENS)
            self._load.observe(slot, queued / float(fleet.rate[slot]), measured_at)
            fleet.tell_load(slot, bounded(plain.get("n"), 0.0, 0.0, _MAX_ONGOING), measured_at)

    def observe_digest(self, replica: str, digest: Digest, now: float) -> None:
        """What other gateways have sent to `replica` though it is not the first owner."""
        slot = self._fleet.slot_of.get(replica)
        if slot is None or digest.version != VERSION:
            return
        self._fleet.forgot(slot, digest.generation, now)
        for anchor, leaf in digest.landed:
            self._index.claim((anchor, leaf), slot, now)

    def observe_started(self, key: PrefixKey, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's first frame: bytes per token and the fleet's reuse are learnt from it."""
        if prompt_tokens <= 0:
            return
        if not key.in_tokens and key.size >= 256:
            self._units_per_token += _SMOOTH * (key.size / prompt_tokens - self._units_per_token)
        self._prompt_sum = self._prompt_sum * _REUSE_KEEP + prompt_tokens
        self._cached_sum = self._cached_sum * _REUSE_KEEP + min(max(cached_tokens, 0), prompt_tokens)

    def lost(self, replica: str) -> None:
        """It has died: not a candidate until it is listed anew."""
        slot = self._fleet.slot_of.get(replica)
        if slot is not None:
            self._fleet.lost(slot)

    # --- one request ----------------------------------------------------------

    def plan(self, key: PrefixKey, now: float) -> Plan:
        """Whom to ask about a request with this key. Once per request: it counts how common prefixes are."""
        fleet, options = self._fleet, self._options
        units = 1.0 if key.in_tokens else self._units_per_token
        plan = Plan(key, max(key.size / units, 1.0), now)
        if key.rungs:
            self._find_holders(plan, units, now)
        plan.safe = not options.asks or self._asks_fail(now)
        if plan.safe:
            self._guess_owners(plan, units)
        self._weigh(plan, now)
        if not plan.safe and fleet.askable > 1 and plan.prompt_tokens / fleet.slowest >= CHEAP_S:
            plan.ask = self._whom_to_ask(plan, now)
            shortest, longest = PATIENCE_S
            plan.patience_s = min(max(PATIENCE * plan.prompt_tokens / fleet.slowest, shortest), longest)
        return plan

    def rank(
        self, plan: Plan, replies: Mapping[str, AskReply], now: float, asked: Collection[str] | None = None
    ) -> list[str]:
        """The best replicas, best first: all of a small fleet, of a large one a few more than are asked.

        `asked`: those of `plan.ask` that could be reached; None: all of them.
        """
        fleet = self._fleet
        if plan.version != fleet.version:
            self._renew(plan, now)
        slot_of = fleet.slot_of
        slots = {id_: slot_of[id_] for id_ in plan.ask if id_ in slot_of and (asked is None or id_ in asked)}
        heard = self._hear_all(plan, slots, replies, now)
        costs = dict(zip(slots.values(), self._costs_of(plan, slots.values(), now), strict=True))
        for id_, reply in heard.items():
            if reply.flags & _ADAPTER_COLD:
                costs[slots[id_]] += self._options.adapter_load_s
        first: list[int] = []
        if plan.safe:
            first = self._near(plan)
        elif heard:
            # Who speaks another version cannot be asked, and is no worse for it.
            first = [*costs, *self._cheapest_strangers(plan)]
        known = {slot: costs[slot] if slot in costs else plan.costs.item(slot) for slot in first}
        keys = {
            slot: (round(cost, 9), rank_in(plan.owners, slot), plan.jitter.item(slot))
            for slot, cost in known.items()
            if cost < math.inf
        }
        order = sorted(keys, key=keys.__getitem__)
        if keys or not costs:
            order += [slot for slot in plan.head if slot not in keys and slot not in costs]
        else:  # nobody is preferred: who was asked is one of all
            seen = {slot: plan.costs.item(slot) for slot in plan.head} | costs
            order = sorted(seen, key=lambda slot: seen[slot] + plan.jitter.item(slot))
        last = [slot for slot, cost in costs.items() if cost == math.inf]
        if last:
            order = [slot for slot in order if slot not in last]
        ids = fleet.ids
        return [ids[slot] for slot in (*order, *last)]

    def charge(self, request: str, plan: Plan, replica: str, now: float) -> Intent | None:
        """`request` goes to `replica`: it counts at once. Returns what to tell the replica."""
        slot = self._fleet.slot_of.get(replica)
        if slot is None:
            return None
        uncached = self._uncached(plan, slot)
        self._load.reserve(request, slot, uncached / self._fleet.rate.item(slot), now)
        key = plan.key
        if not self._fleet.keyed[slot] or not key.rungs:
            return None
        anchor, depth = (0, 0) if plan.place is None else (plan.place.anchor, plan.place.depth)
        self._index.claim(key.rungs[depth:] or key.rungs[-1:], slot, now)  # what is hot needs no evidence
        off_primary = bool(plan.owners) and plan.owners[0] != slot
        return Intent(VERSION, key.rungs[-1], anchor, int(uncached), off_primary)

    def take(self, request: str, key: PrefixKey, replica: str, now: float) -> None:
        """`request` goes to `replica`, as there is no other. What `plan` and `charge` keep of it is kept: another one
        may come. It is not told: nobody asks the only one there is.
        """
        slot = self._fleet.slot_of.get(replica)
        if slot is None:
            return
        tokens = max(key.size / (1.0 if key.in_tokens else self._units_per_token), 1.0)
        self._load.reserve(request, slot, tokens / self._fleet.rate.item(slot), now)
        if self._fleet.keyed[slot] and key.rungs:
            self._count(key, now)
            self._index.claim(key.rungs, slot, now)

    def accepted(self, request: str, replica: str, now: float) -> None:
        """The replica that took it, which may be another one than was charged."""
        slot = self._fleet.slot_of.get(replica)
        if slot is not None:
            self._load.accept(request, slot, now)

    def complete(self, request: str, now: float) -> None:
        """It is over, or was never taken. May be called from any thread, twice, or never."""
        self._load.release(request, now)

    # --- state for tests and metrics -------------------------------------------

    @property
    def affinity_weight(self) -> float:
        """1+ρ."""
        if self._options.affinity_weight is not None:
            return self._options.affinity_weight
        return 3.0 if self._cached_sum >= REUSE_HIGH * max(self._prompt_sum, 1.0) else 2.0

    def check_integrity(self) -> None:
        """Raises `AssertionError` when any part contradicts itself or another."""
        for part in (self._fleet, self._load, self._owners, self._sketch, self._index):
            part.check_integrity()
        assert self._stats.keys() <= self._fleet.slot_of.keys()
        assert self._members.keys() == set(np.flatnonzero(self._fleet.keyed).tolist())
        assert 0 <= self._cached_sum <= self._prompt_sum

    # --- inside ----------------------------------------------------------------

    def _find_holders(self, plan: Plan, units: float, now: float) -> None:
        key, fleet = plan.key, self._fleet
        self._count(key, now)
        plan.place = place(key, self._sketch, fleet.speaking)
        depth = 0
        if plan.place is not None:
            plan.owners = [slot for slot in self._owners.rank(plan.place) if fleet.alive[slot]]
            depth = plan.place.depth
            if depth:  # common enough to be everywhere; whoever is asked says whether it is there
                plan.hot = key.ends[depth - 1] / units

        def believed_since(slot: int) -> float:
            return max(fleet.reset_at.item(slot), now - EVIDENCE_AGE * fleet.horizon.item(slot))

        found = self._index.deepest(key.rungs, depth, believed_since)
        plan.held = {slot: key.ends[deepest - 1] / units for slot, deepest in found.items()}
        plan.evidence = list(found)

    def _count(self, key: PrefixKey, now: float) -> None:
        counted = [key.rungs[index] for index in key.trunk]
        if key.affinity:
            counted.append(key.affinity)
        self._sketch.count(counted, now)

    def _guess_owners(self, plan: Plan, units: float) -> None:
        """Nobody can be asked: owners are thought to hold a part, unless this gateway knows who does."""
        if plan.place is None or plan.evidence:
            return
        below = max(plan.key.ends[-1] / units - plan.hot, 0.0)
        for slot, part in zip(plan.owners, OWNER_PRIOR, strict=False):
            plan.held[slot] = plan.hot + part * below

    def _weigh(self, plan: Plan, now: float) -> None:
        fleet, count = self._fleet, len(self._fleet)
        plan.version = fleet.version
        plan.costs = costs = self._costs(plan, now)
        start = int(self._random.random() * _JITTERS)
        plan.jitter = self._jitters[start : start + count]
        costs = costs + plan.jitter
        # nan, where there is no replica, is sorted last.
        if count > _HEAD:
            head = costs.argpartition(_HEAD)[:_HEAD]
            head = head[costs[head].argsort()]
        else:
            head = costs.argsort()
        plan.head = head[: len(fleet.slot_of)].tolist()

    def _renew(self, plan: Plan, now: float) -> None:
        """Replicas came or went since it was made. A slot may be another one's now."""
        fleet = self._fleet
        gone = {
            slot for slot in (*plan.held, *plan.owners) if not fleet.alive[slot] or fleet.reset_at[slot] > plan.made_at
        }
        plan.held = {slot: tokens for slot, tokens in plan.held.items() if slot not in gone}
        plan.owners = [slot for slot in plan.owners if slot not in gone]
        plan.evidence = [slot for slot in plan.evidence if slot not in gone]
        self._weigh(plan, now)

    def _near(self, plan: Plan) -> list[int]:
        """Without asks: the candidates, unless computing the whole prompt elsewhere is cheaper."""
        cost_of, rate_of = plan.costs.item, self._fleet.rate.item
        near = [slot for slot in dict.fromkeys(plan.owners[:2] + plan.evidence) if cost_of(slot) < math.inf]
        if near and min(cost_of(slot) - plan.prompt_tokens / rate_of(slot) for slot in near) <= cost_of(plan.head[0]):
            return near
        return []

    def _cheapest_strangers(self, plan: Plan) -> list[int]:
        strangers = self._strangers
        if len(strangers) > _HEAD:
            costs = plan.costs[strangers] + plan.jitter[strangers]
            strangers = strangers[costs.argpartition(_HEAD)[:_HEAD]]
        return strangers.tolist()

    def _whom_to_ask(self, plan: Plan, now: float) -> tuple[str, ...]:
        fleet, options = self._fleet, self._options
        cost_of, held = plan.costs.item, plan.held
        wanted = options.owners + options.others
        cheapest = plan.head
        if len(self._strangers):
            costs = np.where(fleet.keyed, plan.costs + plan.jitter, np.inf)
            cheapest = costs.argsort()[:_HEAD].tolist()
            cheapest = [slot for slot in cheapest if fleet.keyed[slot]]
        if not cheapest:
            return ()
        best = cheapest[0]
        if best in plan.evidence and now - fleet.told_at.item(best) < FRESH_S:
            return ()
        chosen = [slot for slot in plan.owners if cost_of(slot) < math.inf][: options.owners]
        deepest = max(plan.evidence, key=lambda slot: (held[slot], -cost_of(slot)), default=None)
        if deepest is not None and deepest not in chosen and cost_of(deepest) < math.inf:
            chosen.append(deepest)  # what is known of its queue may be old
        for slot in cheapest:
            if len(chosen) >= wanted:
                break
            if slot not in chosen and cost_of(slot) < math.inf:
                chosen.append(slot)
        return tuple([fleet.ids[slot] for slot in chosen])

    def _costs(self, plan: Plan, now: float) -> Floats:
        """By slot, in seconds; inf with a replica that should get nothing, nan without one."""
        fleet, load = self._fleet, self._load
        if plan.hot:
            compute = np.maximum(plan.prompt_tokens - fleet.calibration * plan.hot, 1.0)
            compute /= fleet.rate
        else:
            compute = plan.prompt_tokens / fleet.rate
        costs = load.waits(now)
        costs += self.affinity_weight * compute
        costs += fleet.penalty
        counts = load.counts()
        if np.count_nonzero(np.maximum(fleet.ongoing, counts) > fleet.sat):
            # What it said grows old as its requests end.
            ongoing = np.maximum(fleet.ongoing * np.exp2((fleet.told_at - now) / load.request_s), counts)
            costs += np.maximum(ongoing - fleet.sat, 0.0) / fleet.sat * load.request_s
        if now - fleet.last_joined < SLOW_START_FADES_S:
            slow = SLOW_START_S * (1.0 - (now - fleet.joined) / SLOW_START_FADES_S)
            costs += np.where((slow > 0) & (compute < slow), slow, 0.0)
        costs[fleet.blocked_until > now] = np.inf
        if plan.held:
            costs[list(plan.held)] = self._costs_of(plan, plan.held, now)
        return costs

    def _costs_of(self, plan: Plan, slots: Collection[int], now: float) -> list[float]:
        """The same of a few slots, with what each is known to hold."""
        fleet, load, held, hot = self._fleet, self._load, plan.held, plan.hot
        weight, request_s, prompt_tokens = self.affinity_weight, load.request_s, plan.prompt_tokens
        blocked_until, calibration, rate, penalty = (
            fleet.blocked_until.item, fleet.calibration.item, fleet.rate.item, fleet.penalty.item
        )  # fmt: skip
        said_ongoing, saturated, count_of, wait_of = fleet.ongoing.item, fleet.sat.item, load.count, load.wait
        some_are_new = now - fleet.last_joined < SLOW_START_FADES_S
        costs = []
        for slot in slots:
            if blocked_until(slot) > now:
                costs.append(math.inf)
                continue
            uncached = prompt_tokens - calibration(slot) * held.get(slot, hot)
            compute = (uncached if uncached > 1.0 else 1.0) / rate(slot)
            cost = wait_of(slot, now) + weight * compute + penalty(slot)
            said, count, sat = said_ongoing(slot), count_of(slot), saturated(slot)
            if said > sat or count > sat:
                ongoing = max(said * 2.0 ** ((fleet.told_at.item(slot) - now) / request_s), count)
                cost += max(ongoing - sat, 0.0) / sat * request_s
            if some_are_new:
                slow = SLOW_START_S * (1.0 - (now - fleet.joined.item(slot)) / SLOW_START_FADES_S)
                if compute < slow:
                    cost += slow
            costs.append(cost)
        return costs

    def _uncached(self, plan: Plan, slot: int) -> float:
        """Tokens that it would have to compute."""
        return max(plan.prompt_tokens - self._fleet.calibration.item(slot) * plan.held.get(slot, plan.hot), 1.0)

    def _hear_all(
        self, plan: Plan, slots: Mapping[str, int], replies: Mapping[str, AskReply], now: float
    ) -> dict[str, AskReply]:
        """Learns from what arrived, and from what did not. Returns the replies that count."""
        heard = {}
        for id_, slot in slots.items():
            reply = replies.get(id_)
            if reply is None or reply.version != VERSION:
                self._fleet.tell_silence(slot, True)
                continue
            self._fleet.tell_silence(slot, False)
            heard[id_] = reply
            self._hear(plan, slot, reply, now)
        self._turn_window(now)
        self._asks[0] += len(slots)
        self._asks[1] += len(slots) - len(heard)
        return heard

    def _hear(self, plan: Plan, slot: int, reply: AskReply, now: float) -> None:
        fleet, key = self._fleet, plan.key
        if reply.prefill_rate > 0:
            fleet.tell_rate(slot, min(max(reply.prefill_rate, RATE_BOUNDS[0]), RATE_BOUNDS[1]), now)
        fleet.calibration[slot] = min(max(reply.calibration, 0), 100) / 100.0
        self._learn_generation(slot, reply.generation, now)
        queued = min(max(reply.queued_tokens, 0.0), _MAX_TOKENS)
        self._load.observe(slot, queued / fleet.rate.item(slot), plan.made_at)
        ongoing = min(max(reply.ongoing, 0.0), _MAX_ONGOING)
        if reply.flags & _FULL:
            ongoing = max(ongoing, fleet.max_ongoing.item(slot))
        fleet.tell_load(slot, ongoing, plan.made_at)
        fleet.tell_draining(slot, now + DRAINING_S if reply.flags & _DRAINING else -math.inf)
        depth = min(max(reply.depth, 0), len(key.rungs))
        units = 1.0 if key.in_tokens else self._units_per_token
        plan.held[slot] = key.ends[depth - 1] / units if depth else 0.0

    def _learn_generation(self, slot: int, generation: object, now: float) -> None:
        if isinstance(generation, int) and 0 <= generation < 2**63:
            self._fleet.forgot(slot, generation, now)

    def _asks_fail(self, now: float) -> bool:
        self._turn_window(now)
        sent, lost = self._asks[0] + self._asks_before[0], self._asks[1] + self._asks_before[1]
        return sent >= LOSS_MIN_ASKS and lost > LOSS_LIMIT * sent

    def _turn_window(self, now: float) -> None:
        windows = int((now - self._window_began) / LOSS_WINDOW_S)
        if windows > 0:
            self._asks_before = self._asks if windows == 1 else [0, 0]
            self._asks = [0, 0]
            self._window_began += windows * LOSS_WINDOW_S
