"""The prompt cache: what is kept, what goes, and what comes back. No model is needed for the policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.llamacpp.prompt_cache import Entry, PromptCache, RestoreFailed, State
from backends.llamacpp.slots import Tokens, common_prefix

NOTHING = np.empty(0, np.int32)


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def stored(cache: PromptCache) -> list[list[int]]:
    return [entry.tokens.tolist() for entry in cache]


def put(cache: PromptCache, *prompt: int, size: int = 10) -> Entry | None:
    return cache.alloc(tokens(*prompt), size)


def whole(state: State) -> int:
    return len(state)


# --- alloc ------------------------------------------------------------------------------------------------------------


def test_what_an_entry_covers_is_not_stored_again() -> None:
    cache = PromptCache()
    assert put(cache, 1, 2, 3) is not None
    assert put(cache, 1, 2, 3) is None
    assert put(cache, 1, 2) is None
    assert stored(cache) == [[1, 2, 3]]


def test_a_longer_conversation_replaces_its_beginnings() -> None:
    cache = PromptCache()
    put(cache, 1, 2)
    put(cache, 5)
    put(cache, 1, 2, 3, 4)
    assert stored(cache) == [[5], [1, 2, 3, 4]]
    assert (cache.size, cache.n_tokens) == (20, 5)


def test_the_oldest_make_room_before_the_new_one_comes() -> None:
    cache = PromptCache(limit_size=25)
    for token in (1, 2):
        put(cache, token)
    assert put(cache, 3) is not None
    assert stored(cache) == [[2], [3]]
    assert put(cache, 4, size=26) is None, "larger than the whole cache: nothing has to go for it"
    assert stored(cache) == [[2], [3]]
    assert put(cache, 5, size=25) is not None
    assert stored(cache) == [[5]]


def test_checkpoints_count() -> None:
    cache = PromptCache(limit_size=20)
    assert cache.alloc(tokens(1), 10, (b"12345", b"1234567")) is None
    entry = cache.alloc(tokens(1), 10, (b"12345", b"12345"))
    assert entry is not None
    assert entry.size == cache.size == 20


def test_out_of_memory_shrinks_the_limit() -> None:
    full = False

    def allocate(size: int) -> State:
        if full:
            raise MemoryError
        return np.empty(size, np.uint8)

    cache = PromptCache(limit_size=1000, allocate=allocate)
    for token in range(10):
        put(cache, token)
    full = True
    assert put(cache, 99) is None
    assert cache.limit_size == 40
    assert stored(cache) == [[6], [7], [8], [9]]
    empty = PromptCache(allocate=allocate)
    assert put(empty, 1) is None
    assert empty.limit_size == 1


def test_an_entry_that_could_not_be_filled_is_taken_back() -> None:
    cache = PromptCache()
    entry = put(cache, 1, 2)
    assert entry is not None
    cache.discard(entry)
    cache.check_integrity()
    assert len(cache) == 0


def test_entries_of_other_adapters_are_other_conversations() -> None:
    cache = PromptCache()
    one = ((0, 1.0),)
    assert cache.alloc(tokens(1, 2, 3), 10) is not None
    assert cache.alloc(tokens(1, 2, 3), 10, adapters=one) is not None, "not covered by the other's"
    assert cache.alloc(tokens(1, 2, 3, 4), 10) is not None, "it replaces only its own beginnings"
    assert [(len(entry.tokens), entry.adapters) for entry in cache] == [(3, one), (4, ())]
    prompt = tokens(1, 2, 3, 4, 5)
    assert [cache.longest(prompt, adapters) for adapters in ((), one, ((0, 0.5),))] == [4, 3, 0]
    loaded = cache.load(NOTHING, prompt, whole, one)
    assert loaded is not None
    assert loaded.adapters == one
    assert cache.load(NOTHING, prompt, whole, one) is None
    cache.check_integrity()


# --- load -------------------------------------------------------------------------------------------------------------


def load(cache: PromptCache, cached: Tokens, *prompt: int, within_reach: int = 0) -> list[int] | None:
    entry = cache.load(cached, tokens(*prompt), whole, within_reach=within_reach)
    return None if entry is None else entry.tokens.tolist()


def test_a_conversation_comes_back_and_leaves_the_cache() -> None:
    cache = PromptCache()
    put(cache, 1, 2, 3)
    put(cache, 1, 9)
    assert load(cache, NOTHING, 1, 2, 3, 4) == [1, 2, 3], "an empty slot offers nothing"
    assert stored(cache) == [[1, 9]]
    assert cache.size == 10


def test_less_than_a_quarter_of_an_entry_is_not_worth_its_loss() -> None:
    cache = PromptCache()
    put(cache, *range(9))
    assert load(cache, NOTHING, 0, 1, 99) is None
    assert load(cache, NOTHING, 0, 1, 2, 99) == list(range(9))


def test_an_entry_must_be_better_in_both_respects() -> None:
    slot = tokens(1, 2, 3, 4)
    cache = PromptCache()
    put(cache, 1, 2, 3, 7, 7)
    assert load(cache, slot, 1, 2, 8) is None, "as similar, and less of it is kept"
    assert load(cache, slot, 1, 2, 3, 7, 8) == [1, 2, 3, 7, 7]
    put(cache, 1, 2, 3, 7, 7, 7, 7, 7)
    assert load(cache, tokens(1, 2, 3), 1, 2, 3, 7, 8) is None, "more similar, but less of it is kept than of the slot"


def test_the_best_of_several() -> None:
    cache = PromptCache()
    put(cache, 1, 2, 9, 9)
    put(cache, 1, 2, 3, 9)
    put(cache, 1, 8)
    assert load(cache, NOTHING, 1, 2, 3, 4) == [1, 2, 3, 9]


def test_what_can_be_copied_must_be_surpassed() -> None:
    cache = PromptCache()
    put(cache, 1, 2, 3)
    assert load(cache, NOTHING, 1, 2, 3, 4, within_reach=3) is None
    assert load(cache, tokens(1), 1, 2, 3, 4, within_reach=2) == [1, 2, 3], "nothing of the slot would be used"


def test_a_failed_restore_keeps_the_entry() -> None:
    cache = PromptCache()
    put(cache, 1, 2, 3)
    with pytest.raises(RestoreFailed):
        cache.load(NOTHING, tokens(1, 2, 3), lambda state: len(state) - 1)
    assert stored(cache) == [[1, 2, 3]]
    cache.check_integrity()


# --- update -----------------------------------------------------------------------------------------------------------


def test_update_may_empty_the_cache() -> None:
    cache = PromptCache()
    for token in range(3):
        put(cache, token)
    cache.limit_size = 25
    cache.update()
    assert stored(cache) == [[1], [2]]
    cache.limit_size = 5
    cache.update()
    assert stored(cache) == []


def test_the_limit_in_tokens() -> None:
    cache = PromptCache(limit_tokens=5)
    put(cache, 1, 1, 1)
    put(cache, 2, 2, 2)
    cache.update()
    assert stored(cache) == [[2, 2, 2]]
    bytes_allow_more = PromptCache(limit_tokens=5, limit_size=100)
    bytes_allow_more.alloc(tokens(1, 1, 1), 30)
    bytes_allow_more.alloc(tokens(2, 2, 2), 30)
    bytes_allow_more.update()
    assert len(bytes_allow_more) == 2, "100 bytes are room for 10 tokens of 10 bytes"


# --- properties -------------------------------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class PromptCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.failing = False
        self.cache = PromptCache(limit_size=60, limit_tokens=12, allocate=self.allocate)

    def allocate(self, size: int) -> State:
        if self.failing:
            raise MemoryError
        return np.full(size, 7, np.uint8)

    @rule(prompt=prompts, size=st.integers(1, 80))
    def alloc(self, prompt: list[int], size: int) -> None:
        covered = any(entry[: len(prompt)] == prompt for entry in stored(self.cache))
        entry = self.cache.alloc(tokens(*prompt), size)
        assert (entry is None) == (covered or size > self.cache.limit_size)
        if entry is not None:
            assert len(entry.state) == size
            assert stored(self.cache)[-1] == prompt
            assert not any(prompt[: len(other)] == other for other in stored(self.cache)[:-1])

    @rule(prompt=prompts, size=st.integers(1, 80))
    def alloc_without_memory(self, prompt: list[int], size: int) -> None:
        self.failing = True
        assert self.cache.alloc(tokens(*prompt), size) is None
        self.failing = False
        self.cache.limit_size = max(self.cache.limit_size, 60)

    @rule(cached=st.lists(st.integers(0, 2), max_size=8), prompt=prompts, works=st.booleans(), reach=st.integers(0, 8))
    def load(self, cached: list[int], prompt: list[int], works: bool, reach: int) -> None:
        before = stored(self.cache)
        slot = np.array(cached, np.int32)
        reach = min(reach, len(prompt))
        try:
            entry = self.cache.load(slot, tokens(*prompt), whole if works else lambda _: -1, within_reach=reach)
        except RestoreFailed:
            assert not works
            assert stored(self.cache) == before
            return
        if entry is None:
            assert stored(self.cache) == before
            return
        assert works
        got = entry.tokens.tolist()
        before.remove(got)
        assert stored(self.cache) == before
        common = common_prefix(entry.tokens, tokens(*prompt))
        assert common > max(common_prefix(slot, tokens(*prompt)), reach)
        assert common >= len(got) / 4

    @rule()
    def update(self) -> None:
        before = stored(self.cache)
        self.cache.update()
        after = stored(self.cache)
        assert after == before[len(before) - len(after) :], "only the oldest go"

    @invariant()
    def books_are_straight(self) -> None:
        self.cache.check_integrity()


TestPromptCacheMachine = PromptCacheMachine.TestCase


@given(st.lists(prompts, max_size=6), prompts)
def test_longest_is_what_load_gives(entries: list[list[int]], prompt: list[int]) -> None:
    cache = PromptCache()
    for entry in entries:
        put(cache, *entry)
    longest = cache.longest(tokens(*prompt))
    loaded = cache.load(NOTHING, tokens(*prompt), whole)
    assert (longest > 0) == (loaded is not None)
    if loaded is not None:
        assert longest >= common_prefix(loaded.tokens, tokens(*prompt))
