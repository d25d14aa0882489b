"""What a replica believes its engine holds, and how much there is to compute: the truth that gateways ask for.

Engines do not say what they have cached, so the replica keeps book: the rungs of what was sent to it, least recently
used, as many as the engine's KV cache has tokens for. A rung counts from a request's admission on, so that the next
one of the same conversation finds it. Each first frame says how much the engine really found: that calibrates what is
answered, and a path that was believed to be there and was not is forgotten until it is computed again.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from deployments.routing.ask import VERSION, Ask, AskFlag, AskReply, Digest, Intent
from deployments.routing.key import UNITS_PER_TOKEN, PrefixKey

INTENT_S: Final = 0.05
MAX_RUNGS_HELD: Final = 65_536
MAX_INTENTS: Final = 1024
DIGEST_ENTRIES: Final = 200
RATE_SAMPLES: Final = 64
RATE_MIN_TOKENS: Final = 256
"""A prefill of fewer tokens says little about the rate of a long one."""
RATE_CLAMP: Final = (0.2, 5.0)
CALIBRATION_MIN_TOKENS: Final = 64
_SMOOTH: Final = 0.1
_STEP: Final = 1.25


class _Held(msgspec.Struct):
    """A rung: where it ends, what of that lies behind the rung before it, and when it was used last."""

    end: int
    segment: int
    used: float


class _Running(msgspec.Struct):
    key: PrefixKey
    predicted: int
    uncached: int  # what there is to compute before its first token; 0 from there on
    forgotten: bool = False


class Tracker:
    """One per replica. `now` is in seconds of any clock that only goes forward. Not thread-safe.

    `draining` is said in every answer; the replica's shell sets it.
    """

    def __init__(
        self,
        kv_tokens: int,
        rate_hint: float,
        slots: int,
        max_ongoing: int,
        adapter_slots: int = 0,
        generation: int = 0,
    ) -> None:
        """`kv_tokens`: what the engine can keep. `rate_hint`: expected prefill, tokens per second.

        `adapter_slots`: how many adapters the engine keeps loaded; 0: all there are. `generation`: this start's number.
        """
        self.draining = False
        self._budget = max(kv_tokens, 1)
        self._rate_hint = rate_hint
        self._slots = slots
        self._max_ongoing = max_ongoing
        self._adapter_slots = adapter_slots
        self._generation = generation
        self._held: OrderedDict[int, _Held] = OrderedDict()  # least recently used first, the deeper of a path earlier
        self._tokens = 0
        self._running: dict[str, _Running] = {}
        self._queued = 0
        self._computed_at = 0.0  # when all that is queued should be computed
        self._intents: deque[tuple[float, int, int]] = deque(maxlen=MAX_INTENTS)  # (until, leaf, tokens)
        self._adapters: OrderedDict[int, None] = OrderedDict()
        self._landed: deque[tuple[int, int]] = deque(maxlen=DIGEST_ENTRIES)
        self._position = 0
        self._rates: deque[float] = deque(maxlen=RATE_SAMPLES)
        self._units_per_token = UNITS_PER_TOKEN
        self._calibration = 1.0
        self._horizon_s: float | None = None

    def answer(self, ask: Ask, now: float, queued_tokens: int | None = None) -> AskReply:
        """`queued_tokens`: the engine's own count, where it has one, in place of the tracker's.

        A gateway of another version is told of the load only.
        """
        flags = AskFlag(0)
        if self.draining:
            flags |= AskFlag.DRAINING
        if len(self._running) >= self._max_ongoing:
            flags |= AskFlag.FULL
        if ask.adapter and self._adapter_slots and ask.adapter not in self._adapters:
            flags |= AskFlag.ADAPTER_COLD
        queued = self._left(now) if queued_tokens is None else queued_tokens
        while self._intents and self._intents[0][0] < now:
            self._intents.popleft()
        return AskReply(
            VERSION,
            self._generation,
            self._match(ask.rungs) if ask.version == VERSION else 0,
            queued + sum(tokens for _, _, tokens in self._intents),
            len(self._running) + len(self._intents),
            int(flags),
            round(self.rate),
            round(100 * self._calibration),
        )

    def intend(self, intent: Intent, now: float) -> None:
        """A gateway has routed a request here: it counts for 50 ms, or until it is admitted."""
        if intent.version != VERSION:
            return
        self._intents.append((now + INTENT_S, intent.leaf, max(intent.uncached_tokens, 0)))
        if intent.off_primary and intent.leaf:
            self._landed.append((intent.anchor, intent.leaf))
            self._position += 1

    def admit(self, request: str, key: PrefixKey, now: float) -> int:
        """A request enters. Its rungs count as held from here on. Returns the tokens predicted to be cached."""
        self.finish(request, 0, now)  # a name that comes twice is one request that was sent twice
        leaf = key.rungs[-1] if key.rungs else 0
        for intent in self._intents:
            if intent[1] == leaf:
                self._intents.remove(intent)
                break
        if key.version != VERSION:
            key = PrefixKey(VERSION, (), (), (), key.size, key.in_tokens)
        units = 1.0 if key.in_tokens else self._units_per_token
        depth = self._match(key.rungs)
        predicted = int(key.ends[depth - 1] / units) if depth else 0
        uncached = max(int(key.size / units - self._calibration * predicted), 1)
        self._running[request] = _Running(key, predicted, uncached)
        self._queued += uncached
        self._computed_at = max(self._computed_at, now) + uncached / self.rate
        if key.adapter and self._adapter_slots:
            self._adapters[key.adapter] = None
            self._adapters.move_to_end(key.adapter)
            if len(self._adapters) > self._adapter_slots:
                self._adapters.popitem(last=False)
        self._hold(key, units, now)
        return predicted

    def started(self, request: str, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Its first frame: what the engine really found."""
        running = self._running.get(request)
        if running is None or prompt_tokens <= 0:
            return
        key = running.key
        if running.uncached:
            more = max(prompt_tokens - cached_tokens, 1) - running.uncached
            running.uncached += more
            self._queued += more
            self._computed_at += more / self.rate
        if not key.in_tokens and key.size >= RATE_MIN_TOKENS:
            self._units_per_token += _SMOOTH * (key.size / prompt_tokens - self._units_per_token)
        if running.predicted >= CALIBRATION_MIN_TOKENS:
            found = min(cached_tokens / running.predicted, 1.0)
            self._calibration += _SMOOTH * (found - self._calibration)
        units = max(key.size, 1) / prompt_tokens
        if 2 * cached_tokens < running.predicted:
            running.forgotten = True
            ends = zip(key.rungs, key.ends, strict=True)
            self._forget([rung for rung, end in ends if end / units > cached_tokens])
        else:
            self._hold(key, units, now)

    def first_token(self, request: str, now: float) -> None:
        """Nothing of its prompt is left to compute, and all of it is held."""
        running = self._running.get(request)
        if running is None or not running.uncached:
            return
        self._queued -= running.uncached
        running.uncached = 0
        self._computed_at = now + self._queued / self.rate
        if running.forgotten:
            self._hold(running.key, 1.0 if running.key.in_tokens else self._units_per_token, now)

    def finish(self, request: str, completion_tokens: int, now: float) -> None:
        """It has ended, however. Its answer takes room in the cache too."""
        running = self._running.pop(request, None)
        if running is None:
            return
        self._queued -= running.uncached
        self._computed_at -= running.uncached / self.rate
        leaf = self._held.get(running.key.rungs[-1]) if running.key.rungs else None
        if leaf is not None and completion_tokens > 0:
            leaf.segment += completion_tokens
            self._tokens += completion_tokens
            self._evict(now)

    def observe_rate(self, tokens_per_s: float) -> None:
        """A measured prefill rate, of one request with at least `RATE_MIN_TOKENS` to compute."""
        low, high = RATE_CLAMP
        if tokens_per_s > 0:
            self._rates.append(min(max(tokens_per_s, low * self._rate_hint), high * self._rate_hint))

    @property
    def rate(self) -> float:
        """Prefill tokens per second: the median of the last measurements."""
        return statistics.median(self._rates) if self._rates else self._rate_hint

    def reset(self) -> None:
        """The engine has forgotten everything."""
        self._generation = (self._generation + 1) & 0xFFFFFFFF
        self._held.clear()
        self._tokens = 0
        self._adapters.clear()

    def stats(self, now: float, queued_tokens: int | None = None) -> dict[str, Any]:
        """For Serve's `record_routing_stats`: small and quantised, since Serve broadcasts each change to all routers.

        v: version; g: generation; q: queued uncached tokens; n: ongoing requests; r: prefill tokens per second;
        k: calibration in percent; a: age in seconds at which rungs were evicted lately, 0 if none was.
        """
        return {
            "v": VERSION,
            "g": self._generation,
            "q": _step(self._left(now) if queued_tokens is None else queued_tokens),
            "n": _step(len(self._running)),
            "r": int(float(f"{self.rate:.2g}")),
            "k": 5 * round(20 * self._calibration),
            "a": _step(self._horizon_s or 0.0),
        }

    def digest(self, since: int) -> Digest:
        """Requests that landed here off their first owner, after position `since`."""
        count = self._position - since if 0 <= since <= self._position else self._position
        count = min(count, len(self._landed))
        newest = list(self._landed)[len(self._landed) - count :]
        return Digest(VERSION, self._generation, self._position, tuple(newest))

    def _left(self, now: float) -> int:
        """Tokens yet to compute. Of the prompt at hand a part is computed: as much as the rate and the time say."""
        at_hand = next((running.uncached for running in self._running.values() if running.uncached), 0)
        expected = round((self._computed_at - now) * self.rate)
        return min(self._queued, max(expected, self._queued - at_hand))

    def _match(self, rungs: Sequence[int]) -> int:
        held = self._held
        for depth in range(len(rungs), 0, -1):
            if rungs[depth - 1] in held:
                return depth
        return 0

    def _hold(self, key: PrefixKey, units: float, now: float) -> None:
        """The deepest rung first: so ends of prompts are forgotten before what they share with others."""
        held = self._held
        ends = [int(end / units) for end in key.ends]
        for index in range(len(ends) - 1, -1, -1):
            rung, end = key.rungs[index], ends[index]
            segment = end - ends[index - 1] if index else end
            entry = held.get(rung)
            if entry is None:
                held[rung] = _Held(end, segment, now)
                self._tokens += segment
                continue
            held.move_to_end(rung)
            self._tokens += segment - entry.segment
            entry.end, entry.segment, entry.used = end, segment, now
        self._evict(now)

    def _evict(self, now: float) -> None:
        while self._held and (self._tokens > self._budget or len(self._held) > MAX_RUNGS_HELD):
            _, entry = self._held.popitem(last=False)
            self._tokens -= entry.segment
            age = max(now - entry.used, 0.0)
            self._horizon_s = age if self._horizon_s is None else self._horizon_s + _SMOOTH * (age - self._horizon_s)

    def _forget(self, rungs: Sequence[int]) -> None:
        for rung in rungs:
            entry = self._held.pop(rung, None)
            if entry is not None:
                self._tokens -= entry.segment

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the sums and the entries disagree, or a bound is broken."""
        assert self._tokens == sum(entry.segment for entry in self._held.values())
        assert self._tokens <= self._budget or not self._held
        assert self._queued == sum(running.uncached for running in self._running.values())
        assert len(self._held) <= MAX_RUNGS_HELD
        assert len(self._adapters) <= self._adapter_slots
        assert 0.0 <= self._calibration <= 1.0


def _step(value: float) -> int:
    """`value` rounded to the steps of a geometric scale: small changes are no change."""
    return 0 if value < 1 else round(_STEP ** round(math.log(value) / math.log(_STEP)))
