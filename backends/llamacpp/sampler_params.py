"""`Sampling` checked and completed: every value a sampler chain is built from. Knows nothing of llama.cpp itself.

Values of the wrong kind are refused, with the name of the field; values that only go too far are brought back to the
nearest that means something. Nothing that passes here can make llama.cpp assert, allocate without bound, or compute
with infinities.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec

from protocols.errors import InvalidRequest
from protocols.request import Sampling

log = logging.getLogger(__name__)

RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's own mark for "draw one"."""

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "a": "adaptive_p",
}
_NAMES = {name.replace("_", ""): name for name in _LETTERS.values()} | {
    "nucleus": "top_p",
    "typical": "typ_p",
    "typicalp": "typ_p",
    "typ": "typ_p",
    "temp": "temperature",
}
MAX_SAMPLERS = 64

_INT_MAX = 2**31 - 1
_FLOAT_LIMIT = 1e6
"""No parameter means more beyond it, and a chain of 32-bit floats stays finite."""
_COLDEST = 1e-3
"""Logits divided by less than this may overflow. Such a temperature is as good as 0."""
MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 4096


class SamplerParams(msgspec.Struct, frozen=True):
    """With llama.cpp's defaults. `repeat_last_n` and `dry_penalty_last_n` are windows in tokens; 0 is none."""

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    min_keep: int = 0
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    seed: int = RANDOM_SEED

    @classmethod
    def of(cls, sampling: Sampling) -> Self:
        """`InvalidRequest` names the field that cannot be used."""
        fields = msgspec.structs.asdict(sampling)
        del fields["logit_bias"]  # needs the vocabulary: `logit_bias.py`
        given = {name: value for name, value in fields.items() if value is not None}
        for name, value in given.items():
            if name in _REAL:
                given[name] = _finite(name, value)
        for name in _NOT_NEGATIVE:
            if given.get(name, 0) < 0:
                raise InvalidRequest(f"{name} must be at least 0", param=name)
        for name in _UP_TO_ONE:
            if name in given:
                given[name] = min(max(given[name], 0.0), 1.0)
        _refine(given)
        return cls(**given)

    def to_sampling(self) -> Sampling:
        return Sampling(**msgspec.structs.asdict(self))

    @property
    def greedy(self) -> bool:
        """The likeliest token wins, and no sampler may take it away."""
        if self.temperature > 0:
            return False
        if self.mirostat:
            return True
        cuts_the_best = (
            (self.xtc_probability > 0 and "xtc" in self.samplers)
            or (self.typical_p < 1 and "typ_p" in self.samplers)
            or "infill" in self.samplers
            or "adaptive_p" in self.samplers
        )
        return "temperature" in self.samplers and not cuts_the_best

    @property
    def penalises(self) -> bool:
        """Whether the tokens of the last `repeat_last_n` are penalised."""
        changes = self.repeat_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return changes and self.repeat_last_n > 0 and not self.mirostat and "penalties" in self.samplers

    @property
    def dries(self) -> bool:
        """Whether repetitions of sequences are penalised."""
        used = self.dry_multiplier > 0 and self.dry_penalty_last_n > 0
        return used and not self.mirostat and "dry" in self.samplers

    @property
    def window(self) -> int:
        """How many of the last tokens matter at all."""
        return max(self.repeat_last_n if self.penalises else 0, self.dry_penalty_last_n if self.dries else 0)

    def for_choice(self, index: int) -> Self:
        """Those of one of several choices: each draws other numbers, and the same ones each time."""
        if self.seed == RANDOM_SEED or not index:
            return self
        return msgspec.structs.replace(self, seed=(self.seed + index) % RANDOM_SEED)


_REAL = frozenset(name for name, value in msgspec.structs.asdict(SamplerParams()).items() if isinstance(value, float))
_NOT_NEGATIVE = (
    "repeat_last_n",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "adaptive_decay",
    "min_keep",
)
_UP_TO_ONE = ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold")


def _finite(name: str, value: float) -> float:
    if value != value or value in (math.inf, -math.inf):
        raise InvalidRequest(f"{name} must be a finite number", param=name)
    return float(min(max(value, -_FLOAT_LIMIT), _FLOAT_LIMIT))


def _refine(given: dict[str, Any]) -> None:
    """The rules that are not the same for several fields."""
    if given.get("repeat_penalty", 1.0) <= 0:
        raise InvalidRequest("repeat_penalty must be greater than 0", param="repeat_penalty")
    if given.get("adaptive_decay", 0.0) > 0.99:
        raise InvalidRequest("adaptive_decay must be between 0 and 0.99", param="adaptive_decay")
    for name, low, high in (
        ("repeat_penalty", 1 / _FLOAT_LIMIT, _FLOAT_LIMIT),
        ("adaptive_target", -1.0, 1.0),
        ("dynatemp_exponent", 0.0, _FLOAT_LIMIT),
        ("mirostat", 0, 2),
        ("top_k", 0, _INT_MAX),
        ("repeat_last_n", 0, _INT_MAX),
        ("dry_allowed_length", 0, _INT_MAX),
        ("dry_penalty_last_n", 0, _INT_MAX),
        ("min_keep", 0, _INT_MAX),
    ):
        if name in given:
            given[name] = min(max(given[name], low), high)
    if given.get("dry_base", 1.0) < 1.0:
        del given["dry_base"]
    if "seed" in given:
        given["seed"] %= 2**32
    if "temperature" in given and given["temperature"] < _COLDEST:
        given["temperature"] = 0.0
    if "dynatemp_range" in given:
        # The range is cut where it would reach down to a temperature of 0.
        temperature = given.get("temperature", SamplerParams().temperature)
        given["dynatemp_range"] = min(max(given["dynatemp_range"], 0.0), max(temperature - _COLDEST, 0.0))
    if "samplers" in given:
        given["samplers"] = sampler_names(given["samplers"])
    if "dry_sequence_breakers" in given:
        _check_breakers(given["dry_sequence_breakers"])


def sampler_names(order: Iterable[str]) -> tuple[str, ...]:
    """The canonical names of samplers given by name, in any of its spellings, or by letter. Unknown ones are skipped.

    A string is a sequence of letters: `sampler_names("edkpmt")`.
    """
    names = []
    for given in order:
        name = _LETTERS.get(given) or _NAMES.get(given.strip().lower().replace("-", "").replace("_", ""))
        if name is None:
            log.warning("unknown sampler %.40r is skipped", given)
            continue
        names.append(name)
        if len(names) > MAX_SAMPLERS:
            raise InvalidRequest(f"samplers must not be more than {MAX_SAMPLERS}", param="samplers")
    return tuple(names)


def _check_breakers(breakers: Sequence[str]) -> None:
    """Each costs a pass over the vocabulary."""
    if not breakers:
        raise InvalidRequest("dry_sequence_breakers must not be empty", param="dry_sequence_breakers")
    if len(breakers) > MAX_BREAKERS or sum(len(text.encode("utf-8", "replace")) for text in breakers) > (
        MAX_BREAKER_BYTES
    ):
        raise InvalidRequest(
            f"dry_sequence_breakers must not be more than {MAX_BREAKERS}, nor longer than {MAX_BREAKER_BYTES} bytes "
            "together",
            param="dry_sequence_breakers",
        )
