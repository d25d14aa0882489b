"""Requests on their way to the engine thread, which takes them between two steps. On a CPU a step may take seconds, and
in that time a router asks how much there is to compute: users of one system prompt who come together count it once.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from backends.adapters import AdapterSet
from backends.llamacpp.bindings import Tokens
from backends.llamacpp.sequence import Generation
from backends.llamacpp.slots import common_prefix

COMPARED: Final = 16
"""With how many of those who came before it a new prompt is compared."""


class Unseen(msgspec.Struct, frozen=True):
    """What the engine thread has not counted yet. `uncached`: of the prompts' `tokens` those nobody will have computed,
    as far as the prompts that came before tell; what the KV cache holds is not known here.
    """

    requests: int = 0
    tokens: int = 0
    uncached: int = 0


class Arrivals:
    """Belongs to the event loop."""

    def __init__(self, share: bool) -> None:
        """`share`: whether prompts share what they have in common."""
        self._share = share
        self._latest: deque[tuple[AdapterSet, Tokens]] = deque(maxlen=COMPARED)
        self._sent = 0
        self._unseen: deque[tuple[int, Unseen]] = deque()  # each with how many had been sent by then

    def generation(self, generation: Generation) -> None:
        prompt = generation.prompt
        self._add(Unseen(generation.n, len(prompt), len(prompt) - self._known(generation, prompt)))
        self._latest.append((generation.adapters, prompt))

    def embedding(self, tokens: int) -> None:
        self._add(Unseen(1, tokens, tokens))

    def taken(self, requests: int) -> None:
        """So many of all there were the engine thread has counted by now."""
        while self._unseen and self._unseen[0][0] <= requests:
            self._unseen.popleft()

    @property
    def unseen(self) -> Unseen:
        arrivals = [arrival for _, arrival in self._unseen]
        return Unseen(
            sum(arrival.requests for arrival in arrivals),
            sum(arrival.tokens for arrival in arrivals),
            sum(arrival.uncached for arrival in arrivals),
        )

    def _add(self, arrival: Unseen) -> None:
        self._sent += arrival.requests
        self._unseen.append((self._sent, arrival))

    def _known(self, generation: Generation, prompt: Tokens) -> int:
        if not self._share or not generation.slot.reuse:
            return 0
        shared = [common_prefix(other, prompt) for adapters, other in self._latest if adapters == generation.adapters]
        return min(max(shared, default=0), len(prompt) - 1)  # the last token is always computed
