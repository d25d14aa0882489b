"""Which tokens are guessed, and how many of them: against plain searches and sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backends.llamacpp.settings import LlamaCppSettings, Speculation
from backends.llamacpp.speculation import (
    History,
    HitRate,
    ModelDrafter,
    NgramDrafter,
    Price,
    equal_lengths,
    lengths,
)

few_tokens = st.lists(st.integers(0, 2), max_size=60)
"""Of so few kinds that most n-grams occur several times."""
chance_lists = st.lists(
    st.lists(st.floats(0.01, 1), max_size=6).map(lambda line: sorted(line, reverse=True)), max_size=5
)


def array_of(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


# --- n-grams ----------------------------------------------------------------------------------------------------------


def naive_find(tokens: list[int], size: int) -> tuple[int, int]:
    """By looking everywhere."""
    if len(tokens) < size:
        return 0, 0
    places = [p for p in range(size, len(tokens)) if tokens[p - size : p] == tokens[len(tokens) - size :]]
    best = (0, 0)
    for place in places[::-1][:16]:
        agreeing = 0
        while agreeing < min(place, 32) and tokens[place - 1 - agreeing] == tokens[len(tokens) - 1 - agreeing]:
            agreeing += 1
        if agreeing > best[1]:
            best = (place, agreeing)
    return best


@given(few_tokens, few_tokens, st.integers(1, 4))
def test_the_index_finds_what_a_search_finds(prompt: list[int], answer: list[int], size: int) -> None:
    history = History(array_of(prompt), size, 1000)
    known = list(prompt)
    assert history.find() == naive_find(known, size)
    for token in answer:
        assert history.append(token) == 0
        known.append(token)
        assert history.find() == naive_find(known, size)


@given(few_tokens, few_tokens, st.integers(1, 3), st.integers(3, 12))
def test_what_is_remembered_is_bounded(prompt: list[int], answer: list[int], size: int, limit: int) -> None:
    history = History(array_of(prompt), size, limit)
    known = prompt[-limit:]
    for token in answer:
        dropped = history.append(token)
        known.append(token)
        known = known[dropped:]
        assert limit <= len(known) < 2 * limit or not dropped
        assert len(history) == len(known) < 2 * limit
        assert history.find() == naive_find(known, size)


@given(few_tokens.filter(bool), st.data())
def test_a_continuation_repeats_itself_where_the_text_ends(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    expected = list(tokens)
    for i in range(20):
        expected.append(expected[place + i])
    assert History(array_of(tokens), 3, 1000).continuation(place, 20).tolist() == expected[len(tokens) :]


@given(few_tokens, few_tokens, st.integers(1, 3), st.integers(4, 80))
def test_guesses_stand_behind_what_agrees(prompt: list[int], answer: list[int], size: int, limit: int) -> None:
    """A guess that was right is followed further; after a wrong one, and only then, another place is looked for."""
    drafter = NgramDrafter(array_of(prompt), size, limit)
    known = list(prompt)
    for token in answer:
        drafter.feed([token])
        known.append(token)
        if drafter.chances(1, 0.0):
            (guess,) = drafter.guess(1).tolist()
            tail = known[-size:]
            followers = {known[p] for p in range(size, len(known)) if known[p - size : p] == tail}
            assert guess in followers
        else:
            recent = known[-limit + 1 :]
            assert naive_find(recent, size) == (0, 0)


def test_the_more_agrees_the_more_is_guessed() -> None:
    text = list(range(100, 160))
    drafter = NgramDrafter(array_of([*text, 7, *text[:3]]), 3, 1000)
    price = Price.of(1, 0.42)
    counts = []
    for token in text[3:40]:
        counts.append(lengths([drafter.chances(16, price.row)], price)[0])
        assert drafter.guess(2).tolist() == [token, token + 1]
        drafter.feed([token])
    assert counts[0] < counts[10] < counts[-1]


def test_wrong_guesses_are_followed_by_fewer() -> None:
    """A text in which every three tokens have occurred, but are followed by something else each time."""
    rng = np.random.default_rng(1)
    drafter = NgramDrafter(array_of([]), 1, 1000)
    drafter.feed(rng.integers(0, 10, 300).tolist())
    price = Price.of(1, 0.42)
    assert lengths([drafter.chances(16, price.row)], price) == [0]


# --- a draft model ----------------------------------------------------------------------------------------------------


def test_a_draft_model_that_is_wrong_is_asked_less_and_gets_another_chance() -> None:
    price = Price.of(1, 0.42)
    drafter = ModelDrafter()

    def count() -> int:
        return lengths([drafter.chances(16, price.row)], price)[0]

    assert count() > 1
    for _ in range(20):
        drafter.guessed(array_of([1, 2, 3]))
        drafter.feed([1, 2, 3, 4])
    assert count() == 16
    for _ in range(30):
        drafter.guessed(array_of([1, 2, 3]))
        drafter.feed([9])
    assert count() == 0
    for _ in range(200):
        drafter.feed([9])
    assert count() > 1


@given(st.lists(st.booleans(), max_size=100))
def test_a_hit_rate_is_between_what_it_was_and_what_was_seen(hits: list[bool]) -> None:
    rate = HitRate(0.5)
    for hit in hits:
        before = rate.value
        rate.observe(hit)
        assert 0 < rate.value < 1
        assert (rate.value >= before) if hit and before >= 0.5 else True
        assert (rate.value <= before) if not hit and before <= 0.5 else True


# --- how many ---------------------------------------------------------------------------------------------------------


def test_the_more_streams_there_are_the_surer_a_guess_must_be() -> None:
    prices = [Price.of(streams, 0.42).row for streams in (1, 4, 8)]
    assert prices == pytest.approx([0.504, 0.892, 1.024], abs=1e-3)
    assert Price.of(64, 0.0).row == 0
    assert Price.of(1, 1.0).apart == 0


def gain(line: list[float], count: int, price: Price) -> float:
    return sum(line[:count]) - count * price.row


@given(chance_lists, st.integers(1, 8), st.floats(0, 1))
def test_lengths_are_the_best(chances: list[list[float]], streams: int, row_cost: float) -> None:
    price = Price.of(streams, row_cost)
    for line, count in zip(chances, lengths(chances, price), strict=True):
        assert gain(line, count, price) == pytest.approx(max(gain(line, c, price) for c in range(len(line) + 1)))


@given(chance_lists, st.integers(0, 3), st.floats(0, 1))
def test_equal_lengths_are_the_best_of_one_length(chances: list[list[float]], others: int, row_cost: float) -> None:
    """`others` generate without guesses."""
    streams = max(len(chances) + others, 1)
    price = Price.of(streams, row_cost)

    def total(counts: tuple[int, ...]) -> float:
        some = sum(1 for count in counts if count)
        extra = price.apart if 0 < some < streams else 0.0
        return sum(gain(line, count, price) for line, count in zip(chances, counts, strict=True)) - extra

    counts = equal_lengths(chances, price, streams)
    assert len(set(counts) - {0}) <= 1
    assert all(count <= len(line) for line, count in zip(chances, counts, strict=True))
    allowed = [
        counts
        for length in range(7)
        for counts in itertools.product(*[(0, length) if length <= len(line) else (0,) for line in chances])
        # Who would lose by it is not made to guess for the sake of the others.
        if all(not count or gain(line, count, price) > 0 for line, count in zip(chances, counts, strict=True))
    ]
    assert total(tuple(counts)) == pytest.approx(max(map(total, allowed)), abs=1e-9)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings() -> None:
    assert LlamaCppSettings(model="m").speculation.kind == "off"
    short = LlamaCppSettings.model_validate({"model": "m", "speculation": "ngram"})
    assert short.speculation == Speculation(kind="ngram")
    for wrong in (
        {"kind": "draft"},
        {"kind": "ngram", "draft_model": "d"},
        {"kind": "other"},
        "other",
        {"max_tokens": 0},
        {"typo": 1},
        None,
    ):
        with pytest.raises(ValidationError):
            LlamaCppSettings.model_validate({"model": "m", "speculation": wrong})
