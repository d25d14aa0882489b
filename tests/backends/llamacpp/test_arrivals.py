"""What is counted of requests that the engine thread has not seen yet."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llamacpp.arrivals import COMPARED, Arrivals, Unseen
from backends.llamacpp.bindings import Tokens
from backends.llamacpp.sequence import Generation
from protocols.request import SlotOptions

SYSTEM = tuple(range(100, 200))


def prompt(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


def generation(*own: int, reuse: bool = True, n: int = 1, adapters: tuple[tuple[int, float], ...] = ()) -> Generation:
    return Generation("id", prompt(*SYSTEM, *own), n=n, slot=SlotOptions(reuse=reuse), adapters=adapters)


def test_what_prompts_have_in_common_counts_once() -> None:
    arrivals = Arrivals(share=True)
    for own in ((1, 2), (1, 3), (4,)):
        arrivals.generation(generation(*own))
    assert arrivals.unseen == Unseen(requests=3, tokens=102 + 102 + 101, uncached=102 + 1 + 1)


def test_the_last_token_is_always_computed() -> None:
    arrivals = Arrivals(share=True)
    arrivals.generation(generation(1, 2))
    arrivals.generation(generation(1, 2))
    assert arrivals.unseen.uncached == 102 + 1


@pytest.mark.parametrize(
    ("share", "second"),
    [(False, generation(1)), (True, generation(1, reuse=False)), (True, generation(1, adapters=((0, 1.0),)))],
)
def test_who_shares_nothing_counts_whole(share: bool, second: Generation) -> None:
    arrivals = Arrivals(share)
    arrivals.generation(generation(1))
    arrivals.generation(second)
    assert arrivals.unseen.uncached == 101 + 101


def test_those_the_engine_has_taken_are_not_counted_but_are_remembered() -> None:
    arrivals = Arrivals(share=True)
    arrivals.generation(generation(1, n=2))
    arrivals.taken(1)
    assert arrivals.unseen.requests == 2  # the engine takes a request whole
    arrivals.embedding(7)
    arrivals.generation(generation(2))
    arrivals.taken(2)
    assert arrivals.unseen == Unseen(requests=2, tokens=7 + 101, uncached=7 + 1)
    arrivals.taken(4)
    assert arrivals.unseen == Unseen()


def test_only_the_latest_are_compared() -> None:
    arrivals = Arrivals(share=True)
    arrivals.generation(generation(1))
    for other in range(COMPARED):
        arrivals.generation(Generation("id", prompt(other)))
    arrivals.taken(1 + COMPARED)
    arrivals.generation(generation(1))
    assert arrivals.unseen.uncached == 101
