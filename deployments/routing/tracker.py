"""What a replica believes its engine holds, and how much there is to compute: the truth that gateways ask for."""

from __future__ import annotations

from typing import Any

from deployments.routing.ask import Ask, AskReply, Digest, Intent
from deployments.routing.key import PrefixKey


class Tracker:
    """One per replica. `now` is in seconds of any clock that only goes forward."""

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

        `adapter_slots`: how many adapters the engine keeps loaded; 0: all there are.
        """

    def answer(self, ask: Ask, now: float, queued_tokens: int | None = None) -> AskReply:
        """`queued_tokens`: the engine's own count, where it has one, in place of the tracker's."""
        raise NotImplementedError

    def intend(self, intent: Intent, now: float) -> None:
        """A gateway has routed a request here: it counts for 50 ms, or until it is admitted."""
        raise NotImplementedError

    def admit(self, request: str, key: PrefixKey, now: float) -> int:
        """A request enters. Its rungs count as held from here on. Returns the tokens predicted to be cached."""
        raise NotImplementedError

    def started(self, request: str, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Its first frame: what the engine really found."""
        raise NotImplementedError

    def first_token(self, request: str, now: float) -> None:
        """Nothing of its prompt is left to compute."""
        raise NotImplementedError

    def finish(self, request: str, completion_tokens: int, now: float) -> None:
        """It has ended, however."""
        raise NotImplementedError

    def observe_rate(self, tokens_per_s: float) -> None:
        """A measured prefill rate of one request with at least 256 tokens to compute."""
        raise NotImplementedError

    def reset(self) -> None:
        """The engine has forgotten everything."""
        raise NotImplementedError

    def stats(self, now: float) -> dict[str, Any]:
        """For Serve's `record_routing_stats`: small (at most 256 bytes) and quantised, since each change is broadcast."""
        raise NotImplementedError

    def digest(self, since: int) -> Digest:
        """Requests that landed here off their first owner, after position `since`."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the sums and the entries disagree."""
        raise NotImplementedError
