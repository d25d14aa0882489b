"""Guessing the next tokens: which they may be, and how many guesses are worth a step's time. Decisions only.

A step computes a sequence's next token; behind it, it can compute guesses of what follows. Every token is still drawn
from the model's own logits, so a guess decides nothing but how many tokens one step may bring.

A guess costs time whether it is right or not. Measured (SmolLM2-135M Q4_1, 2 threads, 300 tokens of context; ms of one
`llama_decode` with logits for all rows):

| rows | 1 | 2 | 3 | 4 | 5 | 6 | 8 | 12 | 16 | 32 |
|---|---|---|---|---|---|---|---|---|---|---|
| of one sequence, one cache per slot | 19 | 26 | 34 | 42 | 52 | 60 | 74 | 107 | 140 | 277 |
| of one sequence, a common cache | 21 | 26 | 36 | 45 | 56 | 64 | 78 | 119 | 156 | 305 |
| one each of as many sequences, one cache per slot | 19 | 25 | | 45 | | | 76 | | | |

So on this CPU a step of r rows takes 1 + 0.42 (r - 1) times as long as one of a single row, whoever they belong to:
computing is what takes the time, and reading the weights only what the first row waits for. A lone stream gains by a
guess that is right more often than 0.42; of 8 streams, whose rows have paid for the weights already, each must be sure
to 0.85 (`Price`). Larger models, and GPUs more so, wait for their memory: there `row_cost` is smaller.

With one KV cache per slot there is one cost more: llama.cpp computes sequences together only while each of them has a
row left, and what is longer computes its rest apart: rows (5, 1, 1, 1) took 87 ms, (2, 2, 2, 2) 76 (a common cache: 82
and 78). Hence `equal_lengths`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from backends.llamacpp.slots import Tokens

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_TRIES = 16
"""Earlier places that are compared for the longest match. Common n-grams have thousands."""
_LONGEST = 32
"""Longer matches are not told apart."""

_NGRAM_PRIORS = (0.5, 0.5, 0.5, 0.75, 0.85, 0.93, 0.95)
"""By the bits of how many tokens agree: for 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31, more. In 20 answers of SmolLM2
(questions, edits, code), right were 0.42-0.52 of the guesses behind 2 or 3 tokens that agree, 0.46-0.96 behind 4 to 7,
0.67-1.00 behind 8 to 15 and 0.91-0.99 behind more."""
_MODEL_PRIOR = 0.8
_MARGIN = 1.2
"""How much more than its cost a guess must bring: of chances that are estimated, those that are taken are rather too
high. Counted over recorded answers with the costs above: four streams of free text at once lost 2 % without a margin.
With it nothing was lost, and a lone stream that edits kept its gain (1.7 times as fast, at best)."""
_PRIOR_WEIGHT = 4.0
_FADING = 0.95


class History:
    """The tokens of a prompt and its answer so far, with an index from each n-gram to its last places.

    Keeps at least the last `limit` tokens and at most twice as many. A token costs one entry of a hash table; a search,
    at most `_TRIES` comparisons.
    """

    def __init__(self, tokens: Tokens, size: int, limit: int) -> None:
        self._size = size
        self._limit = max(limit, size)
        self._fill(tokens)

    def _fill(self, tokens: Tokens) -> None:
        tokens = tokens[-self._limit :].astype(np.intc)
        self._tokens = array("i", tokens.tobytes())
        # Element e is about the n-gram before position e: where it stood before, behind its end; 0 if nowhere.
        self._earlier = array("i", bytes(self._tokens.itemsize * len(tokens)))
        self._last: dict[int, int] = {}
        count = len(tokens) - self._size  # n-grams that something follows
        if count <= 0:
            return
        keys = np.zeros(count, np.uint64)
        for offset in range(self._size):
            keys = keys * np.uint64(_MULTIPLIER) + tokens[offset : offset + count].astype(np.uint64)
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        earlier = np.frombuffer(self._earlier, np.intc)
        earlier[order[1:][same] + self._size] = order[:-1][same] + self._size
        self._last = dict(zip(keys.tolist(), range(self._size, self._size + count), strict=True))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, position: int) -> int:
        return self._tokens[position]

    def append(self, token: int) -> int:
        """Returns how many of the oldest tokens were forgotten; positions are smaller by that from here on."""
        place = len(self._tokens)
        key = self._key() if place >= self._size else -1
        self._earlier.append(self._last.get(key, 0))
        if key >= 0:
            self._last[key] = place
        self._tokens.append(token)
        if len(self._tokens) < 2 * self._limit:
            return 0
        dropped = len(self._tokens) - self._limit
        self._fill(np.frombuffer(self._tokens, np.intc).copy())
        return dropped

    def find(self) -> tuple[int, int]:
        """Behind the earlier place that ends as the history does: its position, and how many tokens are the same.

        Of several the one that agrees the longest, and of those the latest. (0, 0) if not even an n-gram does.
        """
        best, longest = 0, self._size - 1
        if len(self._tokens) < self._size:
            return 0, 0
        place = self._last.get(self._key(), 0)
        for _ in range(_TRIES):
            if not place:
                break
            if (length := self._agreement(place)) > longest:
                best, longest = place, length
                if length == _LONGEST:
                    break
            place = self._earlier[place]
        return (best, longest) if best else (0, 0)

    def continuation(self, position: int, count: int) -> Tokens:
        """`count` tokens from `position` on. Where the history ends, it is taken to repeat what it repeats already."""
        tokens = np.array(self._tokens[position : position + count], np.int32)
        return np.resize(tokens, count)

    def _key(self) -> int:
        key = 0
        for token in self._tokens[-self._size :]:
            key = (key * _MULTIPLIER + token) & _MASK
        return key

    def _agreement(self, place: int) -> int:
        tokens, end = self._tokens, len(self._tokens)
        most = min(place, _LONGEST)
        for length in range(most):
            if tokens[place - 1 - length] != tokens[end - 1 - length]:
                return length
        return most


class HitRate:
    """How often guesses were right lately: what is expected (`prior`) until there is evidence, then what was seen."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = self._seen = 0.0

    @property
    def value(self) -> float:
        return (self._hits + self._prior * _PRIOR_WEIGHT) / (self._seen + _PRIOR_WEIGHT)

    def observe(self, hit: bool) -> None:
        self.fade()
        self._hits += hit
        self._seen += 1

    def fade(self) -> None:
        """Evidence loses weight with time."""
        self._hits *= _FADING
        self._seen *= _FADING


class NgramDrafter:
    """Guesses that a text goes on as it went on before. Costs no computation, so every token checks a guess.

    How likely a guess is depends on how many tokens before it agree; that is learned for each request, from all its
    tokens, whether or not a step computed guesses.
    """

    def __init__(self, tokens: Tokens, size: int, limit: int) -> None:
        self._history = History(tokens, size, limit)
        self._rates = [HitRate(prior) for prior in _NGRAM_PRIORS]
        self._place, self._agreeing = self._history.find()  # the guess for the next token, if place is not 0

    def feed(self, tokens: Iterable[int]) -> None:
        """What was drawn."""
        for token in tokens:
            if self._place:
                hit = self._history[self._place] == token
                self._rate(self._agreeing).observe(hit)
                self._place, self._agreeing = (self._place + 1, self._agreeing + 1) if hit else (0, 0)
            dropped = self._history.append(token)
            self._place = max(self._place - dropped, 0)
            if not self._place:
                self._place, self._agreeing = self._history.find()

    def chances(self, most: int, floor: float) -> list[float]:
        """The probabilities that the first guess is right, the first two are, ..., as long as they are over `floor`."""
        chances: list[float] = []
        if not self._place:
            return chances
        chance = 1.0
        for ahead in range(most):
            chance *= self._rate(self._agreeing + ahead).value
            if chance <= floor:
                break
            chances.append(chance)
        return chances

    def guess(self, count: int) -> Tokens:
        return self._history.continuation(self._place, count)

    def _rate(self, agreeing: int) -> HitRate:
        return self._rates[min(agreeing.bit_length(), len(self._rates) - 1)]


class ModelDrafter:
    """How far the guesses of a draft model are to be trusted in one request."""

    def __init__(self) -> None:
        self._rate = HitRate(_MODEL_PRIOR)
        self._guessed: list[int] = []

    def feed(self, tokens: Iterable[int]) -> None:
        """What was drawn behind the token that the guesses followed."""
        if not self._guessed:
            self._rate.fade()  # a bad spell ends: without guesses there is no evidence that would say so
        for guess, token in zip(self._guessed, tokens, strict=False):
            self._rate.observe(guess == token)
        self._guessed = []

    def guessed(self, tokens: Tokens) -> None:
        self._guessed = tokens.tolist()

    def chances(self, most: int, floor: float) -> list[float]:
        """As those of `NgramDrafter`."""
        chances: list[float] = []
        while len(chances) < most and (chance := self._rate.value ** (len(chances) + 1)) > floor:
            chances.append(chance)
        return chances


Drafter = NgramDrafter | ModelDrafter


class Price(msgspec.Struct, frozen=True):
    """What guesses cost, in tokens: as many as the step's streams would have got in the time without guesses.

    `row` is the price of one guess, `apart` that of computing something a second time in one step.
    """

    row: float
    apart: float

    @classmethod
    def of(cls, streams: int, row_cost: float) -> Price:
        """`row_cost`: what one more row takes, of the time of a step with a single row."""
        rate = _MARGIN * streams / (1 + row_cost * (streams - 1))
        return cls(row_cost * rate, (1 - row_cost) * rate)


def lengths(chances: Sequence[Sequence[float]], price: Price) -> list[int]:
    """How many guesses of each sequence are worth computing, where unequal lengths cost nothing extra."""
    return [max(range(len(gains) + 1), key=[0.0, *gains].__getitem__) for gains in _gains(chances, price)]


def equal_lengths(chances: Sequence[Sequence[float]], price: Price, streams: int) -> list[int]:
    """The same where the rows that only some of `streams` have are computed apart: one length, or none."""
    gains = _gains(chances, price)
    best, length = 0.0, 0
    for candidate in range(1, max(map(len, gains), default=0) + 1):
        takers = [line[candidate - 1] for line in gains if len(line) >= candidate and line[candidate - 1] > 0]
        gain = sum(takers) - (price.apart if len(takers) < streams else 0.0)
        if gain > best:
            best, length = gain, candidate
    return [length if length and len(line) >= length and line[length - 1] > 0 else 0 for line in gains]


def _gains(chances: Sequence[Sequence[float]], price: Price) -> list[list[float]]:
    """For each sequence: what its first guess brings, in tokens, what its first two bring, ..."""
    return [list(accumulate(chance - price.row for chance in line)) for line in chances]
