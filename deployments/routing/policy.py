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
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import numpy as np

from deployments.routing.ask import VERSION, AskFlag, AskReply, Digest, Intent
from deployments.routing.fleet import RATE_BOUNDS, Fleet, Floats, ReplicaFacts, bounded
from deployments.routing.index import Index
from deployments.routing.key import UNITS_PER_TOKEN, PrefixKey
from deployments.routing.load import Load
from deployments.routing.owners import Owners, Place, ShareSketch, Slots, place, rank_in, weight_of

EVIDENCE_AGE: Final = 0.9
"""Of the age at which a replica forgets: what was sent there earlier may be gone."""
SLOW_START_S: Final = 0.5
SLOW_START_FADES_S: Final = 30.0
FRESH_S: Final = 0.05
CHEAP_S: Final = 0.005
"""A prompt that is computed in this time everywhere is not worth a question."""
SILENT_ASKS: Final = 3
SILENT_S: Final = 1.0
"""What a replica that does not answer may have in its queue unseen."""
STATS_DELAY_S: Final = 0.5
"""About how old `Tracker.stats` are when they arrive."""
FULL_S: Final = 1.0
"""How long a replica that was full is thought to be."""
DRAINING_S: Final = 30.0
LOSS_WINDOW_S: Final = 5.0
LOSS_LIMIT: Final = 0.5
LOSS_MIN_ASKS: Final = 12
OWNER_PRIOR: Final = (0.6, 0.3)
REUSE_HIGH: Final = 0.6
_SMOOTH: Final = 0.02
_REUSE_KEEP: Final = 0.995
_MAX_TOKENS: Final = 1e9
_JITTER_S: Final = 1e-9
"""Below it costs are equal, and the order is random."""


class PolicyOptions(msgspec.Struct, frozen=True):
    """`affinity_weight` is 1+ρ of the cost; None: as the fleet's reuse suggests. `seed` is for simulations."""

    asks: bool = True
    affinity_weight: float | None = None
    owners: int = 2
    others: int = 4
    adapter_load_s: float = 1.0
    seed: int | None = None


class Plan:
    """One request's decision in the making. `ask`: ids of the replicas to ask, possibly none."""

    __slots__ = (
        "ask", "costs", "evidence", "held", "key", "made_at", "order", "owners", "place", "prompt_tokens", "safe"
    )  # fmt: skip

    def __init__(self, key: PrefixKey, prompt_tokens: float, made_at: float) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.made_at = made_at
        self.ask: tuple[str, ...] = ()
        self.safe = False
        self.place: Place | None = None
        self.owners: list[int] = []  # slots, best first
        self.evidence: list[int] = []  # slots this gateway has sent more than the hot prefix to
        self.held: Floats = np.zeros(0)  # tokens by slot
        self.costs: Floats = np.zeros(0)  # seconds by slot, before anybody was asked
        self.order: Floats = np.zeros(0)  # what breaks ties, by slot


class Policy:
    """All of a gateway's knowledge of one model's replicas.

    For one event loop or thread, except `accepted` and `complete`, which Serve may call from any. `now` is in seconds
    of one clock that only goes forward.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        self._options = options or PolicyOptions()
        self._random = np.random.default_rng(self._options.seed)
        self._fleet = Fleet()
        self._load = Load()
        self._owners = Owners()
        self._sketch = ShareSketch()
        self._index = Index()
        self._stats: dict[str, object] = {}
        self._strangers = False
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
            members = {slot: weight_of(id_) for id_, slot in self._fleet.slot_of.items() if self._fleet.keyed[slot]}
            self._owners.set_members(members)
            self._strangers = len(members) < len(self._fleet.slot_of)

    def observe_stats(self, replica: str, plain: object, now: float) -> None:
        """What `Tracker.stats` said; anything else than that is clamped or ignored."""
        slot = self._fleet.slot_of.get(replica)
        if slot is None or not isinstance(plain, dict) or plain.get("v") != VERSION:
            return
        if self._stats.get(replica) == plain:
            return  # Serve repeats all replicas' stats when one of them changes
        self._stats[replica] = dict(plain)
        self._learn(slot, plain.get("r"), plain.get("k"), plain.get("g"), now)
        fleet = self._fleet
        age = bounded(plain.get("a"), 0.0, 0.0, 1e9)
        fleet.horizon[slot] = age if age > 0 else np.inf
        measured_at = now - STATS_DELAY_S
        if fleet.told_at[slot] < measured_at:
            queued = bounded(plain.get("q"), 0.0, 0.0, _MAX_TOKENS)
            self._load.observe(slot, queued / float(fleet.rate[slot]), measured_at)
            fleet.ongoing[slot] = bounded(plain.get("n"), 0.0, 0.0, 1e6)
            fleet.told_at[slot] = measured_at

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
            self._fleet.alive[slot] = False

    # --- one request ----------------------------------------------------------

    def plan(self, key: PrefixKey, now: float) -> Plan:
        """Whom to ask about a request with this key. Once per request: it counts how common prefixes are."""
        fleet, options = self._fleet, self._options
        units = 1.0 if key.in_tokens else self._units_per_token
        plan = Plan(key, max(key.size / units, 1.0), now)
        plan.held = np.zeros(len(fleet))
        plan.order = self._random.random(len(fleet))
        keyed = int(np.count_nonzero(fleet.keyed & fleet.alive))
        if key.rungs:
            self._find_holders(plan, units, now)
        plan.safe = not options.asks or self._asks_fail(now)
        if plan.safe:
            self._guess_owners(plan, units)
        plan.costs = self._costs(plan, now)
        if not plan.safe and keyed > 1 and plan.prompt_tokens / float(fleet.rate[fleet.keyed].min()) >= CHEAP_S:
            plan.ask = self._whom_to_ask(plan, now)
        return plan

    def rank(
        self, plan: Plan, replies: Mapping[str, AskReply], now: float, asked: Collection[str] | None = None
    ) -> list[str]:
        """All replicas, best first. `asked`: those of `plan.ask` that could be reached; None: all of them."""
        fleet = self._fleet
        if len(plan.held) < len(fleet):  # replicas came meanwhile
            more = len(fleet) - len(plan.held)
            plan.held = np.concatenate((plan.held, np.zeros(more)))
            plan.order = np.concatenate((plan.order, self._random.random(more)))
            plan.costs = self._costs(plan, now)
        slots = {id_: slot for id_ in plan.ask if (slot := fleet.slot_of.get(id_)) is not None}
        if asked is not None:
            slots = {id_: slot for id_, slot in slots.items() if id_ in asked}
        heard = self._hear_all(plan, slots, replies, now)
        costs = np.where(fleet.alive, plan.costs, np.inf)
        if slots:
            sent = list(slots.values())
            costs[sent] = self._costs(plan, now, np.array(sent))
            for id_, reply in heard.items():
                if reply.flags & AskFlag.ADAPTER_COLD:
                    costs[slots[id_]] += self._options.adapter_load_s
        first: list[int] = []
        if plan.safe:
            near = [slot for slot in dict.fromkeys(plan.owners[:2] + plan.evidence) if np.isfinite(costs[slot])]
            whole = plan.prompt_tokens / fleet.rate
            if near and float((costs[near] - whole[near]).min()) <= float(costs.min()):
                first = near
        elif heard:
            # Who speaks another version cannot be asked, and is no worse for it.
            also = np.flatnonzero(fleet.alive & ~fleet.keyed).tolist() if self._strangers else []
            first = [slot for slot in (*slots.values(), *also) if np.isfinite(costs[slot])]
        first.sort(key=lambda slot: (round(float(costs[slot]), 9), rank_in(plan.owners, slot), plan.order[slot]))
        costs += _JITTER_S * plan.order
        costs[first] = np.arange(len(first)) - 1e9
        costs[fleet.free] = np.nan  # sorted last
        order: list[str] = fleet.ids[np.argsort(costs)[: len(fleet.slot_of)]].tolist()
        return order

    def charge(self, request: str, plan: Plan, replica: str, now: float) -> Intent | None:
        """`request` goes to `replica`: it counts at once. Returns what to tell the replica."""
        slot = self._fleet.slot_of.get(replica)
        if slot is None:
            return None
        held = float(plan.held[slot]) if slot < len(plan.held) else 0.0
        uncached = max(plan.prompt_tokens - float(self._fleet.calibration[slot]) * held, 1.0)
        self._load.reserve(request, slot, uncached / float(self._fleet.rate[slot]), now)
        key = plan.key
        if not self._fleet.keyed[slot] or not key.rungs:
            return None
        self._index.claim(key.rungs, slot, now)
        anchor = 0 if plan.place is None else plan.place.anchor
        off_primary = bool(plan.owners) and plan.owners[0] != slot
        return Intent(VERSION, key.rungs[-1], anchor, int(uncached), off_primary)

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
        assert 0 <= self._cached_sum <= self._prompt_sum

    # --- inside ----------------------------------------------------------------

    def _find_holders(self, plan: Plan, units: float, now: float) -> None:
        key, fleet = plan.key, self._fleet
        counted = [key.rungs[index] for index in key.trunk]
        if key.affinity:
            counted.append(key.affinity)
        self._sketch.count(counted, now)
        plan.place = place(key, self._sketch, int(np.count_nonzero(fleet.keyed)))
        hot = 0
        if plan.place is not None:
            plan.owners = [slot for slot in self._owners.rank(plan.place).tolist() if fleet.alive[slot]]
            hot = plan.place.depth
            if hot:  # common enough to be everywhere; whoever is asked says whether it is there
                plan.held[fleet.keyed] = key.ends[hot - 1] / units
        believed_since = np.maximum(fleet.reset_at, now - EVIDENCE_AGE * fleet.horizon)
        slots, depths = self._index.deepest(key.rungs, believed_since)
        deeper = depths > hot
        slots, depths = slots[deeper], depths[deeper]
        plan.held[slots] = np.array(key.ends)[depths - 1] / units
        plan.evidence = slots.tolist()

    def _guess_owners(self, plan: Plan, units: float) -> None:
        """Nobody can be asked: owners are thought to hold a part, unless this gateway knows who does."""
        if plan.place is None or plan.evidence:
            return
        hot = plan.key.ends[plan.place.depth - 1] / units if plan.place.depth else 0.0
        for slot, part in zip(plan.owners, OWNER_PRIOR, strict=False):
            plan.held[slot] = hot + part * max(plan.key.ends[-1] / units - hot, 0.0)

    def _whom_to_ask(self, plan: Plan, now: float) -> tuple[str, ...]:
        fleet, options = self._fleet, self._options
        costs = np.where(fleet.keyed, plan.costs, np.inf)
        costs += _JITTER_S * plan.order
        wanted = options.owners + options.others
        if wanted < len(costs):
            cheapest = np.argpartition(costs, wanted)[:wanted]
            cheapest = cheapest[np.argsort(costs[cheapest])]
        else:
            cheapest = np.argsort(costs)
        best = int(cheapest[0])
        if best in plan.evidence and now - fleet.told_at[best] < FRESH_S:
            return ()
        chosen = [slot for slot in plan.owners if np.isfinite(costs[slot])][: options.owners]
        for slot in cheapest.tolist():
            if len(chosen) >= wanted:
                break
            if slot not in chosen and np.isfinite(costs[slot]):
                chosen.append(slot)
        return tuple([fleet.ids[slot] for slot in chosen])

    def _costs(self, plan: Plan, now: float, at: Slots | None = None) -> Floats:
        """Of the slots `at` or all, in seconds; infinite without a replica, or with one that should get nothing."""
        fleet, load = self._fleet, self._load
        where = slice(len(fleet)) if at is None else at
        calibration, rate, told_at = fleet.calibration[where], fleet.rate[where], fleet.told_at[where]
        said, sat = fleet.ongoing[where], fleet.sat[where]
        compute = np.maximum(plan.prompt_tokens - calibration * plan.held[where], 1.0) / rate
        costs: Floats = load.waits(now)[where] + self.affinity_weight * compute
        # What it said grows old as its requests end.
        ongoing = np.maximum(said * np.exp2((told_at - now) / load.request_s), load.counts()[where])
        beyond = ongoing - sat
        if beyond.max(initial=0.0) > 0:
            costs += np.maximum(beyond, 0.0) / sat * load.request_s
        if now - fleet.last_joined < SLOW_START_FADES_S:
            slow = SLOW_START_S * (1.0 - (now - fleet.joined[where]) / SLOW_START_FADES_S)
            costs += np.where((slow > 0) & (compute < slow), slow, 0.0)
        costs += SILENT_S * (fleet.silent[where] >= SILENT_ASKS)
        full = (said >= fleet.max_ongoing[where]) & (told_at > now - FULL_S)
        costs[~fleet.alive[where] | full | (fleet.draining_until[where] > now)] = np.inf
        return costs

    def _hear_all(
        self, plan: Plan, slots: Mapping[str, int], replies: Mapping[str, AskReply], now: float
    ) -> dict[str, AskReply]:
        """Learns from what arrived, and from what did not. Returns the replies that count."""
        heard = {}
        for id_, slot in slots.items():
            reply = replies.get(id_)
            if reply is None or reply.version != VERSION:
                self._fleet.silent[slot] += 1
                continue
            self._fleet.silent[slot] = 0
            heard[id_] = reply
            self._hear(plan, slot, reply, now)
        self._turn_window(now)
        self._asks[0] += len(slots)
        self._asks[1] += len(slots) - len(heard)
        return heard

    def _hear(self, plan: Plan, slot: int, reply: AskReply, now: float) -> None:
        fleet, key = self._fleet, plan.key
        self._learn(slot, reply.prefill_rate, reply.calibration, reply.generation, now)
        queued = bounded(reply.queued_tokens, 0.0, 0.0, _MAX_TOKENS)
        self._load.observe(slot, queued / float(fleet.rate[slot]), plan.made_at)
        fleet.ongoing[slot] = bounded(reply.ongoing, 0.0, 0.0, 1e6)
        if reply.flags & AskFlag.FULL:
            fleet.ongoing[slot] = max(fleet.ongoing[slot], fleet.max_ongoing[slot])
        fleet.told_at[slot] = plan.made_at
        fleet.draining_until[slot] = now + DRAINING_S if reply.flags & AskFlag.DRAINING else -np.inf
        depth = min(max(reply.depth, 0), len(key.rungs))
        units = 1.0 if key.in_tokens else self._units_per_token
        plan.held[slot] = key.ends[depth - 1] / units if depth else 0.0

    def _learn(self, slot: int, rate: object, calibration: object, generation: object, now: float) -> None:
        fleet = self._fleet
        told = bounded(rate, 0.0, 0.0, RATE_BOUNDS[1])
        if told > 0:
            fleet.rate[slot] = max(told, RATE_BOUNDS[0])
        fleet.calibration[slot] = bounded(calibration, 100.0, 0.0, 100.0) / 100.0
        if isinstance(generation, int) and 0 <= generation < 2**63:
            fleet.forgot(slot, generation, now)

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
