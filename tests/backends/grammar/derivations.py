"""Random texts of a grammar, to see whether they are what it is for."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from backends.grammar.gbnf import parse
from backends.grammar.gbnf_rules import CharSet, End, Ref, Rules, Symbol

_DEEP = 24
_CHARS = 'ab01 \n"\\</é日🙂'


def derived(gbnf: str, random: Random) -> str:
    """A text that the grammar admits. Beyond a depth, every choice is the one that ends first."""
    rules, least = _read(gbnf)
    parts: list[str] = []
    todo: list[tuple[Symbol, int]] = [(Ref(rules.root), 0)]
    while todo:
        symbol, depth = todo.pop()
        match symbol:
            case Ref(rule):
                options = rules.starts[rule]
                if depth > _DEEP:
                    options = (min(options, key=lambda start: _depth(rules, start, least)),)
                body = _alternate(rules, random.choice(options))
                todo += [(part, depth + 1) for part in reversed(body)]
            case CharSet():
                parts.append(_char(symbol, random))
            case _:
                raise AssertionError(f"no character: {symbol}")
    return "".join(parts)


@lru_cache(maxsize=2)
def _read(gbnf: str) -> tuple[Rules, dict[int, int]]:
    rules = parse(gbnf)
    return rules, _least_depths(rules)


def _alternate(rules: Rules, start: int) -> list[Symbol]:
    end = start
    while not isinstance(rules.symbols[end], End):
        end += 1
    return list(rules.symbols[start:end])


def _char(chars: CharSet, random: Random) -> str:
    usual = [char for char in _CHARS if chars.matches(ord(char))]
    if usual and random.random() < 0.7:
        return random.choice(usual)
    if chars.negated:
        return next(chr(code) for code in iter(lambda: random.randrange(0x20, 0x3000), -1) if chars.matches(code))
    low, high = random.choice(chars.ranges)
    return chr(random.randint(low, high))


def _depth(rules: Rules, start: int, least: dict[int, int]) -> float:
    return max((least.get(s.rule, 10**6) for s in _alternate(rules, start) if isinstance(s, Ref)), default=0)


def _least_depths(rules: Rules) -> dict[int, int]:
    least: dict[int, int] = {}
    changed = True
    while changed:
        changed = False
        for rule, starts in enumerate(rules.starts):
            found = 1 + min(_depth(rules, start, least) for start in starts)
            if found < least.get(rule, 10**6):
                least[rule], changed = int(found), True
    return least
