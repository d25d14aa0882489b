"""Which LoRA adapters apply to a request, as one value that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_float

from protocols.errors import InvalidRequest
from protocols.request import LoraScale

AdapterSet = tuple[tuple[int, float], ...]
"""(adapter, scale) in ascending order and without scales of 0, so that equal sets are equal values.

Keys and values computed under one set are wrong for every other.
"""

NO_ADAPTERS: AdapterSet = ()

MAX_SCALE = 100.0
"""Useful scales are a few units. What overflows the 16-bit floats of a KV cache becomes NaN there, and where attention
multiplies a neighbour's masked values by 0 instead of leaving them out (llama.cpp without flash attention), one
request with a scale of 1,000,000 spoilt the answers of all others, those after it included.
"""


def adapter_set(scales: Iterable[LoraScale], count: int) -> AdapterSet:
    """`scales` of a model with `count` adapters; those that are not listed have 0, and of doubles the last counts.

    `InvalidRequest` for an adapter that there is not, and for a scale that is not a number within `MAX_SCALE`.
    """
    given: dict[int, float] = {}
    for id, scale in ((item.id, item.scale) for item in scales):
        if not 0 <= id < count:
            has = f"{count}, from 0 on" if count else "none"
            raise InvalidRequest(f"There is no LoRA adapter {id}: this model has {has}", param="lora")
        if not -MAX_SCALE <= scale <= MAX_SCALE:
            raise InvalidRequest(
                f"The scale of LoRA adapter {id} must be a number from {-MAX_SCALE:g} to {MAX_SCALE:g}", param="lora"
            )
        given[id] = c_float(scale).value
    return tuple(sorted((id, scale) for id, scale in given.items() if scale))
