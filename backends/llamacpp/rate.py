"""How fast prompts are computed, as a moving average."""

from __future__ import annotations

_SMOOTHING = 0.2
_MIN_TOKENS = 16
"""Steps with fewer prompt tokens say nothing about prefill speed: decoding dominates them."""


class Rate:
    """Tokens per second over the last steps; 0 before there was any."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if tokens < _MIN_TOKENS:
            return
        rate = tokens / max(seconds, 1e-6)
        self.per_s += (_SMOOTHING if self.per_s else 1.0) * (rate - self.per_s)
